//! Links that have no room for link programs: counted, and reported as a Kubernetes Event when the
//! first one appears.

use std::sync::Arc;

use super::Outputs;

/// Reports the links that are left out after a sync.
pub(super) fn report(links: Vec<Arc<str>>, outputs: &Outputs) {
    let count = links.len();
    outputs.metrics.set_links_left_out(count);
    let first = links.first().cloned();
    let before = outputs.status.set_links_left_out(links);
    if let Some(first) = first.filter(|_| before.is_empty()) {
        let note = format!(
            "there is no room for link programs on {count} of this node's links, such as {first}: the backstop \
             serves them, unless --backstop is never; the log of shunt names the reason"
        );
        outputs.events.warning("LinksLeftOut", note);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::node::NodeEvents;

    #[test]
    fn left_out_links_are_counted_and_reported_once() {
        let (events, mut received) = NodeEvents::channel();
        let outputs = Outputs::new(Duration::from_mins(1), events);
        let [one, other]: [Arc<str>; 2] = ["veth1".into(), "veth2".into()];
        let mut report = |links: &[Arc<str>]| {
            report(links.to_vec(), &outputs);
            let (_, count) = outputs.metrics.exposition().encode(None).unwrap();
            let count = count.lines().find_map(|line| line.strip_prefix("shunt_links_left_out "));
            (count.map(str::to_owned), received.try_recv().ok().map(|event| event.note))
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
