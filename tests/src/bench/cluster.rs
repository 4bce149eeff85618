//! Generates the measured cluster: one Service under load, and as many others as requested, with
//! four endpoints each. From 1,000 Services on, one of the others has 5,000 endpoints.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::protocol::Workload;
use crate::runner::Manifests;

/// The number of endpoints of every Service. Those of the measured Service are ports of the same
/// pod, so that direct connections go to the same endpoints.
pub(super) const ENDPOINTS: u16 = 4;
/// The cluster IP of the measured Service.
pub(super) const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// The address of the pod behind the measured Service: a2.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 12);
/// The namespace of the measured Service.
pub(super) const MEASURED_NAMESPACE: &str = "bench";
/// The namespace of the large Service.
pub(super) const LARGE_NAMESPACE: &str = "large";
/// The number of endpoints of each slice of the large Service, as Kubernetes writes them.
pub(super) const LARGE_SLICE: usize = 100;

/// From this number of Services on, one of them is large. In a smaller cluster it would be most of
/// what is measured.
const LARGE_FROM: usize = 1_000;
const LARGE_ENDPOINTS: usize = 5_000;
const LARGE_CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 81);
/// The first address of its endpoints, after those of 60,000 other Services.
const LARGE_PODS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 0);
/// The number of paths. Each path has its own ports, so that it does not meet what another path
/// left in the server's `TIME_WAIT`.
const PATHS: u16 = 5;
const SPARE: u16 = PATHS;
const FOREIGN: u16 = SPARE + 1;
/// The distance between the ports of two paths.
const PORTS_OF_PATH: u16 = 4;
const FIRST_ENDPOINT_PORT: u16 = 9_000;
const FIRST_PORT: u16 = 1_000;
const FIRST_NODE_PORT: u16 = 30_000;
const OBJECTS_PER_FILE: usize = 100;
const NODES: usize = 100;

/// One port of the measured Service, for one path and workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredPort {
    number: u16,
    /// The workload.
    pub(super) workload: Workload,
}

impl MeasuredPort {
    /// Returns the port of the `path`th path.
    pub(super) fn new(path: u16, workload: Workload) -> Self {
        Self { number: path * PORTS_OF_PATH + workload as u16, workload }
    }

    /// Returns a port that belongs to no path.
    pub(super) fn spare(workload: Workload) -> Self {
        Self::new(SPARE, workload)
    }

    /// Returns a port that no Service has. Its endpoint ports are ports of the server's pod.
    pub(super) fn foreign(workload: Workload) -> Self {
        Self::new(FOREIGN, workload)
    }

    fn all() -> impl Iterator<Item = Self> {
        (0..=SPARE).flat_map(|path| Workload::ALL.map(|workload| Self::new(path, workload)))
    }

    /// Returns the port on the cluster IP.
    pub(super) fn port(self) -> u16 {
        FIRST_PORT + self.number
    }

    /// Returns the node port.
    pub(super) fn node_port(self) -> u16 {
        FIRST_NODE_PORT + self.number
    }

    /// Returns the ports of its endpoints on the server's pod.
    pub(super) fn endpoint_ports(self) -> impl Iterator<Item = u16> {
        (0..ENDPOINTS).map(move |slice| self.endpoint_port(slice))
    }

    fn endpoint_port(self, slice: u16) -> u16 {
        FIRST_ENDPOINT_PORT + self.number * ENDPOINTS + slice
    }

    fn name(self) -> String {
        format!("p{}", self.number)
    }
}

/// Returns the ports on which the server's pod must answer.
pub(super) fn server_ports() -> Vec<(Workload, u16)> {
    MeasuredPort::all()
        .chain(Workload::ALL.map(MeasuredPort::foreign))
        .flat_map(|port| port.endpoint_ports().map(move |number| (port.workload, number)))
        .collect()
}

/// Writes a cluster with this number of Services into manifests, the measured Service included.
pub(super) fn write(manifests: &Manifests, services: usize) -> Result<()> {
    place(manifests, &objects(services).collect::<Vec<_>>())
}

/// Writes objects into manifests.
pub(super) fn place(manifests: &Manifests, objects: &[Value]) -> Result<()> {
    for (number, some) in objects.chunks(OBJECTS_PER_FILE).enumerate() {
        let documents: Vec<String> =
            some.iter().map(serde_yaml_ng::to_string).collect::<Result<_, _>>().context("write YAML")?;
        manifests.place(&format!("cluster-{number:04}.yaml"), &documents.join("---\n"))?;
    }
    Ok(())
}

/// Returns the objects of a cluster with this number of Services.
pub(super) fn objects(services: usize) -> impl Iterator<Item = Value> {
    let large = services >= LARGE_FROM;
    let others = 0..services.saturating_sub(1 + usize::from(large));
    let others = others.flat_map(|number| [service(number), slice(number)]);
    measured().into_iter().chain(large.then(large_service).into_iter().flatten()).chain(others)
}

