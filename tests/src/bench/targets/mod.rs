//! What the project promises in SPECIFICATION.md and what it wants to reach, and whether a report
//! holds it. All these numbers are in one table.

use std::{fmt, ops::Range};

use serde::Serialize;

use super::{
    Bench, Part,
    changes::ChangeResult,
    memory::{API, Memory},
    paths::Path,
    protocol::{ChangeKind, Workload},
    report::Report,
};

/// The number of Services of a small cluster, of a large one, and of the largest one that has
/// targets.
const SMALL: usize = 10;
const LARGE: usize = 10_000;
const LARGEST: usize = 30_000;
/// Ranges of numbers of Services.
const ALL: Range<usize> = 0..usize::MAX;
const LARGE_ONES: Range<usize> = LARGE..LARGEST;
const LARGEST_ONES: Range<usize> = LARGEST..usize::MAX;

/// A limit of one measured value.
pub(super) struct Target {
    mode: &'static str,
    what: Measured,
    /// The numbers of Services with which it applies.
    services: Range<usize>,
    /// What SPECIFICATION.md promises. `--check` fails if it does not hold.
    promise: f64,
    /// What the project wants to reach, if that is more.
    goal: Option<f64>,
}

/// A value of a report. The worst one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measured {
    /// Operations a second against the direct connection.
    Path(Path),
    /// The 99th percentile of the time of a change, in milliseconds.
    Change(ChangeKind),
    /// The time of a restart with nothing changed, in milliseconds.
    Restart,
    /// Resident memory of the process, in MiB: settled, and at its peak.
    Settled(Source),
    Peak(Source),
    /// Kernel memory of BPF maps, in MiB.
    Maps,
    /// Connections that ended during floods.
    Floods,
    /// Connections that failed during a rollout.
    Rollout,
}

/// The source of the objects while memory is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Any,
    Api,
}

const fn target(mode: &'static str, what: Measured, services: Range<usize>, promise: f64) -> Target {
    Target { mode, what, services, promise, goal: None }
}

impl Target {
    const fn goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }
}

const EBPF: &str = "ebpf";
const NFTABLES: &str = "nftables";

/// All targets. The promises are what was measured, with room for the noise of a shared machine.
const TARGETS: &[Target] = &[
    target(EBPF, Measured::Path(Path::PodToClusterIp), ALL, 0.98).goal(0.99),
    target(EBPF, Measured::Path(Path::NodeToClusterIp), ALL, 0.98),
    target(EBPF, Measured::Path(Path::ClientToNodePort), ALL, 0.87).goal(0.95),
    target(EBPF, Measured::Change(ChangeKind::Endpoint), ALL, 1.0),
    target(EBPF, Measured::Change(ChangeKind::LargeEndpoint), ALL, 2.0).goal(1.0),
    target(EBPF, Measured::Change(ChangeKind::Everything), LARGE_ONES, 1_000.0),
    target(EBPF, Measured::Change(ChangeKind::Everything), LARGEST_ONES, 2_000.0).goal(1_000.0),
    target(EBPF, Measured::Restart, LARGEST_ONES, 5_000.0).goal(300.0),
    target(EBPF, Measured::Settled(Source::Any), LARGE_ONES, 60.0).goal(50.0),
    target(EBPF, Measured::Peak(Source::Any), LARGE_ONES, 100.0),
    target(EBPF, Measured::Settled(Source::Api), LARGEST_ONES, 90.0),
    target(EBPF, Measured::Peak(Source::Api), LARGEST_ONES, 130.0),
    target(EBPF, Measured::Maps, LARGEST_ONES, 150.0),
    target(EBPF, Measured::Floods, ALL, 0.0),
    target(EBPF, Measured::Rollout, ALL, 0.0),
    target(NFTABLES, Measured::Change(ChangeKind::Endpoint), ALL, 1.0),
    target(NFTABLES, Measured::Change(ChangeKind::Scaled), ALL, 1.0),
    target(NFTABLES, Measured::Change(ChangeKind::Everything), LARGE_ONES, 1_000.0),
    target(NFTABLES, Measured::Change(ChangeKind::Everything), LARGEST_ONES, 2_000.0),
    target(NFTABLES, Measured::Peak(Source::Any), LARGEST_ONES, 200.0),
    target(NFTABLES, Measured::Floods, ALL, 0.0),
];

