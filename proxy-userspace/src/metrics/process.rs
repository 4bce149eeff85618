//! Exports the resource usage of the process, under the names that Prometheus' client libraries and
//! upstream use.

use std::{env::consts, fmt, sync::OnceLock};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};
use tokio::runtime::Handle;

use super::Labels;
use crate::kernel::{
    KernelError,
    own_process::{self, Usage},
};

/// The labels of `kubernetes_build_info`. Alerts take the first two numbers of `git_version`.
pub(super) const BUILD_OF_KUBERNETES: Labels<9> = [
    ("major", "1"),
    ("minor", "36"),
    ("git_version", concat!("v1.36.0+shunt-", env!("CARGO_PKG_VERSION"))),
    ("git_commit", ""),
    ("git_tree_state", ""),
    ("build_date", ""),
    ("go_version", ""),
    ("compiler", "rustc"),
    ("platform", PLATFORM),
];

/// The platform under Go's name.
const PLATFORM: &str = match consts::ARCH.as_bytes() {
    b"x86_64" => "linux/amd64",
    b"aarch64" => "linux/arm64",
    _ => "linux/other",
};

/// Reads the resource usage at each scrape.
#[derive(Debug, Default)]
pub(super) struct ProcessCollector {
    /// The start time in seconds since 1970. It does not change, so it is read once.
    started_at: OnceLock<f64>,
}

impl ProcessCollector {
    fn read(&self) -> Result<(f64, Usage), KernelError> {
        let usage = own_process::usage()?;
        if let Some(started_at) = self.started_at.get() {
            return Ok((*started_at, usage));
        }
        let started_at = own_process::started_at()?;
        Ok((*self.started_at.get_or_init(|| started_at), usage))
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (started_at, usage) = match self.read() {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "cannot read the resource usage of the process; the scrape omits it");
                return Ok(());
            }
        };
        let Usage { cpu_seconds, resident, mapped, open_files, max_files, threads } = usage;
        let to = &mut encoder;
        let (cpu, start) = (ConstCounter::new(cpu_seconds), ConstGauge::new(started_at));
        write(to, "cpu_seconds", "Total user and system CPU time spent in seconds.", &cpu)?;
        write(to, "start_time_seconds", "Start time of the process since unix epoch in seconds.", &start)?;
        write(to, "resident_memory_bytes", "Resident memory size in bytes.", &gauge(resident))?;
        write(to, "virtual_memory_bytes", "Virtual memory size in bytes.", &gauge(mapped))?;
        write(to, "open_fds", "Number of open file descriptors.", &gauge(open_files))?;
        write(to, "threads", "Number of OS threads in the process.", &gauge(threads))?;
        if let Some(most) = max_files {
            write(to, "max_fds", "Maximum number of open file descriptors.", &gauge(most))?;
        }
        Ok(())
    }
}

/// Reads the number of tasks of the asynchronous runtime at each scrape.
#[derive(Debug)]
pub(super) struct TaskCollector;

impl Collector for TaskCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // Tests have no runtime.
        let Ok(runtime) = Handle::try_current() else { return Ok(()) };
        let tasks = gauge(runtime.metrics().num_alive_tasks() as u64);
        write(&mut encoder, "tasks", "Tasks of the asynchronous runtime", &tasks)
    }
}

/// Writes a metric without labels.
fn write(to: &mut DescriptorEncoder<'_>, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
    metric.encode(to.encode_descriptor(name, help, None, metric.metric_type())?)
}

fn gauge(value: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
}
