//! Measures what Maglev tables cost the proxy: those of many Services, and one that changes.

use std::{fs, net::Ipv4Addr, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use super::{cluster, memory};
use crate::{
    runner::{Manifests, Proxy},
    world::World,
};

/// Services, and the endpoints of each.
const SERVICES: u32 = 1_000;
const ENDPOINTS: u32 = 100;
/// Changes of one endpoint.
const CHANGES: u32 = 20;
/// The thread of the proxy that fills tables.
const THREAD: &str = "maglev";
/// The thread is done if it has used no CPU time for this long.
const IDLE: Duration = Duration::from_secs(1);

/// CPU time of the thread that fills tables, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct MaglevTables {
    pub(super) services: u32,
    pub(super) endpoints: u32,
    /// For all tables.
    pub(super) all_ms: f64,
    /// For the table of a Service of which one endpoint changed.
    pub(super) change_ms: f64,
}

/// Writes the Services.
pub(super) fn place(manifests: &Manifests) -> Result<()> {
    let services = (0..SERVICES).map(service);
    let objects: Vec<Value> = services.chain((1..SERVICES).map(|number| slice(number, 0))).collect();
    cluster::place(manifests, &[objects, vec![cluster::node()]].concat())?;
    change(manifests, 0)
}

/// Replaces an endpoint of the first Service.
fn change(manifests: &Manifests, version: u32) -> Result<()> {
    manifests.place("change.yaml", &serde_yaml_ng::to_string(&slice(0, version))?)
}

fn service(number: u32) -> Value {
    let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 1, 0).to_bits() + number);
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name(number), "namespace": "default", "annotations": {"shunt.dev/balance": "maglev"},
        },
        "spec": {
            "clusterIP": address, "clusterIPs": [address],
            "ports": [{"name": "p", "protocol": "TCP", "port": 80}],
        },
    })
}

/// Returns the endpoints of a Service. The last one is another one in each version.
fn slice(number: u32, version: u32) -> Value {
    let first = Ipv4Addr::new(10, 100, 0, 0).to_bits() + number * (ENDPOINTS + CHANGES);
    let last = ENDPOINTS - 1;
    let addresses = (0..last).chain([last + version]).map(|endpoint| Ipv4Addr::from_bits(first + endpoint));
    let endpoints: Vec<Value> = addresses.map(|address| cluster::endpoint(address, "node2")).collect();
    let ports = json!([{"name": "p", "protocol": "TCP", "port": 8080}]);
    cluster::endpoint_slice("default", &name(number), &name(number), &json!(endpoints), &ports)
}

fn name(number: u32) -> String {
    format!("service-{number}")
}

/// Starts the proxy, changes one endpoint after the other, and removes the proxy.
pub(super) fn measure(world: &mut World, proxy: &mut Proxy, manifests: &Manifests) -> Result<MaglevTables> {
    proxy.start(world)?;
    let schedstat = schedstat(proxy.process_id().context("the proxy does not run")?)?;
    let all = cpu_time(&schedstat)?;
    for version in 1..=CHANGES {
        change(manifests, version)?;
        cpu_time(&schedstat)?;
    }
    let change = cpu_time(&schedstat)?.saturating_sub(all) / CHANGES;
    proxy.stop()?;
    proxy.clean_up(world)?;
    let [all_ms, change_ms] = [all, change].map(|time| time.as_secs_f64() * 1e3);
    Ok(MaglevTables { services: SERVICES, endpoints: ENDPOINTS, all_ms, change_ms })
}

/// Returns the file with the CPU time of the thread.
fn schedstat(process: u32) -> Result<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).context("list the threads of the proxy")?;
    let mut threads = tasks.filter_map(|task| Some(task.ok()?.path()));
    let is_it =
        |thread: &PathBuf| fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.trim() == THREAD);
    Ok(threads.find(is_it).with_context(|| format!("no thread {THREAD}"))?.join("schedstat"))
}

/// Waits until the thread is idle, and returns its CPU time.
fn cpu_time(schedstat: &PathBuf) -> Result<Duration> {
    let nanoseconds = memory::stable(IDLE, || {
        let text = fs::read_to_string(schedstat).with_context(|| schedstat.display().to_string())?;
        let time = text.split(' ').next().context("an empty file")?;
        time.parse().context("a number of nanoseconds")
    })?;
    Ok(Duration::from_nanos(nanoseconds))
}
