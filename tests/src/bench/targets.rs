//! What is aimed at, and whether a report reaches it.

use std::fmt;

use serde::Serialize;

use super::{changes::ChangeKind, paths::Path, protocol::Workload, report::Report};

/// From so many Services on, the targets of a large cluster count.
const LARGE: usize = 10_000;
const LARGEST: usize = 30_000;

/// Whether a target is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TargetOutcome {
    Reached,
    Missed,
    /// The path does not answer, or this was not measured.
    NotMeasured,
}

/// A target and what was measured.
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

/// Holds a report to the targets. Of a kind of figure that was measured with several numbers of Services, the worst counts.
pub(super) fn judge(report: &Report) -> Vec<TargetResult> {
    let mut all = vec![
        path(report, Path::PodToClusterIp, "at least 0.99", 0.99),
        path(report, Path::NodeToClusterIp, "at least 0.98", 0.98),
        path(report, Path::ClientToNodePort, "at least 0.95", 0.95),
    ];
    all.extend(if report.mode == "nftables" { of_nftables(report) } else { of_ebpf(report) });
    all
}

fn of_ebpf(report: &Report) -> Vec<TargetResult> {
    let (settled, peak) = memory(report, LARGE);
    vec![
        change(report, ChangeKind::Endpoint, "p99 under 1 ms", 1e3, 0),
        change(report, ChangeKind::Everything, "under 1 s", 1e6, LARGE),
        kib("RSS settled, 10,000 Services", "under 50 MiB", 50, settled),
        kib("RSS peak, 10,000 Services", "under 100 MiB", 100, peak),
    ]
}

fn of_nftables(report: &Report) -> Vec<TargetResult> {
    let (_, peak) = memory(report, LARGEST);
    vec![
        change(report, ChangeKind::Endpoint, "p99 under 5 ms", 5e3, 0),
        change(report, ChangeKind::Scaled, "p99 under 5 ms", 5e3, 0),
        change(report, ChangeKind::Everything, "under 20 s", 20e6, LARGE),
        kib("RSS peak, 30,000 Services", "under 200 MiB", 200, peak),
    ]
}

/// The most of any measurement with as many Services: settled and at its peak.
fn memory(report: &Report, from: usize) -> (Option<u64>, Option<u64>) {
    let memory = || report.memory.iter().filter(|memory| memory.services >= from);
    (memory().map(|memory| memory.settled_kib).max(), memory().map(|memory| memory.peak_kib).max())
}

fn path(report: &Report, path: Path, target: &'static str, least: f64) -> TargetResult {
    let ours = report
        .paths
        .iter()
        .filter(|result| result.path == path && result.workload == Workload::ConnectRequestClose);
    let worst = ours.filter_map(|result| result.ratio).min_by(|a, b| a.median.total_cmp(&b.median));
    TargetResult {
        what: format!("{}, connect-request-close", path.name()),
        target,
        measured: worst.map_or_else(|| "not served".to_owned(), |ratio| format!("{:.3}", ratio.median)),
        verdict: verdict(worst.map(|ratio| ratio.median >= least)),
    }
}

fn change(
    report: &Report,
    changed: ChangeKind,
    target: &'static str,
    most_us: f64,
    from: usize,
) -> TargetResult {
    let ours = report.changes.iter().filter(|result| result.changed == changed && result.services >= from);
    let worst = ours.map(|result| result.p99_us).max_by(f64::total_cmp);
    TargetResult {
        what: changed.name().to_owned(),
        target,
        measured: worst.map_or_else(|| "-".to_owned(), microseconds),
        verdict: verdict(worst.map(|worst| worst < most_us)),
    }
}

fn kib(what: &str, target: &'static str, most_mib: u64, measured: Option<u64>) -> TargetResult {
    TargetResult {
        what: what.to_owned(),
        target,
        measured: measured.map_or_else(|| "-".to_owned(), mebibytes),
        verdict: verdict(measured.map(|kib| kib < most_mib << 10)),
    }
}

fn verdict(reached: Option<bool>) -> TargetOutcome {
    match reached {
        Some(true) => TargetOutcome::Reached,
        Some(false) => TargetOutcome::Missed,
        None => TargetOutcome::NotMeasured,
    }
}

/// For people: "85 us", "3.1 ms".
pub(super) fn microseconds(us: f64) -> String {
    if us < 1e3 { format!("{us:.0} us") } else { format!("{:.1} ms", us / 1e3) }
}

/// For people: "48.1 MiB".
pub(super) fn mebibytes(kib: u64) -> String {
    format!("{}.{} MiB", kib >> 10, ((kib & 1023) * 10) >> 10)
}
