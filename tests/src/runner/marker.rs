//! A Service of the runner that shows when the proxy has programmed a change.
//!
//! The runner changes this Service and its EndpointSlice after the objects of a step. When the node
//! reaches the new endpoint at the new port, its proxy has seen the step, even if Services and
//! slices arrive independently. Then the runner changes both again: when the second port answers,
//! the sync that included the step has ended.
//!
//! A source may wait for a while before it believes that a file is gone. A step that deletes
//! objects therefore also deletes another Service of the runner, and waits until the node no longer
//! reaches it.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};

use super::Objects;
use crate::{
    agent::protocol::{ConnectRequest, Protocol},
    case::ObjectKey,
    deadline::{Deadline, Stopwatch, scaled},
    world::{Host, World},
};

/// An address in the range of cluster IPs that no case uses.
const CLUSTER_IP: &str = "10.96.255.254";
/// The VIP of the Service that is deleted.
const DELETED: &str = "10.96.255.253:20000";
const FIRST_PORT: u16 = 20_000;
/// The endpoints of the marker, in turn. They are pods of node1, which works in every mode and
/// needs no other node.
const ENDPOINTS: [Host; 2] = [Host::A3, Host::A2];
/// The addresses of both Services. A proxy translates them before the kernel looks for a route.
const ADDRESSES: &str = "10.96.255.252/30";
/// The timeout of one attempt. A packet to an unknown address may get no answer.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(100);
/// A Service is gone after this many attempts in a row without an answer. One attempt can also fail
/// because the machine is busy for longer than the timeout.
const MISSES_IF_GONE: u32 = 3;

/// The marker with its current port.
pub(super) struct Marker {
    port: u16,
    nodes: Vec<Host>,
}

impl Marker {
    /// Adds the marker for the proxies of these nodes to the objects.
    pub(super) fn place(world: &World, objects: &Objects, nodes: &[Host]) -> Result<Self> {
        for node in nodes.iter().filter(|node| **node != Host::Node1) {
            // Without this, the proxy of node1 would answer there.
            world.run(*node, &format!("ip route replace blackhole {ADDRESSES}"))?;
        }
        objects.place("deleted-endpoints.yaml", &endpoints("deleted", ENDPOINTS[0]))?;
        let marker = Self { port: FIRST_PORT, nodes: nodes.to_owned() };
        marker.write(objects)?;
        Ok(marker)
    }

    /// Waits until all proxies have programmed the current objects. Returns the time that it took.
    pub(super) fn wait_until_programmed(
        &mut self,
        world: &mut World,
        objects: &Objects,
        timeout: Duration,
    ) -> Result<Duration> {
        let began = Stopwatch::start();
        for _ in 0..2 {
            self.port += 1;
            self.write(objects)?;
            self.wait_until_reached(world, self.address()?, self.endpoint(), timeout)?;
        }
        Ok(began.elapsed())
    }

    fn write(&self, objects: &Objects) -> Result<()> {
        let address = self.address()?;
        let slice = serde_yaml_ng::from_str(&endpoints("marker", self.endpoint()))?;
        objects.apply(&key("EndpointSlice", "marker"), &slice)?;
        objects.apply(&key("Service", "marker"), &serde_yaml_ng::from_str(&service("marker", address))?)
    }

    fn endpoint(&self) -> Host {
        ENDPOINTS[usize::from(self.port) % ENDPOINTS.len()]
    }

    fn address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::new(CLUSTER_IP.parse()?, self.port))
    }

    fn wait_until_reached(
        &self,
        world: &mut World,
        address: SocketAddr,
        endpoint: Host,
        timeout: Duration,
    ) -> Result<()> {
        self.nodes.iter().try_for_each(|node| wait_until_reached(world, *node, address, endpoint, timeout))
    }

    /// Adds the Service to delete with the objects of a step, and waits until it is programmed.
    pub(super) fn prepare_deletion(
        &self,
        world: &mut World,
        objects: &Objects,
        timeout: Duration,
    ) -> Result<()> {
        let address: SocketAddr = DELETED.parse()?;
        objects.apply(&key("Service", "deleted"), &serde_yaml_ng::from_str(&service("deleted", address))?)?;
        self.wait_until_reached(world, address, ENDPOINTS[0], timeout)
    }

    /// Deletes this Service after the objects of the step, and waits until it is gone.
    pub(super) fn delete(&self, world: &mut World, objects: &Objects, timeout: Duration) -> Result<()> {
        objects.delete(&key("Service", "deleted"))?;
        self.nodes.iter().try_for_each(|node| wait_until_gone(world, *node, timeout))
    }
}

fn wait_until_gone(world: &mut World, node: Host, timeout: Duration) -> Result<()> {
    let address: SocketAddr = DELETED.parse()?;
    let mut misses = 0;
    let gone = Deadline::after(timeout).try_poll(|| {
        misses = if is_reached(world, node, address, ENDPOINTS[0])? { 0 } else { misses + 1 };
        anyhow::Ok((misses == MISSES_IF_GONE).then_some(()))
    })?;
    gone.with_context(|| {
        format!("the proxy on {node} has not removed the deleted Service {address} after {timeout:?}")
    })
}

fn is_reached(world: &mut World, node: Host, address: SocketAddr, endpoint: Host) -> Result<bool> {
    let request = ConnectRequest::new(address, Protocol::Tcp, 1).with_timeout(scaled(REQUEST_TIMEOUT));
    let attempts = world.agent(node)?.connect(request)?;
    Ok(attempts.iter().any(|attempt| attempt.is_answered_by(endpoint)))
}

fn wait_until_reached(
    world: &mut World,
    node: Host,
    address: SocketAddr,
    endpoint: Host,
    timeout: Duration,
) -> Result<()> {
    let reached = Deadline::after(timeout)
        .try_poll(|| anyhow::Ok(is_reached(world, node, address, endpoint)?.then_some(())))?;
    reached.with_context(|| {
        format!(
            "the proxy has not programmed the change: after {timeout:?} {node} does not reach {endpoint} at {address}, \
             a Service of the runner that it changes with each step"
        )
    })
}

fn key(kind: &str, name: &str) -> ObjectKey {
    ObjectKey { kind: kind.into(), namespace: Some("conformance".into()), name: name.into() }
}

fn service(name: &str, address: SocketAddr) -> String {
    let (ip, port) = (address.ip(), address.port());
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: conformance}}
spec:
  type: ClusterIP
  clusterIP: {ip}
  clusterIPs: [{ip}]
  ipFamilies: [IPv4]
  ipFamilyPolicy: SingleStack
  internalTrafficPolicy: Cluster
  sessionAffinity: None
  ports: [{{port: {port}, protocol: TCP, targetPort: 8080}}]
"
    )
}

fn endpoints(name: &str, endpoint: Host) -> String {
    let address = endpoint.addresses()[0].addr();
    format!(
        "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}
  namespace: conformance
  labels: {{kubernetes.io/service-name: {name}}}
addressType: IPv4
endpoints:
- addresses: [{address}]
  conditions: {{ready: true, serving: true, terminating: false}}
  nodeName: node1
ports: [{{name: '', port: 8080, protocol: TCP}}]
"
    )
}
