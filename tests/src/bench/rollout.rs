//! Measures a rollout: all endpoints of one large Service are replaced, one after the other, while
//! clients connect to it.
//!
//! Both the old and the new endpoints answer all the time, so that no connection has a reason to
//! fail. All their addresses belong to one pod.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use aya::maps::{HashMap, Map, MapData};
use nix::unistd::{SysconfVar, sysconf};
use proxy_common::{
    Protocol,
    layout::{ServiceKey, ServiceValue},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{floods::lost, ratio::quantile};
use crate::{
    agent::protocol::{self, ConnectRequest, LoadRequest},
    deadline::Stopwatch,
    runner::{Cluster, Proxy},
    small_cluster::{CLUSTER_IP, NODE, NODE_PORT, SERVICES},
    world::{Host, World},
};

/// The hosts of the world: A1 and the client connect, A3 has the endpoints.
pub(super) const HOSTS: [Host; 4] = [Host::Node1, Host::A1, Host::A3, Host::Client];
/// The addresses of the endpoints before and after.
const RANGES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 245, 0, 0), Ipv4Addr::new(10, 246, 0, 0)];
/// Endpoints of an EndpointSlice, as Kubernetes writes them.
const PER_SLICE: usize = 100;
/// The time between two replacements.
const INTERVAL: Duration = Duration::from_millis(10);
/// Each client has this many workers, which pause for [`WORKER_PAUSE`] between two connections.
const WORKERS: usize = 10;
const WORKER_PAUSE: Duration = Duration::from_millis(20);
const TIMEOUT: Duration = Duration::from_secs(5);
/// The load before the first replacement, and after the last.
const SETTLE: Duration = Duration::from_secs(2);
/// The pause between two looks at the kernel.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The result.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RolloutResult {
    /// Endpoints, each of which was replaced once.
    pub(super) endpoints: usize,
    /// Connections during the rollout, and how many of them failed.
    pub(super) connections: usize,
    pub(super) failed: usize,
    /// Descriptions of the first failures.
    pub(super) failures: Vec<String>,
    /// Changes of the Service in the kernel. Fewer than endpoints if several were made at once.
    /// Known in the ebpf mode only, as the two times.
    pub(super) changes: Option<usize>,
    /// The time from the event at the API server to the change in the kernel, in microseconds.
    pub(super) median_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// CPU time of the proxy for the whole rollout, in seconds.
    pub(super) cpu_seconds: f64,
}

/// Replaces all endpoints, 100 a second.
pub(super) fn measure(
    world: &mut World,
    shunt: &Path,
    mode: &str,
    endpoints: usize,
) -> Result<RolloutResult> {
    let cluster = Cluster::start(world)?;
    cluster.apply_all(NODE)?;
    cluster.apply_all(SERVICES)?;
    for slice in 0..endpoints.div_ceil(PER_SLICE) {
        cluster.server().put(endpoint_slice(slice, 0))?;
    }
    route(world)?;
    let mut proxy = Proxy::new(Host::Node1, world, shunt, mode, &cluster, &serde_yaml_ng::Mapping::new())?;
    proxy.start(world)?;
    let process = proxy.process_id().context("the proxy does not run")?;
    let services = if mode == "ebpf" { Some(world.pin_directory().join("services")) } else { None };
    start_load(world)?;
    thread::sleep(SETTLE);
    let cpu = cpu_time(process)?;
    let replaced = replace_all(&cluster, endpoints, services.as_deref());
    thread::sleep(SETTLE);
    let cpu_seconds = cpu_time(process)? - cpu;
    let mut result = RolloutResult { cpu_seconds, ..replaced? };
    for host in [Host::A1, Host::Client] {
        let report = world.agent(host)?.stop_load(TIMEOUT)?;
        result.connections += report.connections;
        result.failed += lost(&report);
        result.failures.extend(report.failures);
    }
    proxy.stop()?;
    proxy.clean_up(world)?;
    Ok(result)
}

/// Makes all addresses of endpoints those of A3. The node has one neighbor for all of them.
fn route(world: &World) -> Result<()> {
    let gateway = Host::A3.addresses().into_iter().next().context("A3 has addresses")?.addr();
    for range in RANGES {
        world.run(Host::A3, &format!("ip route add local {range}/16 dev lo"))?;
        let link = Host::A3.node_link();
        world.run(Host::Node1, &format!("ip route add {range}/16 via {gateway} dev {link} onlink"))?;
    }
    Ok(())
}

fn start_load(world: &mut World) -> Result<()> {
    for (host, to) in [(Host::A1, CLUSTER_IP), (Host::Client, NODE_PORT)] {
        let stream = ConnectRequest {
            pause: WORKER_PAUSE,
            ..ConnectRequest::new(to.parse()?, protocol::Protocol::Tcp, WORKERS).with_timeout(TIMEOUT)
        };
        world.agent(host)?.start_load(LoadRequest { streams: vec![stream] })?;
    }
    Ok(())
}

