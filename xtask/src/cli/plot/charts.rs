//! What the curves show: a pure function of the figures.

use super::figures::{Change, Figures, Memory};

/// A chart over the number of Services. Both axes are logarithmic.
#[derive(Debug, PartialEq)]
pub(super) struct Chart {
    /// The name of the file.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// The unit of the vertical axis.
    pub(super) unit: &'static str,
    pub(super) lines: Vec<Line>,
    /// Targets of the project for 30,000 Services, in the unit of the chart.
    pub(super) targets: Vec<Target>,
}

/// A named line, with points of a number of Services and a value.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub(super) label: String,
    pub(super) mode: String,
    pub(super) stroke: Stroke,
    pub(super) points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stroke {
    Solid,
    Dashed,
    Dotted,
}

#[derive(Debug, PartialEq)]
pub(super) struct Target {
    pub(super) label: &'static str,
    /// None if the target is that of all modes.
    pub(super) mode: Option<&'static str>,
    pub(super) value: f64,
}

/// Returns all charts, without lines that have no figures.
pub(super) fn all(modes: &[Figures]) -> Vec<Chart> {
    vec![first_sync(modes), one_endpoint(modes), restart(modes), memory(modes)]
}

fn first_sync(modes: &[Figures]) -> Chart {
    Chart {
        name: "first-sync",
        title: "First sync, from decoded objects",
        unit: "seconds",
        lines: lines(modes, |figures| {
            let points = changes(figures, "everything", |change| change.median_us / 1e6);
            vec![("first sync", Stroke::Solid, points)]
        }),
        targets: vec![target("target, ebpf", "ebpf", 1.0), target("target, nftables", "nftables", 2.0)],
    }
}

fn one_endpoint(modes: &[Figures]) -> Chart {
    let p99 = |change: &Change| change.p99_us;
    Chart {
        name: "one-endpoint",
        title: "One endpoint replaced, from the decoded object",
        unit: "microseconds",
        lines: lines(modes, |figures| {
            vec![
                ("p99", Stroke::Solid, changes(figures, "endpoint", p99)),
                ("median", Stroke::Dotted, changes(figures, "endpoint", |change| change.median_us)),
                ("p99, one of 5,000", Stroke::Dashed, changes(figures, "large-endpoint", p99)),
            ]
        }),
        targets: vec![Target { label: "target for p99", mode: None, value: 1_000.0 }],
    }
}

fn restart(modes: &[Figures]) -> Chart {
    Chart {
        name: "restart",
        title: "Restart with nothing changed, until healthy",
        unit: "milliseconds",
        lines: lines(modes, |figures| {
            let of = figures.restarts.iter();
            let points = of.map(|restart| (f64::from(restart.services), restart.median_ms)).collect();
            vec![("median", Stroke::Solid, points)]
        }),
        targets: vec![target("target, ebpf", "ebpf", 300.0)],
    }
}

fn memory(modes: &[Figures]) -> Chart {
    Chart {
        name: "memory",
        title: "Memory, with objects from an API server",
        unit: "MiB",
        lines: lines(modes, |figures| {
            vec![
                ("RSS, settled", Stroke::Solid, from_api(figures, |memory| Some(memory.settled_kib))),
                ("RSS, peak", Stroke::Dashed, from_api(figures, |memory| Some(memory.peak_kib))),
                ("BPF maps in the kernel", Stroke::Dotted, from_api(figures, maps_kib)),
            ]
        }),
        targets: vec![
            target("target, ebpf: settled", "ebpf", 90.0),
            target("target, ebpf: peak", "ebpf", 130.0),
            target("target, ebpf: maps", "ebpf", 150.0),
        ],
    }
}

const fn target(label: &'static str, mode: &'static str, value: f64) -> Target {
    Target { label, mode: Some(mode), value }
}

