//! Measures the memory of the proxy's process after it has programmed everything.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::kernel_maps::{self, KernelMap};
use crate::{
    deadline::{Deadline, Stopwatch},
    process::status_field,
    runner::Proxy,
    world::World,
};

/// Memory is stable if it has not changed for this time.
const STABLE_FOR: Duration = Duration::from_secs(3);
const STABLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The sources of objects.
pub(super) const MANIFESTS: &str = "manifests";
pub(super) const API: &str = "API";

/// The memory of the process, in KiB.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Memory {
    pub(super) services: usize,
    /// The source of the objects.
    pub(super) source: &'static str,
    /// Resident memory after it became stable.
    pub(super) settled_kib: u64,
    /// The maximum of resident memory.
    pub(super) peak_kib: u64,
    /// The anonymous part of the stable memory, without pages of files such as the program.
    pub(super) anonymous_kib: u64,
    /// The kernel memory of the BPF maps, the largest first. Empty in other modes than ebpf.
    pub(super) maps: Vec<KernelMap>,
}

impl Memory {
    /// Returns the kernel memory of all maps in KiB. None if there are no maps.
    pub(super) fn maps_kib(&self) -> Option<u64> {
        (!self.maps.is_empty()).then(|| self.maps.iter().map(|map| map.kib).sum())
    }
}

/// Starts the proxy, waits until its memory is stable, and removes it.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    source: &'static str,
) -> Result<Memory> {
    proxy.start(world)?;
    let process = proxy.process_id().context("the proxy does not run")?;
    let settled_kib = stable(STABLE_FOR, || status_field(process, "VmRSS")).context("memory")?;
    let memory = Memory {
        services,
        source,
        settled_kib,
        peak_kib: status_field(process, "VmHWM")?,
        anonymous_kib: status_field(process, "RssAnon")?,
        maps: kernel_maps::of(&world.pin_directory(), process)?,
    };
    proxy.stop()?;
    proxy.clean_up(world)?;
    Ok(memory)
}

/// Waits until a value of the process has not changed for this time, and returns it.
pub(super) fn stable(time: Duration, read: impl Fn() -> Result<u64>) -> Result<u64> {
    let mut last = read()?;
    let mut since = Stopwatch::start();
    let stable = Deadline::after(STABLE_TIMEOUT).try_poll(|| {
        let now = read()?;
        if now != last {
            last = now;
            since = Stopwatch::start();
        }
        anyhow::Ok((since.elapsed() >= time).then_some(now))
    })?;
    stable.with_context(|| format!("the value does not become stable within {STABLE_TIMEOUT:?}"))
}
