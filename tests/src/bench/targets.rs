//! The targets of the project, and whether a report meets them.

use std::{fmt, ops::Range};

use serde::Serialize;

use super::{
    changes::ChangeResult,
    memory::{API, Memory},
    paths::Path,
    protocol::{ChangeKind, Workload},
    report::Report,
};

/// The number of Services of a large cluster, and of the largest one that has targets.
const LARGE: usize = 10_000;
const LARGEST: usize = 30_000;
/// Ranges of numbers of Services.
const ALL: Range<usize> = 0..usize::MAX;
const LARGE_ONES: Range<usize> = LARGE..LARGEST;
const LARGEST_ONES: Range<usize> = LARGEST..usize::MAX;

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
    let large = maximum(&report.memory, &LARGE_ONES, |_| true);
    let largest = maximum(&report.memory, &LARGEST_ONES, |memory| memory.source == API);
    vec![
        change_target(report, ChangeKind::Endpoint, "p99 under 1 ms", 1e3, &ALL),
        change_target(report, ChangeKind::LargeEndpoint, "p99 under 1 ms", 1e3, &ALL),
        change_target(report, ChangeKind::Everything, "under 1 s", 1e6, &LARGE_ONES),
        change_target(report, ChangeKind::Everything, "under 1 s", 1e6, &LARGEST_ONES),
        restart_target(report, "under 300 ms", 300.0, &LARGEST_ONES),
        memory_target("RSS stable, 10,000 Services", "under 50 MiB", 50, large.settled),
        memory_target("RSS peak, 10,000 Services", "under 100 MiB", 100, large.peak),
        memory_target("RSS stable, 30,000 Services, API", "under 90 MiB", 90, largest.settled),
        memory_target("RSS peak, 30,000 Services, API", "under 130 MiB", 130, largest.peak),
        memory_target("BPF maps, 30,000 Services", "under 150 MiB", 150, largest.maps),
    ]
}

fn nftables_targets(report: &Report) -> Vec<TargetResult> {
    let largest = maximum(&report.memory, &LARGEST_ONES, |_| true);
    vec![
        change_target(report, ChangeKind::Endpoint, "p99 under 1 ms", 1e3, &ALL),
        change_target(report, ChangeKind::Scaled, "p99 under 5 ms", 5e3, &ALL),
        change_target(report, ChangeKind::Everything, "under 20 s", 20e6, &LARGE_ONES),
        change_target(report, ChangeKind::Everything, "under 2 s", 2e6, &LARGEST_ONES),
        memory_target("RSS peak, 30,000 Services", "under 200 MiB", 200, largest.peak),
    ]
}

/// Maximum memory in KiB. None of what was not measured.
#[derive(Debug, PartialEq, Eq)]
struct Maximum {
    settled: Option<u64>,
    peak: Option<u64>,
    maps: Option<u64>,
}

/// Returns the maximum of all measurements with these numbers of Services that are `wanted`.
fn maximum(all: &[Memory], services: &Range<usize>, wanted: impl Fn(&Memory) -> bool) -> Maximum {
    let memory = || all.iter().filter(|memory| services.contains(&memory.services) && wanted(memory));
    Maximum {
        settled: memory().map(|memory| memory.settled_kib).max(),
        peak: memory().map(|memory| memory.peak_kib).max(),
        maps: memory().filter_map(Memory::maps_kib).max(),
    }
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
    services: &Range<usize>,
) -> TargetResult {
    let is_wanted = |result: &&ChangeResult| result.changed == changed && services.contains(&result.services);
    let results = report.changes.iter().filter(is_wanted);
    let worst = results.map(|result| result.p99_us).max_by(f64::total_cmp);
    TargetResult {
        what: format!("{}{}", changed.name(), of_services(services)),
        target,
        measured: worst.map_or_else(|| "-".to_owned(), microseconds),
        verdict: outcome(worst.map(|worst| worst < max_us)),
    }
}

fn restart_target(
    report: &Report,
    target: &'static str,
    max_ms: f64,
    services: &Range<usize>,
) -> TargetResult {
    let results = report.restarts.iter().filter(|restart| services.contains(&restart.services));
    let worst = results.map(|restart| restart.median_ms).max_by(f64::total_cmp);
    TargetResult {
        what: format!("restart, median{}", of_services(services)),
        target,
        measured: worst.map_or_else(|| "-".to_owned(), |worst| format!("{worst:.0} ms")),
        verdict: outcome(worst.map(|worst| worst < max_ms)),
    }
}

/// Returns the end of a target's name: the number of Services from which on it applies.
fn of_services(services: &Range<usize>) -> &'static str {
    match services.start {
        LARGEST => ", 30,000 Services",
        LARGE => ", 10,000 Services",
        _ => "",
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

#[cfg(test)]
mod tests {
    use super::{super::kernel_maps::KernelMap, *};

    fn memory(services: usize, source: &'static str, mib: u64) -> Memory {
        let maps = vec![KernelMap { name: "flows".to_owned(), kib: mib }];
        Memory { services, source, settled_kib: mib << 10, peak_kib: mib << 11, anonymous_kib: 0, maps }
    }

    #[test]
    fn target_of_the_largest_cluster_is_that_of_the_api_source() {
        let mut report = Report::new("ebpf");
        report.memory =
            vec![memory(10_000, API, 40), memory(30_000, "manifests", 120), memory(30_000, API, 80)];
        let results = check(&report);
        let of = |what: &str| results.iter().find(|result| result.what == what).map(|result| result.verdict);
        assert_eq!(of("RSS stable, 10,000 Services"), Some(TargetOutcome::Reached));
        assert_eq!(of("RSS stable, 30,000 Services, API"), Some(TargetOutcome::Reached));
        assert_eq!(of("RSS peak, 30,000 Services, API"), Some(TargetOutcome::Missed));
        assert_eq!(of("restart, median, 30,000 Services"), Some(TargetOutcome::NotMeasured));
    }

    #[test]
    fn smaller_clusters_do_not_count_for_the_largest() {
        let all = [memory(10_000, API, 40)];
        assert_eq!(maximum(&all, &LARGEST_ONES, |_| true), Maximum { settled: None, peak: None, maps: None });
    }
}
