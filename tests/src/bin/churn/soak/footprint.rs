//! What the process of the proxy holds: memory, files, threads and pinned objects.

use std::{fmt, fs};

use anyhow::{Context as _, Result};
use shunt_tests::{process::status_field, runner::Proxy, world::World};

use super::super::leftovers::PinnedObjects;

/// Memory may grow by this much: what the allocator keeps after a large change.
const MORE_MEMORY_KIB: u64 = 12 << 10;

/// What a process holds.
#[derive(Debug)]
pub(super) struct Footprint {
    resident_kib: u64,
    files: usize,
    threads: u64,
    pinned: String,
}

impl Footprint {
    /// Reads what the running process holds.
    pub(super) fn read(proxy: &Proxy, world: &World) -> Result<Self> {
        let process = proxy.process_id().context("the proxy does not run")?;
        Ok(Self {
            resident_kib: status_field(process, "VmRSS")?,
            files: fs::read_dir(format!("/proc/{process}/fd")).context("list open files")?.count(),
            threads: status_field(process, "Threads")?,
            pinned: PinnedObjects::read(world)?.to_string(),
        })
    }

    /// Returns a line for each thing of which there is more than at the start.
    pub(super) fn more_than(&self, start: &Self) -> Vec<String> {
        let Self { resident_kib, files, threads, pinned } = self;
        let mut more = Vec::new();
        if *resident_kib > start.resident_kib + MORE_MEMORY_KIB {
            more.push(format!("{resident_kib} KiB of memory instead of {}", start.resident_kib));
        }
        if *files > start.files {
            more.push(format!("{files} open files instead of {}", start.files));
        }
        if *threads > start.threads {
            more.push(format!("{threads} threads instead of {}", start.threads));
        }
        if *pinned != start.pinned {
            more.push(format!("{pinned} instead of {}", start.pinned));
        }
        more
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resident_kib, files, threads, pinned } = self;
        write!(f, "{resident_kib} KiB, {files} open files, {threads} threads, {pinned}")
    }
}
