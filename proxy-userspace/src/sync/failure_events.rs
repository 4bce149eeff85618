//! Reports a lasting failure to program the kernel as a Kubernetes Event, and its end as another one.

use std::time::Duration;

use tokio::time::Instant;

use crate::node::NodeEvents;

/// A failure that ends earlier appears in the log and in metrics only.
const REPORT_AFTER: Duration = Duration::from_mins(1);

/// The state of the current failure.
#[derive(Debug, Default)]
pub(super) struct FailureEvents {
    since: Option<Instant>,
    is_reported: bool,
}

impl FailureEvents {
    /// Records that programming failed at this time.
    pub(super) fn failed(&mut self, now: Instant, error: &str, events: &NodeEvents) {
        let since = *self.since.get_or_insert(now);
        if now - since >= REPORT_AFTER && !std::mem::replace(&mut self.is_reported, true) {
            let seconds = (now - since).as_secs();
            events.warning(
                "FailedToProgram",
                format!(
                    "cannot program the kernel for {seconds} s: {error}; Services keep their last state \
                     and shunt tries again"
                ),
            );
        }
    }

    /// Records that nothing fails any more.
    pub(super) fn recovered(&mut self, events: &NodeEvents) {
        self.since = None;
        if std::mem::take(&mut self.is_reported) {
            events.normal("Programmed", "all Services are served again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_failure_and_its_end_are_reported_once() {
        let (events, mut received) = NodeEvents::channel();
        let mut failure = FailureEvents::default();
        let start = Instant::now();
        let mut fail = |failure: &mut FailureEvents, seconds| {
            failure.failed(start + Duration::from_secs(seconds), "why", &events);
            received.try_recv().map(|event| (event.is_warning, event.reason)).ok()
        };
        assert_eq!(fail(&mut failure, 0), None);
        assert_eq!(fail(&mut failure, 59), None);
        assert_eq!(fail(&mut failure, 60), Some((true, "FailedToProgram")));
        assert_eq!(fail(&mut failure, 90), None);
        failure.recovered(&events);
        failure.recovered(&events);
        assert_eq!(received.try_recv().map(|event| event.reason), Ok("Programmed"));
        assert!(received.try_recv().is_err());
    }
}
