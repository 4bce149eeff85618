//! One line about the whole run: steps, tests and the time that is left.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::plan::{Plan, minutes};
use crate::cli::counts::Counts;
use crate::cli::progress::Overall;

/// The state of the run, shared by all lanes.
pub(super) struct Live {
    plan: Plan,
    guests: u32,
    line: Overall,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ended: BTreeSet<&'static str>,
    failed: BTreeSet<&'static str>,
    counts: Counts,
}

impl Live {
    /// Begins to show the line. `guests` is the number of virtual machines at a time.
    pub(super) fn start(plan: Plan, guests: u32) -> Self {
        let live = Self { plan, guests, line: Overall::start(), state: Mutex::default() };
        live.change(|_| ());
        live
    }

    /// Counts tests.
    pub(super) fn count(&self, more: Counts) {
        self.change(|state| state.counts += more);
    }

    /// Notes that a step has ended. Prints the line where there is no terminal.
    pub(super) fn end(&self, step: &'static str, ok: bool) {
        self.change(|state| {
            state.ended.insert(step);
            if !ok {
                state.failed.insert(step);
            }
        });
        self.line.print();
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        self.line.set(&describe(&self.plan, &state, self.guests));
    }
}

fn describe(plan: &Plan, state: &State, guests: u32) -> String {
    let left = plan.remaining(|name| state.ended.contains(name), guests);
    let (steps, all) = (state.ended.len(), plan.0.len());
    let Counts { passed, failed, .. } = state.counts;
    let mut line = format!("{steps} of {all} steps, {passed} tests passed, {failed} failed");
    if !state.failed.is_empty() {
        let names: Vec<&str> = state.failed.iter().copied().collect();
        line = format!("{line} (in {})", names.join(", "));
    }
    if steps < all {
        line = format!("{line}, about {} left", minutes(left));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Lane, Times};
    use super::*;

    #[test]
    fn the_line_has_steps_tests_failures_and_the_time_left() {
        let mut plan = Plan::default();
        plan.add(Lane::Host, &["one", "two"], &Times::default());
        let mut state = State { counts: Counts { passed: 7, ..Counts::default() }, ..State::default() };
        state.ended.insert("one");
        assert_eq!(describe(&plan, &state, 2), "1 of 2 steps, 7 tests passed, 0 failed, about 60 s left");
        state.ended.insert("two");
        state.failed.insert("two");
        state.counts.failed = 1;
        assert_eq!(describe(&plan, &state, 2), "2 of 2 steps, 7 tests passed, 1 failed (in two)");
    }
}