/// Returns an EndpointSlice whose first endpoints are replaced.
fn endpoint_slice(slice: usize, replaced: usize) -> Value {
    let endpoints: Vec<Value> = (0..PER_SLICE)
        .map(|index| {
            let range = RANGES[usize::from(index < replaced)].to_bits();
            // From the address 1 on.
            let number = u32::try_from(slice * PER_SLICE + index).unwrap_or(u32::MAX) + 1;
            let address = Ipv4Addr::from_bits(range.saturating_add(number));
            json!({"addresses": [address], "nodeName": "node1", "conditions": {"ready": true}})
        })
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("web-{slice}"), "namespace": "default",
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "", "protocol": "TCP", "port": 8080}],
    })
}

/// Replaces the endpoints, and watches the pinned map of Services meanwhile if it is given.
fn replace_all(cluster: &Cluster, endpoints: usize, services: Option<&Path>) -> Result<RolloutResult> {
    let (began, done) = (Stopwatch::start(), AtomicBool::new(false));
    let (events, changes) = thread::scope(|scope| {
        let watching = services.map(|path| scope.spawn(|| watch_generation(path, began, &done)));
        let events = send_events(cluster, endpoints, began);
        thread::sleep(SETTLE);
        done.store(true, Ordering::Relaxed);
        let changes =
            watching.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        anyhow::Ok((events?, changes.transpose()?))
    })?;
    let lags = changes.as_ref().map(|changes| lags_us(&events, changes));
    let of = |percent| lags.as_ref().and_then(|lags| quantile(lags, percent));
    Ok(RolloutResult {
        endpoints,
        connections: 0,
        failed: 0,
        failures: Vec::new(),
        changes: changes.as_ref().map(Vec::len),
        median_us: of(50),
        p99_us: of(99),
        cpu_seconds: 0.0,
    })
}

/// Sends an event for each endpoint. Returns when.
fn send_events(cluster: &Cluster, endpoints: usize, began: Stopwatch) -> Result<Vec<Duration>> {
    let mut events = Vec::with_capacity(endpoints);
    for number in (0..endpoints).map(|endpoint| u32::try_from(endpoint).unwrap_or(u32::MAX)) {
        let slice = endpoint_slice(number as usize / PER_SLICE, number as usize % PER_SLICE + 1);
        thread::sleep((INTERVAL * number).saturating_sub(began.elapsed()));
        events.push(began.elapsed());
        cluster.server().put(slice)?;
    }
    Ok(events)
}

/// Returns when the generation of the Service changed in the kernel.
fn watch_generation(path: &Path, began: Stopwatch, done: &AtomicBool) -> Result<Vec<Duration>> {
    let map = MapData::from_pin(path).and_then(Map::from_map_data);
    let services: HashMap<MapData, ServiceKey, ServiceValue> =
        map.and_then(HashMap::try_from).with_context(|| format!("open {}", path.display()))?;
    let vip: std::net::SocketAddr = CLUSTER_IP.parse()?;
    let key = ServiceKey::new(IpAddr::into(vip.ip()), vip.port(), Protocol::Tcp);
    let generation = || services.get(&key, 0).context("read the Service").map(|value| value.generation);
    let (mut last, mut changes) = (generation()?, Vec::new());
    while !done.load(Ordering::Relaxed) {
        let now = generation()?;
        if now != last {
            changes.push(began.elapsed());
            last = now;
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(changes)
}

/// Returns the time from each event to the first change after it, sorted. A change that was under
/// way when the event came is taken for that of the event: at this rate it rarely happens.
fn lags_us(events: &[Duration], changes: &[Duration]) -> Vec<f64> {
    let mut lags: Vec<f64> = events
        .iter()
        .filter_map(|event| {
            let after = changes.partition_point(|change| change < event);
            Some(changes.get(after)?.saturating_sub(*event).as_secs_f64() * 1e6)
        })
        .collect();
    lags.sort_by(f64::total_cmp);
    lags
}

/// Returns the CPU time of a process in seconds, with a resolution of a clock tick.
pub(super) fn cpu_time(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // The name of the program, which may have spaces, ends in the last parenthesis. User time and
    // system time are the 12th and the 13th field after it.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    let per_second = sysconf(SysconfVar::CLK_TCK).context("ask for the clock ticks")?.unwrap_or(100);
    #[expect(clippy::cast_precision_loss, reason = "a hundred")]
    Ok(ticks / per_second as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_of_an_event_ends_with_the_next_change() {
        let at =
            |millis: &[u64]| -> Vec<Duration> { millis.iter().copied().map(Duration::from_millis).collect() };
        assert_eq!(lags_us(&at(&[0, 10, 20]), &at(&[1, 13])), [1_000.0, 3_000.0], "the last has none yet");
        assert_eq!(lags_us(&at(&[0, 1]), &at(&[4])), [3_000.0, 4_000.0], "one change for both");
    }

    #[test]
    fn endpoints_of_a_slice_are_replaced_one_by_one() {
        let address = |slice: &Value, index: usize| slice["endpoints"][index]["addresses"][0].clone();
        let half = endpoint_slice(3, 50);
        assert_eq!(address(&half, 49), "10.246.1.94");
        assert_eq!(address(&half, 50), "10.245.1.95");
        assert_eq!(half["endpoints"].as_array().map(Vec::len), Some(100));
    }
}
