//! The plan of `cargo xtask test`: its steps with the time that each is expected to take.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use xtask::workspace;

use crate::cli::summary::Summary;

/// Seconds that steps took on two cores, where nothing was built before. A machine's own last times
/// have priority.
const EXPECTED: [(&str, u64); 57] = [
    ("setup", 60),
    ("ebpf", 40),
    ("format", 5),
    ("clippy ebpf", 1),
    ("build", 580),
    ("build tests", 540),
    ("docs", 80),
    ("demo", 5),
    ("tests", 270),
    ("conformance", 500),
    ("conformance backstop", 115),
    ("conformance links path", 95),
    ("conformance masquerade", 70),
    ("conformance whole flows", 50),
    ("conformance programs", 50),
    ("conformance XDP", 50),
    ("conformance XDP native", 60),
    ("restarts", 7),
    ("restarts programs", 5),
    ("restarts links path", 5),
    ("restarts whole flows", 5),
    ("restarts XDP", 5),
    ("churn", 75),
    ("churn masquerade", 30),
    ("churn whole flows", 50),
    ("churn XDP", 50),
    ("soak", 70),
    ("conformance nftables", 175),
    ("conformance iptables", 190),
    ("conformance API", 105),
    ("conformance API nftables", 17),
    ("conformance API iptables", 21),
    ("daemon", 560),
    ("daemon nftables", 40),
    ("daemon iptables", 20),
    ("restarts nftables", 5),
    ("churn nftables", 30),
    ("restarts iptables", 5),
    ("deployment", 24),
    ("image", 30),
    ("conformance ipvs", 1150),
    ("kernel 5.10", 780),
    ("kernel 5.10 cases", 740),
    ("kernel 6.1", 780),
    ("kernel 6.1 cases", 740),
    ("kernel 6.12", 780),
    ("kernel 6.12 cases", 740),
    ("kernel latest", 780),
    ("kernel latest cases", 740),
    ("clippy", 200),
    ("quick clippy", 15),
    ("quick build", 70),
    ("quick build tests", 15),
    ("quick tests", 50),
    ("quick ebpf", 47),
    ("quick nftables", 7),
    ("quick iptables", 11),
];
/// The time of a step that nobody has measured.
const UNKNOWN: Duration = Duration::from_mins(1);

/// What runs a step. Steps of one lane run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Before everything else: setup, compilers, documents.
    Build,
    /// On this machine.
    Host,
    /// Beside those on this machine.
    Beside,
    /// In virtual machines, several at a time.
    Guest,
}

/// A step that is going to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) name: &'static str,
    pub(super) lane: Lane,
    pub(super) expected: Duration,
}

/// The steps in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan(pub(super) Vec<Planned>);

/// The times of steps on this machine, in seconds.
#[derive(Debug, Default)]
pub(super) struct Times(BTreeMap<String, u64>);

impl Times {
    /// Reads the times of earlier runs. There are none on a new machine.
    pub(super) fn read() -> Self {
        let text = fs::read(Self::path()).unwrap_or_default();
        Self(serde_json::from_slice(&text).unwrap_or_default())
    }

    /// Remembers how long steps took that succeeded.
    pub(super) fn remember(mut self, summary: &Summary) {
        for outcome in summary.steps().filter(|outcome| outcome.ok) {
            self.0.insert(outcome.step.to_owned(), outcome.took.as_secs());
        }
        // The next plan is less exact without them.
        drop(serde_json::to_vec(&self.0).map(|text| fs::write(Self::path(), text)));
    }

    fn path() -> PathBuf {
        workspace::logs().join("times.json")
    }

    /// Returns the expected time of a step.
    pub(super) fn expected(&self, step: &str) -> Duration {
        let known = EXPECTED.iter().find(|(name, _)| *name == step).map(|(_, seconds)| *seconds);
        self.0.get(step).copied().or(known).map_or(UNKNOWN, Duration::from_secs)
    }
}

impl Plan {
    /// Adds steps of a lane.
    pub(super) fn add<'a>(
        &mut self,
        lane: Lane,
        names: impl IntoIterator<Item = &'a &'static str>,
        times: &Times,
    ) {
        let planned = |name: &&'static str| Planned { name, lane, expected: times.expected(name) };
        self.0.extend(names.into_iter().map(planned));
    }

    /// Returns the time until all steps that have not ended would end, with this number of guests
    /// at a time.
    pub(super) fn remaining(&self, has_ended: impl Fn(&str) -> bool, guests: u32) -> Duration {
        let sum = |lane| -> Duration {
            let of_lane = |step: &&Planned| step.lane == lane && !has_ended(step.name);
            self.0.iter().filter(of_lane).map(|step| step.expected).sum()
        };
        let beside = (sum(Lane::Beside) + sum(Lane::Guest)) / guests.max(1);
        sum(Lane::Build) + sum(Lane::Host).max(beside).max(sum(Lane::Beside))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (lane, title) in [
            (Lane::Build, "first, one after the other"),
            (Lane::Host, "then on this machine"),
            (Lane::Beside, "at the same time"),
            (Lane::Guest, "and in virtual machines"),
        ] {
            let mut steps = self.0.iter().filter(|step| step.lane == lane).peekable();
            if steps.peek().is_some() {
                writeln!(f, "{title}:")?;
            }
            for step in steps {
                writeln!(f, "  {:<26}{:>8}", step.name, minutes(step.expected))?;
            }
        }
        Ok(())
    }
}

/// Returns true if there is a step of this name: each has a time.
pub(crate) fn is_step(step: &str) -> bool {
    EXPECTED.iter().any(|(name, _)| *name == step)
}

/// Returns a time as people say it: "45 s", "12 min".
pub(super) fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..90 => format!("{seconds} s"),
        seconds => format!("{} min", (seconds + 30) / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let times = Times([("build".into(), 60), ("tests".into(), 100), ("kernel".into(), 300)].into());
        let mut plan = Plan::default();
        plan.add(Lane::Build, &["build"], &times);
        plan.add(Lane::Host, &["tests"], &times);
        plan.add(Lane::Guest, &["kernel"], &times);
        plan
    }

    #[test]
    fn lanes_run_beside_each_other_after_the_build() {
        assert_eq!(plan().remaining(|_| false, 1), Duration::from_mins(6));
        assert_eq!(plan().remaining(|_| false, 2), Duration::from_secs(210));
        assert_eq!(plan().remaining(|name| name != "tests", 2), Duration::from_secs(100));
        assert_eq!(plan().remaining(|_| true, 2), Duration::ZERO);
    }

    #[test]
    fn the_plan_lists_each_step_with_its_time() {
        let text = plan().to_string();
        assert!(
            text.starts_with("first, one after the other:\n  build                         60 s\n"),
            "{text}"
        );
        assert!(text.ends_with("  kernel                       5 min\n"), "{text}");
    }

    #[test]
    fn a_step_without_a_measurement_has_a_time() {
        assert_eq!(Times::default().expected("no such step"), UNKNOWN);
    }
}
