//! The figures of a run of the benchmark, as far as curves need them.

use serde::Deserialize;

/// The figures of one mode: what `tests/src/bench/report.rs` writes as JSON.
#[derive(Debug, Deserialize)]
pub(super) struct Figures {
    pub(super) mode: String,
    pub(super) changes: Vec<Change>,
    pub(super) memory: Vec<Memory>,
    pub(super) restarts: Vec<Restart>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Change {
    pub(super) services: u32,
    pub(super) changed: String,
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Memory {
    pub(super) services: u32,
    pub(super) source: String,
    pub(super) settled_kib: u32,
    pub(super) peak_kib: u32,
    pub(super) maps: Vec<KernelMap>,
}

#[derive(Debug, Deserialize)]
pub(super) struct KernelMap {
    pub(super) kib: u32,
}

#[derive(Debug, Deserialize)]
pub(super) struct Restart {
    pub(super) services: u32,
    pub(super) median_ms: f64,
}