/// The state of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TargetOutcome {
    Reached,
    /// The promise holds, and the goal is not reached.
    GoalMissed,
    /// The promise does not hold.
    Missed,
    /// The path does not answer, or no number of Services fits.
    NotMeasured,
    /// The command line chose other parts, paths or workloads.
    Excluded,
}

/// A target and the measured value.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TargetResult {
    pub(super) what: String,
    pub(super) target: String,
    pub(super) goal: Option<String>,
    pub(super) measured: String,
    pub(super) verdict: TargetOutcome,
}

impl TargetOutcome {
    /// Returns true if `--check` accepts it.
    pub(super) fn is_acceptable(self) -> bool {
        !matches!(self, Self::Missed | Self::NotMeasured)
    }
}

impl fmt::Display for TargetOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reached => "reached",
            Self::GoalMissed => "reached, but not its goal",
            Self::Missed => "missed",
            Self::NotMeasured => "not measured",
            Self::Excluded => "not chosen",
        })
    }
}

/// Compares a report with the targets of its mode. If a value was measured with several numbers of
/// Services, the worst one counts.
pub(super) fn check(report: &Report, bench: &Bench) -> Vec<TargetResult> {
    of_mode(&report.mode).map(|target| target.check(report, bench)).collect()
}

/// Returns the targets of a mode.
pub(super) fn of_mode(mode: &str) -> impl Iterator<Item = &'static Target> {
    TARGETS.iter().filter(move |target| target.mode == mode)
}

/// Returns the numbers of Services with which every target of a mode is measured.
pub fn sizes(mode: &str) -> Vec<usize> {
    let mut sizes: Vec<usize> = of_mode(mode).map(|target| target.services.start.max(SMALL)).collect();
    sizes.push(SMALL);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Returns the other modes that have targets.
pub(super) fn other_modes(mode: &str) -> Vec<&'static str> {
    let mut modes: Vec<&str> = TARGETS.iter().map(|target| target.mode).collect();
    modes.sort_unstable();
    modes.dedup();
    modes.retain(|other| *other != mode);
    modes
}

impl Target {
    fn check(&self, report: &Report, bench: &Bench) -> TargetResult {
        let measured = self.what.worst(report, &self.services);
        let holds = |limit| measured.map(|value| self.what.holds(value, limit));
        let verdict = match (holds(self.promise), self.goal.and_then(holds)) {
            (None, _) if !self.what.is_chosen(bench) => TargetOutcome::Excluded,
            (None, _) => TargetOutcome::NotMeasured,
            (Some(false), _) => TargetOutcome::Missed,
            (Some(true), Some(false)) => TargetOutcome::GoalMissed,
            (Some(true), _) => TargetOutcome::Reached,
        };
        TargetResult {
            what: self.name(),
            target: self.what.limit(self.promise),
            goal: self.goal.map(|goal| self.what.limit(goal)),
            measured: measured.map_or_else(|| "-".to_owned(), |value| self.what.value(value)),
            verdict,
        }
    }

    /// Returns the name, with the number of Services from which on it applies.
    fn name(&self) -> String {
        let services = match self.services.start {
            LARGEST => ", 30,000 Services",
            LARGE => ", 10,000 Services",
            _ => "",
        };
        format!("{}{services}", self.what)
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}, connect-request-close", path.name()),
            Self::Change(changed) => f.write_str(changed.name()),
            Self::Restart => f.write_str("restart, median"),
            Self::Settled(source) => write!(f, "RSS settled{source}"),
            Self::Peak(source) => write!(f, "RSS peak{source}"),
            Self::Maps => f.write_str("BPF maps"),
            Self::Floods => f.write_str("connections lost in floods"),
            Self::Rollout => f.write_str("connections failed in a rollout"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => Ok(()),
            Self::Api => f.write_str(" from the API"),
        }
    }
}

impl Measured {
    /// Returns true if the benchmark measures it.
    fn is_chosen(self, bench: &Bench) -> bool {
        let part = match self {
            Self::Path(path) => {
                if !bench.paths.contains(&path) || !bench.workloads.contains(&Workload::ConnectRequestClose) {
                    return false;
                }
                Part::Data
            }
            Self::Change(_) => Part::Changes,
            Self::Restart => Part::Restart,
            Self::Settled(_) | Self::Peak(_) | Self::Maps => Part::Memory,
            Self::Floods => Part::Floods,
            Self::Rollout => Part::Rollout,
        };
        bench.parts.contains(&part)
    }

