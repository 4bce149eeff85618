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
        Self {
            resource,
            status,
            kind,
            failing: None,
            faulty: HashMap::new(),
        }
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

    /// Something failed. The last known state stays; the next attempt follows.
    pub(super) fn failed(&mut self, failure: &Failure) {
        if self.failing.replace(failure.class) == Some(failure.class) {
            debug!(resource = self.resource, "{failure}");
        } else {
            warn!(
                resource = self.resource,
                "{failure}; what is known stays, trying again"
            );
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
