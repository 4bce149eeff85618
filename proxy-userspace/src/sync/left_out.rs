//! Links that are served without what comes in on them: counted, and told where people look, once for as long as there are any.

use std::sync::Arc;

use super::Outputs;

/// What was told.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    is_told: bool,
}

impl LeftOut {
    pub(super) fn report(&mut self, links: &[Arc<str>], outputs: &Outputs) {
        outputs.metrics.set_links_left_out(links.len());
        let was_told = std::mem::replace(&mut self.is_told, !links.is_empty());
        if let Some(first) = links.first().filter(|_| !was_told) {
            let note = format!(
                "what comes in on {} of this node's links is not translated, as on {first}; the log says why",
                links.len()
            );
            outputs.events.warning("LinksLeftOut", note);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::{health::ProxyHealth, metrics::Metrics, node::NodeEvents};

    #[test]
    fn links_that_are_left_out_are_counted_and_told_once_until_there_are_none() {
        let (events, mut told) = NodeEvents::channel();
        let outputs = Outputs {
            metrics: Metrics::default(),
            health: ProxyHealth::new(std::time::Duration::from_mins(1)),
            events,
            health_checks: watch::Sender::default(),
        };
        let mut left_out = LeftOut::default();
        let [one, other]: [Arc<str>; 2] = ["veth1".into(), "veth2".into()];
        let mut report = |links: &[Arc<str>]| {
            left_out.report(links, &outputs);
            let (_, count) = outputs.metrics.exposition().encode(None).unwrap();
            let count = count.lines().find_map(|line| line.strip_prefix("shunt_links_left_out "));
            (count.map(str::to_owned), told.try_recv().ok().map(|event| event.note))
        };
        let count = |number: usize| Some(number.to_string());
        assert_eq!(report(&[]), (count(0), None));
        let (counted, note) = report(std::slice::from_ref(&one));
        assert!(counted == count(1) && note.is_some_and(|note| note.contains("veth1")));
        assert_eq!(report(&[one.clone(), other]), (count(2), None));
        assert_eq!(report(&[]), (count(0), None));
        assert!(report(&[one]).1.is_some());
    }
}
