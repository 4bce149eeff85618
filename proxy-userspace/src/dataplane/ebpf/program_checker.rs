//! Compares the programs on links and the netfilter rules with what they must be, in a thread of
//! its own, so that no change waits for it: a node may have hundreds of links, and the commands
//! that list rules take tens of milliseconds.
//!
//! The sync thread says each time what must be there. A plan that changes it meanwhile makes the
//! result useless. If something differs, the sync thread is notified: it observes programs and
//! rules itself and repairs them.

use std::sync::{
    Arc, Mutex,
    mpsc::{self, Receiver, SyncSender},
};

use super::{
    OnDrift,
    links::{ExpectedLinks, LinkReader},
    plan::step::Step,
    rules::Rules,
};
use crate::{
    dataplane::lock,
    kernel::{KernelError, spawn},
};

/// What must be on links, and the rules that must be installed.
#[derive(Debug)]
pub(super) struct Expected {
    /// `None` if the sync thread reads the links itself.
    pub(super) links: Option<ExpectedLinks>,
    /// A copy: the sync thread may install rules at any time.
    pub(super) rules: Option<Rules>,
}

/// The numbers of plans that changed what is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Changes {
    links: u64,
    rules: u64,
}

/// What the two threads share.
#[derive(Debug, Default)]
struct Shared {
    changes: Changes,
    /// The next comparison, and the changes before it. A newer one replaces it.
    next: Option<(Expected, Changes)>,
    /// Something differs, or could not be compared, or was reported to be changed.
    is_doubtful: bool,
}

impl Shared {
    /// Records that these steps are about to be made. With `changes_marks` the rules change too.
    fn begin_plan(&mut self, steps: &[Step], changes_marks: bool) {
        self.changes.links += u64::from(steps.iter().any(|step| step.link().is_some()));
        let rules = changes_marks || steps.iter().any(Step::may_change_rules);
        self.changes.rules += u64::from(rules);
    }

    /// Takes a result. Returns true if the sync thread is to be notified. If a plan changed the
    /// same meanwhile, the result says nothing, and the next full sync observes on its own thread.
    fn take_result(&mut self, is_same: bool, is_unchanged: impl Fn(Changes) -> bool) -> bool {
        let is_unchanged = is_unchanged(self.changes);
        self.is_doubtful |= !is_same || !is_unchanged;
        !is_same && is_unchanged
    }
}

/// A thread that compares programs and rules. It ends when this is dropped.
pub(super) struct ProgramChecker {
    shared: Arc<Mutex<Shared>>,
    wake: SyncSender<()>,
}

impl ProgramChecker {
    /// Starts the thread. It calls `on_drift` if something differs.
    pub(super) fn start(links: LinkReader, on_drift: OnDrift) -> Result<Self, KernelError> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (wake, woken) = mpsc::sync_channel(1);
        let check = Check { shared: Arc::clone(&shared), links, on_drift };
        spawn("program-check", move || check.run(&woken))?;
        Ok(Self { shared, wake })
    }

    /// See [`Shared::begin_plan`].
    pub(super) fn begin_plan(&self, steps: &[Step], changes_marks: bool) {
        lock(&self.shared).begin_plan(steps, changes_marks);
    }

    /// Records that the next observation must not rely on the thread.
    pub(super) fn doubt(&self) {
        lock(&self.shared).is_doubtful = true;
    }

    /// Returns true if something differed, could not be compared, or was reported to be changed.
    /// The caller then observes everything.
    pub(super) fn is_in_doubt(&self) -> bool {
        lock(&self.shared).is_doubtful
    }

    /// Records that the caller is about to observe everything.
    pub(super) fn forget_doubt(&self) {
        lock(&self.shared).is_doubtful = false;
    }

    /// Starts a comparison.
    pub(super) fn start_comparison(&self, expected: Expected) {
        let mut shared = lock(&self.shared);
        shared.next = Some((expected, shared.changes));
        // If the channel is full, the thread is about to take it. It lives as long as this.
        let _ = self.wake.try_send(());
    }
}

/// The work of the thread.
struct Check {
    shared: Arc<Mutex<Shared>>,
    links: LinkReader,
    on_drift: OnDrift,
}

impl Check {
    fn run(&self, woken: &Receiver<()>) {
        while woken.recv().is_ok() {
            let next = lock(&self.shared).next.take();
            if let Some((expected, before)) = next {
                self.compare(&expected, before);
            }
        }
    }

    fn compare(&self, expected: &Expected, before: Changes) {
        if let Some(links) = &expected.links {
            let are_attached = self.links.finds(links).unwrap_or_else(|error| {
                tracing::debug!(%error, "cannot read the programs on links");
                false
            });
            self.judge("programs on links", are_attached, |changes| changes.links == before.links);
        }
        if let Some(rules) = &expected.rules {
            let are_installed = rules.are_installed();
            // Commands that did not start say nothing, and nothing is repaired any more.
            if !rules.is_shutting_down() {
                self.judge("netfilter rules", are_installed, |changes| changes.rules == before.rules);
            }
        }
    }

    fn judge(&self, what: &str, is_same: bool, is_unchanged: impl Fn(Changes) -> bool) {
        if lock(&self.shared).take_result(is_same, is_unchanged) {
            tracing::debug!(what, "these differ from what they must be");
            (self.on_drift)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::rules::RuleDuties, *};

    #[test]
    fn result_counts_only_if_no_plan_changed_the_same_meanwhile() {
        let changes_rules: &[Step] = &[Step::Attach, Step::InstallRules(RuleDuties::ALL)];
        for (steps, changes_marks) in [(changes_rules, false), (&[], true)] {
            let mut shared = Shared::default();
            let before = shared.changes;
            shared.begin_plan(steps, changes_marks);
            assert!(!shared.take_result(true, |changes| changes.links == before.links));
            assert!(!shared.is_doubtful, "no link changed");
            assert!(!shared.take_result(false, |changes| changes.rules == before.rules));
            assert!(shared.is_doubtful, "the next full sync observes");
        }
        let mut shared = Shared::default();
        shared.begin_plan(&[Step::Attach], false);
        assert!(shared.take_result(false, |changes| changes == Changes::default()));
    }
}