/// Returns the Service with 5,000 endpoints, and its EndpointSlices.
fn large_service() -> impl Iterator<Item = Value> {
    let ports = json!([{"name": "http", "protocol": "TCP", "port": 8080}]);
    let slices = (0..LARGE_ENDPOINTS / LARGE_SLICE).map(move |slice| {
        let pods = slice * LARGE_SLICE..(slice + 1) * LARGE_SLICE;
        let endpoints: Vec<Value> =
            pods.map(|pod| endpoint(nth(LARGE_PODS, pod), &format!("node-{}", pod % NODES))).collect();
        endpoint_slice(LARGE_NAMESPACE, "large", &format!("large-{slice:02}"), &endpoints.into(), &ports)
    });
    std::iter::once(cluster_ip_service(LARGE_NAMESPACE, "large", LARGE_CLUSTER_IP)).chain(slices)
}

/// Returns the measured Service, its EndpointSlices, and the Node.
fn measured() -> Vec<Value> {
    let ports: Vec<Value> = MeasuredPort::all()
        .map(|port| {
            json!({"name": port.name(), "protocol": port.workload.protocol(), "port": port.port(), "nodePort": port.node_port()})
        })
        .collect();
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "measured", "namespace": MEASURED_NAMESPACE},
        "spec": {"type": "NodePort", "clusterIP": CLUSTER_IP, "clusterIPs": [CLUSTER_IP], "ports": ports},
    });
    let slices = (0..ENDPOINTS).map(|slice| {
        let ports: Vec<Value> = MeasuredPort::all()
            .map(|port| {
                json!({"name": port.name(), "protocol": port.workload.protocol(), "port": port.endpoint_port(slice)})
            })
            .collect();
        let endpoints = json!([endpoint(SERVER, "node1")]);
        endpoint_slice(
            MEASURED_NAMESPACE,
            "measured",
            &format!("measured-{slice}"),
            &endpoints,
            &ports.into(),
        )
    });
    [node(), service].into_iter().chain(slices).collect()
}

/// Returns the Node that the proxy runs on.
pub(super) fn node() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"},
        "spec": {"podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.168.57.11"}]},
    })
}

fn service(number: usize) -> Value {
    cluster_ip_service(&namespace(number), &service_name(number), cluster_ip(number))
}

fn cluster_ip_service(namespace: &str, name: &str, address: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": {"app": name},
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
        },
    })
}

fn slice(number: usize) -> Value {
    let service = service_name(number);
    let endpoints: Vec<Value> = (0..usize::from(ENDPOINTS))
        .map(|index| number * usize::from(ENDPOINTS) + index)
        .map(|pod| {
            let mut endpoint = endpoint(pod_ip(pod), &format!("node-{}", pod % NODES));
            let name = format!("{service}-6f7d9c5b84-{pod:05x}");
            endpoint["targetRef"] = json!({"kind": "Pod", "namespace": namespace(number), "name": name});
            endpoint
        })
        .collect();
    let ports = json!([{"name": "http", "protocol": "TCP", "port": 8080}]);
    endpoint_slice(&namespace(number), &service, &format!("{service}-x7k2p"), &endpoints.into(), &ports)
}

pub(super) fn endpoint_slice(
    namespace: &str,
    service: &str,
    name: &str,
    endpoints: &Value,
    ports: &Value,
) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4", "endpoints": endpoints, "ports": ports,
    })
}

pub(super) fn endpoint(address: Ipv4Addr, node: &str) -> Value {
    json!({
        "addresses": [address], "nodeName": node, "zone": "zone-a",
        "conditions": {"ready": true, "serving": true, "terminating": false},
    })
}

fn namespace(number: usize) -> String {
    format!("team-{}", number % 50)
}

fn service_name(number: usize) -> String {
    format!("backend-{number:05}")
}

/// Returns an address from 10.96.1.0 on.
fn cluster_ip(number: usize) -> Ipv4Addr {
    nth(Ipv4Addr::new(10, 96, 1, 0), number)
}

/// Returns an address from 10.244.16.0 on. These are pods of other nodes. Nothing connects to them.
fn pod_ip(number: usize) -> Ipv4Addr {
    nth(Ipv4Addr::new(10, 244, 16, 0), number)
}

fn nth(first: Ipv4Addr, number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(first.to_bits().saturating_add(u32::try_from(number).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_cluster_has_the_requested_number_of_distinct_services() {
        let objects: Vec<Value> = objects(10_000).collect();
        let services: BTreeSet<String> = objects
            .iter()
            .filter(|object| object["kind"] == "Service")
            .map(|object| object["spec"]["clusterIP"].to_string())
            .collect();
        assert_eq!(services.len(), 10_000);
    }

    #[test]
    fn a_large_cluster_has_a_service_with_5_000_distinct_endpoints() {
        let addresses = |services| -> BTreeSet<String> {
            let of_large =
                |object: &Value| object["metadata"]["name"].as_str()?.strip_prefix("large-").map(drop);
            let slices = objects(services).filter(|object| of_large(object).is_some());
            let endpoints =
                slices.flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default());
            endpoints.map(|endpoint| endpoint["addresses"][0].to_string()).collect()
        };
        assert_eq!(addresses(1_000).len(), 5_000);
        assert_eq!(addresses(999).len(), 0, "a small cluster has none");
    }

    #[test]
    fn no_two_servers_share_a_port() {
        let ports = server_ports();
        let distinct: BTreeSet<u16> = ports.iter().map(|(_, port)| *port).collect();
        let servers = usize::from((FOREIGN + 1) * ENDPOINTS) * Workload::ALL.len();
        assert_eq!((distinct.len(), ports.len()), (servers, servers));
    }
}
