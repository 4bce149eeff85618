//! Says once what has changed between us and the API server, and keeps the kind's status.

use std::collections::HashMap;

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

/// The log and status of one kind.
#[derive(Debug)]
pub(super) struct Reporter {
    resource: &'static str,
    status: watch::Sender<WatchStatus>,
    kind: fn(&mut WatchStatus) -> &mut KindStatus,
    failing: Option<FailureClass>,
    /// Objects with values that had to be left out.
    faulty: HashMap<NamespacedName, Vec<Problem>>,
}

impl Reporter {
    pub(super) fn new(
        resource: &'static str,
        status: watch::Sender<WatchStatus>,
        kind: fn(&mut WatchStatus) -> &mut KindStatus,
    ) -> Self {
        Self { resource, status, kind, failing: None, faulty: HashMap::new() }
    }

    /// A complete list has come in.
    pub(super) fn listed(&mut self, objects: usize) {
        debug!(resource = self.resource, objects, "listed");
        self.set(|kind| kind.synced = true);
        self.working();
    }

    /// Changes are coming in, or would if there were any.
    pub(super) fn working(&mut self) {
        if self.failing.take().is_some() {
            info!(resource = self.resource, "the API server is being watched again");
        }
        self.set(KindStatus::connected);
    }

    /// The server does not have the kind, or does not let us have it, and that is all right.
    pub(super) fn absent(&mut self, failure: &Failure) {
        if self.failing.replace(failure.class) != Some(failure.class) {
            info!(resource = self.resource, "{failure}; going on without");
        }
        self.set(|kind| *kind = KindStatus::default());
    }

    /// Something failed. The last known state stays; the next attempt follows.
    pub(super) fn failed(&mut self, failure: &Failure) {
        if self.failing.replace(failure.class) == Some(failure.class) {
            debug!(resource = self.resource, "{failure}");
        } else {
            warn!(resource = self.resource, "{failure}; what is known stays, trying again");
        }
        let message = failure.to_string();
        self.set(|kind| kind.failed(message));
    }

    /// An object was decoded, with these values left out.
    pub(super) fn decoded(&mut self, name: &NamespacedName, problems: Vec<Problem>) {
        if problems.is_empty() {
            if self.faulty.remove(name).is_some() {
                info!(resource = self.resource, object = %name, "object is good again");
            }
        } else if self.faulty.get(name) != Some(&problems) {
            for problem in &problems {
                warn!(resource = self.resource, object = %name, "{problem}; left out");
            }
            self.faulty.insert(name.clone(), problems);
        }
    }

    /// An object could not be decoded at all.
    pub(super) fn undecodable(&mut self, name: Option<NamespacedName>, problems: Vec<Problem>) {
        let name = name.unwrap_or_else(|| NamespacedName::new("", "(without a name)"));
        if self.faulty.get(&name) != Some(&problems) {
            for problem in &problems {
                warn!(resource = self.resource, object = %name, "{problem}; object ignored");
            }
            self.faulty.insert(name, problems);
        }
    }

    /// An object is gone.
    pub(super) fn deleted(&mut self, name: &NamespacedName) {
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
    use std::{io, sync::Arc};

    use super::*;
    use crate::watch::status;

    /// The lines that `acts` log at the default level.
    fn logged(acts: impl FnOnce(&mut Reporter)) -> Vec<String> {
        let (log, writer) = io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .without_time()
            .with_ansi(false)
            .with_writer(Arc::new(writer))
            .finish();
        let mut reporter = Reporter::new("services", status::channel(), |status| &mut status.services);
        tracing::subscriber::with_default(subscriber, || acts(&mut reporter));
        io::read_to_string(log).unwrap().lines().map(str::to_owned).collect()
    }

    fn failure(class: FailureClass, message: &str) -> Failure {
        Failure::new(class, message)
    }

    #[test]
    fn errors_are_logged_once_for_each_change_of_state() {
        let lines = logged(|reporter| {
            reporter.working();
            for attempt in 0..5 {
                reporter.failed(&failure(FailureClass::Unreachable, &format!("refused, attempt {attempt}")));
            }
            reporter.failed(&failure(FailureClass::Forbidden, "services is forbidden"));
            reporter.failed(&failure(FailureClass::Forbidden, "services is forbidden"));
            reporter.working();
            reporter.working();
            reporter.failed(&failure(FailureClass::Unreachable, "refused"));
        });
        assert_eq!(lines.len(), 4, "{lines:#?}");
        assert!(lines[0].contains("cannot be reached: refused, attempt 0"), "{}", lines[0]);
        assert!(lines[1].contains("(403): services is forbidden"), "{}", lines[1]);
        assert!(lines[2].contains("being watched again"), "{}", lines[2]);
        assert!(lines[3].contains("cannot be reached: refused"), "{}", lines[3]);
    }

    #[test]
    fn faulty_objects_are_logged_once_until_they_change() {
        let name = NamespacedName::new("shop", "web");
        let problem =
            |what: &str| vec![Problem { field: "spec.ports[0].port".to_owned(), what: what.to_owned() }];
        let lines = logged(|reporter| {
            reporter.decoded(&name, problem("0 is not a port number"));
            reporter.decoded(&name, problem("0 is not a port number"));
            reporter.decoded(&name, problem("-1 is not a port number"));
            reporter.decoded(&name, Vec::new());
            reporter.decoded(&name, Vec::new());
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains("spec.ports[0].port: 0 is not a port number; left out"), "{}", lines[0]);
        assert!(lines[0].contains("object=shop/web"), "{}", lines[0]);
        assert!(lines[2].contains("good again"), "{}", lines[2]);
    }
}
