//! Logs each change of state of one kind once, and updates its status.

use std::collections::HashMap;

use jiff::Timestamp;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::failure::{Failure, FailureClass};
use crate::{
    model::NamespacedName,
    watch::{
        decode::Problem,
        status::{KindStatus, WatchStatus},
    },
};

/// Reports one kind in the log and in the status.
#[derive(Debug)]
pub(super) struct Reporter {
    resource: &'static str,
    status: watch::Sender<WatchStatus>,
    kind: fn(&mut WatchStatus) -> &mut KindStatus,
    /// The class of the last failure, if no attempt succeeded since.
    failing: Option<FailureClass>,
    /// The objects with invalid values, by namespace and name, which may be invalid too.
    faulty: HashMap<String, Vec<Problem>>,
}

impl Reporter {
    pub(super) fn new(
        resource: &'static str,
        status: watch::Sender<WatchStatus>,
        kind: fn(&mut WatchStatus) -> &mut KindStatus,
    ) -> Self {
        Self { resource, status, kind, failing: None, faulty: HashMap::new() }
    }

    /// A complete list came.
    pub(super) fn listed(&mut self, objects: usize) {
        debug!(resource = self.resource, objects, "listed");
        self.set(|kind| kind.synced = true);
        self.received();
        self.connected();
    }

    /// A change or a bookmark came.
    pub(super) fn received(&self) {
        self.status.send_if_modified(|status| {
            (self.kind)(status).last_event = Some(Timestamp::now());
            false
        });
    }

    /// The kind is watched.
    pub(super) fn connected(&mut self) {
        if self.failing.take().is_some() {
            info!(resource = self.resource, "watching the API server again");
        }
        self.set(KindStatus::connected);
    }

    /// The server does not have the kind, or does not permit to read it. shunt does not need it.
    pub(super) fn unavailable(&mut self, failure: &Failure) {
        if self.failing.replace(failure.class) != Some(failure.class) {
            info!(resource = self.resource, "{failure}; shunt continues without this kind");
        }
        self.set(|kind| *kind = KindStatus::default());
    }

    /// A request or the watch failed. The last known state stays, and the next attempt follows.
    pub(super) fn failed(&mut self, failure: &Failure) {
        if self.failing.replace(failure.class) == Some(failure.class) {
            debug!(resource = self.resource, "{failure}");
        } else {
            warn!(resource = self.resource, "{failure}; the last known objects stay; shunt tries again");
        }
        let message = failure.to_string();
        self.set(|kind| kind.failed(message));
    }

    /// An object was decoded. `problems` are its invalid values, which are ignored.
    pub(super) fn decoded(&mut self, name: impl FnOnce() -> NamespacedName, problems: Vec<Problem>) {
        if problems.is_empty() && self.faulty.is_empty() {
            return;
        }
        let name = name();
        if !problems.is_empty() {
            self.report_problems(name.to_string(), problems, "this value is ignored");
        } else if self.faulty.remove(&name.to_string()).is_some() {
            info!(resource = self.resource, object = %name, "the object is valid again");
        }
    }

    /// An object could not be decoded at all.
    pub(super) fn undecodable(&mut self, name: Option<String>, problems: Vec<Problem>) {
        let name = name.unwrap_or_else(|| "(without a name)".to_owned());
        self.report_problems(name, problems, "the object is ignored");
    }

    fn report_problems(&mut self, name: String, problems: Vec<Problem>, effect: &str) {
        if self.faulty.get(&name) != Some(&problems) {
            for problem in &problems {
                warn!(resource = self.resource, object = %name, "{problem}; {effect}");
            }
            self.faulty.insert(name, problems);
        }
    }

    /// An object was deleted.
    pub(super) fn deleted(&mut self, name: &str) {
        self.faulty.remove(name);
    }

    fn set(&self, change: impl FnOnce(&mut KindStatus)) {
        self.status.send_if_modified(|status| {
            let kind = (self.kind)(status);
            let before = kind.clone();
            change(kind);
            *kind != before
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::captured_log;

    /// Returns the lines that `act` logs at the default level.
    fn logged(act: impl FnOnce(&mut Reporter)) -> Vec<String> {
        let mut reporter = Reporter::new("services", watch::Sender::default(), |status| &mut status.services);
        captured_log::logged(|| act(&mut reporter)).lines().map(str::to_owned).collect()
    }

    fn failure(class: FailureClass, message: &str) -> Failure {
        Failure::new(class, message)
    }

    #[test]
    fn a_failure_is_logged_once_until_the_state_changes() {
        let lines = logged(|reporter| {
            reporter.connected();
            for attempt in 0..5 {
                reporter.failed(&failure(FailureClass::Unreachable, &format!("refused, attempt {attempt}")));
            }
            reporter.failed(&failure(FailureClass::Forbidden, "services is forbidden"));
            reporter.failed(&failure(FailureClass::Forbidden, "services is forbidden"));
            reporter.connected();
            reporter.connected();
            reporter.failed(&failure(FailureClass::Unreachable, "refused"));
        });
        assert_eq!(lines.len(), 4, "{lines:#?}");
        assert!(lines[0].contains("cannot connect to the API server: refused, attempt 0"), "{}", lines[0]);
        assert!(lines[1].contains("(403): services is forbidden"), "{}", lines[1]);
        assert!(lines[2].contains("watching the API server again"), "{}", lines[2]);
        assert!(lines[3].contains("cannot connect to the API server: refused"), "{}", lines[3]);
    }

    #[test]
    fn an_invalid_object_is_logged_once_until_it_changes() {
        let name = NamespacedName::new("shop", "web");
        let problem =
            |what: &str| vec![Problem { field: "spec.ports[0].port".to_owned(), what: what.to_owned() }];
        let lines = logged(|reporter| {
            reporter.decoded(|| name.clone(), problem("0 is not a port number"));
            reporter.decoded(|| name.clone(), problem("0 is not a port number"));
            reporter.decoded(|| name.clone(), problem("-1 is not a port number"));
            reporter.decoded(|| name.clone(), Vec::new());
            reporter.decoded(|| name.clone(), Vec::new());
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(
            lines[0].contains("spec.ports[0].port: 0 is not a port number; this value is ignored"),
            "{}",
            lines[0]
        );
        assert!(lines[0].contains("object=shop/web"), "{}", lines[0]);
        assert!(lines[2].contains("valid again"), "{}", lines[2]);
    }
}