    /// Returns true if a value keeps a limit.
    fn holds(self, value: f64, limit: f64) -> bool {
        match self {
            Self::Path(_) => value >= limit,
            Self::Floods | Self::Rollout => value <= limit,
            _ => value < limit,
        }
    }

    /// Formats a limit: "at least 0.98", "p99 under 1 ms", "under 100 MiB", "0".
    fn limit(self, limit: f64) -> String {
        match self {
            Self::Path(_) => format!("at least {limit}"),
            Self::Change(ChangeKind::Everything) | Self::Restart => format!("under {}", duration(limit)),
            Self::Change(_) => format!("p99 under {}", duration(limit)),
            Self::Settled(_) | Self::Peak(_) | Self::Maps => format!("under {limit} MiB"),
            Self::Floods | Self::Rollout => limit.to_string(),
        }
    }

    /// Formats a value.
    fn value(self, value: f64) -> String {
        match self {
            Self::Path(_) => format!("{value:.3}"),
            Self::Change(_) | Self::Restart => microseconds(value * 1e3),
            Self::Settled(_) | Self::Peak(_) | Self::Maps => format!("{value:.1} MiB"),
            Self::Floods | Self::Rollout => value.to_string(),
        }
    }

    /// Returns the worst value of a report with these numbers of Services.
    fn worst(self, report: &Report, services: &Range<usize>) -> Option<f64> {
        match self {
            Self::Path(path) => worst_ratio(report, path),
            Self::Change(changed) => {
                let is_wanted =
                    |result: &&ChangeResult| result.changed == changed && services.contains(&result.services);
                greatest(report.changes.iter().filter(is_wanted).map(|result| result.p99_us / 1e3))
            }
            Self::Restart => {
                let restarts = report.restarts.iter().filter(|restart| services.contains(&restart.services));
                greatest(restarts.map(|restart| restart.median_ms))
            }
            Self::Settled(source) => {
                mebibytes_of(report, services, source, |memory| Some(memory.settled_kib))
            }
            Self::Peak(source) => mebibytes_of(report, services, source, |memory| Some(memory.peak_kib)),
            Self::Maps => mebibytes_of(report, services, Source::Any, Memory::maps_kib),
            Self::Floods => {
                let lost = report.floods.iter().map(|flood| flood.lost + usize::from(flood.idle.is_some()));
                lost.max().map(count)
            }
            Self::Rollout => report.rollout.as_ref().map(|rollout| count(rollout.failed)),
        }
    }
}

/// Returns the worst ratio of a path, if every measurement of it was served.
fn worst_ratio(report: &Report, path: Path) -> Option<f64> {
    let results = report.paths.iter();
    let results = results.filter(|it| it.path == path && it.workload == Workload::ConnectRequestClose);
    results.filter_map(|result| result.ratio).map(|ratio| ratio.median).min_by(f64::total_cmp)
}

/// Returns the greatest memory of all measurements with these numbers of Services, in MiB.
fn mebibytes_of(
    report: &Report,
    services: &Range<usize>,
    source: Source,
    kib: impl Fn(&Memory) -> Option<u64>,
) -> Option<f64> {
    let is_wanted = |memory: &&Memory| {
        services.contains(&memory.services) && (source == Source::Any || memory.source == API)
    };
    let greatest = report.memory.iter().filter(is_wanted).filter_map(kib).max()?;
    u32::try_from(greatest).ok().map(|kib| f64::from(kib) / 1024.0)
}

fn greatest(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.max_by(f64::total_cmp)
}

fn count(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::MAX, f64::from)
}

/// Formats whole milliseconds or seconds.
fn duration(ms: f64) -> String {
    if ms < 1e3 { format!("{ms} ms") } else { format!("{} s", ms / 1e3) }
}

/// Formats microseconds: "85 us", "3.1 ms".
pub(super) fn microseconds(us: f64) -> String {
    if us < 1e3 { format!("{us:.0} us") } else { format!("{:.1} ms", us / 1e3) }
}

/// Formats KiB as "48.1 MiB".
pub(super) fn mebibytes(kib: u64) -> String {
    format!("{}.{} MiB", kib >> 10, ((kib & 1023) * 10) >> 10)
}

#[cfg(test)]
mod tests;
