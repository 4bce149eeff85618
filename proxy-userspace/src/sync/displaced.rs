//! Links on which another program insists on running before shunt's: shown as a metric, and
//! reported as a Kubernetes Event when the first one appears.

use super::Outputs;
use crate::dataplane::DisplacedLink;

/// Remembers whether displaced programs are reported.
#[derive(Debug, Default)]
pub(super) struct DisplacedLinks {
    is_reported: bool,
}

impl DisplacedLinks {
    pub(super) fn report(&mut self, links: &[DisplacedLink], outputs: &Outputs) {
        outputs.metrics.set_links_displaced(links);
        let was_reported = std::mem::replace(&mut self.is_reported, !links.is_empty());
        if let Some(DisplacedLink { link, by }) = links.first().filter(|_| !was_reported) {
            let note = format!(
                "another program insists on running before shunt's on {} of this node's links, such as {by} on {link}; \
                 the log of shunt names the remedy",
                links.len()
            );
            outputs.events.warning("LinksDisplaced", note);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::{health::ProxyHealth, metrics::Metrics, node::NodeEvents};

    #[test]
    fn displaced_programs_are_shown_by_link_and_reported_once() {
        let (events, mut received) = NodeEvents::channel();
        let outputs = Outputs {
            metrics: Metrics::default(),
            health: ProxyHealth::new(std::time::Duration::from_mins(1)),
            events,
            health_checks: watch::Sender::default(),
        };
        let mut displaced = DisplacedLinks::default();
        let link = |link: &str| DisplacedLink { link: link.into(), by: "cni_ingress".into() };
        let mut report = |links: &[DisplacedLink]| {
            displaced.report(links, &outputs);
            let (_, text) = outputs.metrics.exposition().encode(None).unwrap();
            let shown = text.lines().filter(|line| line.starts_with("shunt_links_displaced{")).count();
            (shown, received.try_recv().ok().map(|event| event.note))
        };
        assert_eq!(report(&[]), (0, None));
        let (shown, note) = report(&[link("eth0")]);
        assert!(shown == 1 && note.is_some_and(|note| note.contains("cni_ingress on eth0")));
        assert_eq!(report(&[link("eth0"), link("eth1")]), (2, None));
        assert_eq!(report(&[]), (0, None));
        assert!(report(&[link("eth0")]).1.is_some());
    }
}
