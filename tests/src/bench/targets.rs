//! The targets of the project, and whether a report meets them.

use std::fmt;

use serde::Serialize;

use super::{changes::ChangeKind, paths::Path, protocol::Workload, report::Report};

/// From this number of Services on, the targets for a large cluster apply.
const LARGE: usize = 10_000;
const LARGEST: usize = 30_000;

/// The state of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TargetOutcome {
    Reached,
    Missed,
    /// The path does not answer, or was not measured.
    NotMeasured,
}

/// A target and the measured value.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TargetResult {
    pub(super) what: String,
    pub(super) target: &'static str,
    pub(super) measured: String,
    pub(super) verdict: TargetOutcome,
}

impl fmt::Display for TargetOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reached => "reached",
            Self::Missed => "missed",
            Self::NotMeasured => "not measured",
        })
    }
}

/// Compares a report with the targets. If a value was measured with several numbers of Services,
/// the worst one counts.
pub(super) fn check(report: &Report) -> Vec<TargetResult> {
    let mut all = vec![
        path_target(report, Path::PodToClusterIp, "at least 0.99", 0.99),
        path_target(report, Path::NodeToClusterIp, "at least 0.98", 0.98),
        path_target(report, Path::ClientToNodePort, "at least 0.95", 0.95),
    ];
    all.extend(if report.mode == "nftables" { nftables_targets(report) } else { ebpf_targets(report) });
    all
}

fn ebpf_targets(report: &Report) -> Vec<TargetResult> {
    let (settled, peak) = memory(report, LARGE);
    vec![
        change_target(report, ChangeKind::Endpoint, "p99 under 1 ms", 1e3, 0),
        change_target(report, ChangeKind::Everything, "under 1 s", 1e6, LARGE),
        memory_target("RSS stable, 10,000 Services", "under 50 MiB", 50, settled),
        memory_target("RSS peak, 10,000 Services", "under 100 MiB", 100, peak),
    ]
}

fn nftables_targets(report: &Report) -> Vec<TargetResult> {
    let (_, peak) = memory(report, LARGEST);
    vec![
        change_target(report, ChangeKind::Endpoint, "p99 under 5 ms", 5e3, 0),
        change_target(report, ChangeKind::Scaled, "p99 under 5 ms", 5e3, 0),
        change_target(report, ChangeKind::Everything, "under 20 s", 20e6, LARGE),
        memory_target("RSS peak, 30,000 Services", "under 200 MiB", 200, peak),
    ]
}

/// Returns the maximum of all measurements with at least this number of Services: stable and peak
/// memory.
fn memory(report: &Report, from: usize) -> (Option<u64>, Option<u64>) {
    let memory = || report.memory.iter().filter(|memory| memory.services >= from);
    (memory().map(|memory| memory.settled_kib).max(), memory().map(|memory| memory.peak_kib).max())
}

fn path_target(report: &Report, path: Path, target: &'static str, least: f64) -> TargetResult {
    let results = report
        .paths
        .iter()
        .filter(|result| result.path == path && result.workload == Workload::ConnectRequestClose);
    let worst = results.filter_map(|result| result.ratio).min_by(|a, b| a.median.total_cmp(&b.median));
    TargetResult {
        what: format!("{}, connect-request-close", path.name()),
        target,
        measured: worst.map_or_else(|| "not served".to_owned(), |ratio| format!("{:.3}", ratio.median)),
        verdict: outcome(worst.map(|ratio| ratio.median >= least)),
    }
}

fn change_target(
    report: &Report,
    changed: ChangeKind,
    target: &'static str,
    max_us: f64,
    from: usize,
) -> TargetResult {
    let results = report.changes.iter().filter(|result| result.changed == changed && result.services >= from);
    let worst = results.map(|result| result.p99_us).max_by(f64::total_cmp);
    TargetResult {
        what: changed.name().to_owned(),
        target,
        measured: worst.map_or_else(|| "-".to_owned(), microseconds),
        verdict: outcome(worst.map(|worst| worst < max_us)),
    }
}

fn memory_target(what: &str, target: &'static str, max_mib: u64, measured: Option<u64>) -> TargetResult {
    TargetResult {
        what: what.to_owned(),
        target,
        measured: measured.map_or_else(|| "-".to_owned(), mebibytes),
        verdict: outcome(measured.map(|kib| kib < max_mib << 10)),
    }
}

fn outcome(reached: Option<bool>) -> TargetOutcome {
    match reached {
        Some(true) => TargetOutcome::Reached,
        Some(false) => TargetOutcome::Missed,
        None => TargetOutcome::NotMeasured,
    }
}

/// Formats microseconds: "85 us", "3.1 ms".
pub(super) fn microseconds(us: f64) -> String {
    if us < 1e3 { format!("{us:.0} us") } else { format!("{:.1} ms", us / 1e3) }
}

/// Formats KiB as "48.1 MiB".
pub(super) fn mebibytes(kib: u64) -> String {
    format!("{}.{} MiB", kib >> 10, ((kib & 1023) * 10) >> 10)
}
