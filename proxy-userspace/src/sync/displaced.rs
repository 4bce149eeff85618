//! Links on which another program insists on running before shunt's: shown as a metric, and
//! reported as a Kubernetes Event when the first one appears.

use super::Outputs;
use crate::dataplane::DisplacedLink;

/// Reports the displaced programs after a sync.
pub(super) fn report(links: Vec<DisplacedLink>, outputs: &Outputs) {
    let count = links.len();
    outputs.metrics.set_links_displaced(&links);
    let first = links.first().cloned();
    let before = outputs.status.set_links_displaced(links);
    if let Some(DisplacedLink { link, by }) = first.filter(|_| before.is_empty()) {
        let note = format!(
            "another program insists on running before shunt's on {count} of this node's links, such as {by} on {link}; \
             the log of shunt names the remedy"
        );
        outputs.events.warning("LinksDisplaced", note);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::node::NodeEvents;

    #[test]
    fn displaced_programs_are_shown_by_link_and_reported_once() {
        let (events, mut received) = NodeEvents::channel();
        let outputs = Outputs::new(Duration::from_mins(1), events);
        let link = |link: &str| DisplacedLink { link: link.into(), by: "cni_ingress".into() };
        let mut report = |links: &[DisplacedLink]| {
            report(links.to_vec(), &outputs);
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
