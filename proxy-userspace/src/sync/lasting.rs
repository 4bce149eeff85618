//! Failures that last are told where people look for them, and their end too.

use std::time::Duration;

use tokio::time::Instant;

use crate::node::NodeEvents;

/// What ends before is in the log and in metrics.
const WORTH_TELLING: Duration = Duration::from_mins(1);

/// What was told.
#[derive(Debug, Default)]
pub(super) struct Lasting {
    since: Option<Instant>,
    is_told: bool,
}

impl Lasting {
    /// Programming failed at this time.
    pub(super) fn goes_on(&mut self, now: Instant, error: &str, events: &NodeEvents) {
        let since = *self.since.get_or_insert(now);
        if now - since >= WORTH_TELLING && !std::mem::replace(&mut self.is_told, true) {
            let seconds = (now - since).as_secs();
            events.warning(
                "FailedToProgram",
                format!("Services are not served right for {seconds} s: {error}"),
            );
        }
    }

    /// The kernel has everything.
    pub(super) fn is_over(&mut self, events: &NodeEvents) {
        self.since = None;
        if std::mem::take(&mut self.is_told) {
            events.normal("Programmed", "all Services are served again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_failure_is_told_once_and_so_is_its_end() {
        let (events, mut told) = NodeEvents::channel();
        let mut lasting = Lasting::default();
        let start = Instant::now();
        let mut fail = |lasting: &mut Lasting, seconds| {
            lasting.goes_on(start + Duration::from_secs(seconds), "why", &events);
            told.try_recv().map(|event| (event.is_warning, event.reason)).ok()
        };
        assert_eq!(fail(&mut lasting, 0), None);
        assert_eq!(fail(&mut lasting, 59), None);
        assert_eq!(fail(&mut lasting, 60), Some((true, "FailedToProgram")));
        assert_eq!(fail(&mut lasting, 90), None);
        lasting.is_over(&events);
        lasting.is_over(&events);
        assert_eq!(told.try_recv().map(|event| event.reason), Ok("Programmed"));
        assert!(told.try_recv().is_err());
    }
}
