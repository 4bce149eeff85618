//! What the proxy's process holds once it has programmed everything.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::protocol::{BenchRequest, BenchResponse};
use crate::{
    agent::Agent,
    deadline::{Deadline, Stopwatch},
    runner::Proxy,
    world::World,
};

/// It counts as settled when it has not grown or shrunk for so long.
const STABLE_FOR: Duration = Duration::from_secs(3);
const STABLE_TIMEOUT: Duration = Duration::from_secs(30);
const SERVE_TIMEOUT: Duration = Duration::from_mins(1);

/// The process's memory, in KiB.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Memory {
    pub(super) services: usize,
    /// Where objects came from.
    pub(super) source: &'static str,
    /// Resident once nothing changes any more.
    pub(super) settled_kib: u64,
    /// The most that ever was resident.
    pub(super) peak_kib: u64,
    /// Of the settled memory, the process's own: not pages of files, such as its program.
    pub(super) anonymous_kib: u64,
}

/// Starts the proxy, waits until it rests, and removes it.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    source: &'static str,
) -> Result<Memory> {
    proxy.start(world)?;
    let status = PathBuf::from(format!("/proc/{}/status", proxy.process_id().context("it does not run")?));
    let settled_kib = settled(&status)?;
    let memory = Memory {
        services,
        source,
        settled_kib,
        peak_kib: field(&status, "VmHWM")?,
        anonymous_kib: field(&status, "RssAnon")?,
    };
    proxy.stop()?;
    proxy.clean_up(world)?;
    Ok(memory)
}

/// Has the agent be an API server, and returns its URL.
pub(super) fn serve_api(agent: &mut Agent, services: usize) -> Result<String> {
    match agent.bench(BenchRequest::ServeApi(services), SERVE_TIMEOUT)? {
        BenchResponse::Api(url) => Ok(url),
        other => bail!("expected an API server, the agent says {other:?}"),
    }
}

fn settled(status: &PathBuf) -> Result<u64> {
    let mut last = field(status, "VmRSS")?;
    let mut since = Stopwatch::start();
    let settled = Deadline::after(STABLE_TIMEOUT).poll(|| {
        let now = match field(status, "VmRSS") {
            Ok(now) => now,
            Err(error) => return Some(Err(error)),
        };
        if now != last {
            last = now;
            since = Stopwatch::start();
        }
        (since.elapsed() >= STABLE_FOR).then_some(Ok(now))
    });
    settled.unwrap_or_else(|| bail!("the proxy's memory does not settle within {STABLE_TIMEOUT:?}"))
}

fn field(status: &PathBuf, name: &str) -> Result<u64> {
    let text = fs::read_to_string(status).with_context(|| format!("read {}", status.display()))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = value.and_then(|value| value.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("no {name} in {}", status.display()))
}