/// Returns the lines of all modes. Lines without points are left out.
fn lines(
    modes: &[Figures],
    of_mode: impl Fn(&Figures) -> Vec<(&'static str, Stroke, Vec<(f64, f64)>)>,
) -> Vec<Line> {
    let of_mode = |figures: &Figures| {
        let mode = figures.mode.clone();
        let named = of_mode(figures).into_iter().filter(|(.., points)| !points.is_empty());
        let line = move |(what, stroke, points)| {
            let label = format!("{mode}: {what}");
            Line { label, mode: mode.clone(), stroke, points }
        };
        named.map(line).collect::<Vec<_>>()
    };
    modes.iter().flat_map(of_mode).collect()
}

fn changes(figures: &Figures, kind: &str, value: impl Fn(&Change) -> f64) -> Vec<(f64, f64)> {
    let of_kind = figures.changes.iter().filter(|change| change.changed == kind);
    of_kind.map(|change| (f64::from(change.services), value(change))).collect()
}

/// Returns values in MiB, from values in KiB.
fn from_api(figures: &Figures, kib: impl Fn(&Memory) -> Option<u32>) -> Vec<(f64, f64)> {
    let from_api = figures.memory.iter().filter(|memory| memory.source == "API");
    from_api
        .filter_map(|memory| Some((f64::from(memory.services), f64::from(kib(memory)?) / 1024.0)))
        .collect()
}

fn maps_kib(memory: &Memory) -> Option<u32> {
    (!memory.maps.is_empty()).then(|| memory.maps.iter().map(|map| map.kib).sum())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Figures as the benchmark writes them, with fields that curves do not need.
    pub(crate) fn figures(mode: &str) -> Figures {
        let maps = if mode == "ebpf" {
            r#"[{"name": "flows", "kib": 1024}, {"name": "node", "kib": 512}]"#
        } else {
            "[]"
        };
        let json = format!(
            r#"{{"mode": "{mode}", "kernel": "6.1", "targets": [], "changes": [
                {{"services": 10, "changed": "endpoint", "median_us": 20.0, "p99_us": 40.0}},
                {{"services": 1000, "changed": "endpoint", "median_us": 25.0, "p99_us": 50.0}},
                {{"services": 1000, "changed": "large-endpoint", "median_us": 30.0, "p99_us": 60.0}},
                {{"services": 1000, "changed": "everything", "median_us": 2e5, "p99_us": 2e5}}],
            "memory": [
                {{"services": 10, "source": "manifests", "settled_kib": 1, "peak_kib": 2, "maps": []}},
                {{"services": 10, "source": "API", "settled_kib": 10240, "peak_kib": 20480, "maps": {maps}}}],
            "restarts": [{{"services": 10, "restarts": 5, "median_ms": 80.0, "max_ms": 90.0}}]}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn points<'a>(chart: &'a Chart, label: &str) -> Option<&'a [(f64, f64)]> {
        chart.lines.iter().find(|line| line.label == label).map(|line| &*line.points)
    }

    #[test]
    fn each_chart_shows_its_figures_in_its_unit() {
        let modes = ["ebpf", "nftables"].map(figures);
        let [sync, endpoint, restart, memory] = &*all(&modes) else { panic!("not four charts") };
        assert_eq!(points(sync, "nftables: first sync"), Some(&[(1_000.0, 0.2)][..]));
        assert_eq!(points(endpoint, "ebpf: p99"), Some(&[(10.0, 40.0), (1_000.0, 50.0)][..]));
        assert_eq!(points(endpoint, "ebpf: p99, one of 5,000"), Some(&[(1_000.0, 60.0)][..]));
        assert_eq!(points(restart, "ebpf: median"), Some(&[(10.0, 80.0)][..]));
        assert_eq!(points(memory, "ebpf: RSS, settled"), Some(&[(10.0, 10.0)][..]), "not from manifests");
        assert_eq!(points(memory, "ebpf: BPF maps in the kernel"), Some(&[(10.0, 1.5)][..]));
    }

    #[test]
    fn lines_without_figures_are_left_out() {
        assert_eq!(points(&memory(&[figures("nftables")]), "nftables: BPF maps in the kernel"), None);
    }
}
