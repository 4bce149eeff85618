//! A Service of the runner's own that tells when the proxy has programmed a change.
//!
//! It and its slice are changed after the objects of a step; once node1 reaches the new endpoint at the new port, the proxy
//! has seen the step, also where Services and slices come to it by different ways. Then both are changed again: by the time
//! the second port answers, the sync that took up the step has ended.
//!
//! A source may doubt for a while that a file is gone for good. So a step that deletes objects deletes one more, another
//! Service of the runner's own, and nothing else counts until node1 reaches that no more.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, bail};

use super::Objects;
use crate::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    case::ObjectKey,
    deadline::{Deadline, Stopwatch, scaled},
    world::{Host, World},
};

/// An address in the cluster's range that no case uses.
const CLUSTER_IP: &str = "10.96.255.254";
/// That of the Service that is deleted.
const DELETED: &str = "10.96.255.253:20000";
const FIRST_PORT: u16 = 20_000;
/// Who answers for the marker, in turn: pods of node1, which holds in every mode and needs no other node.
const ENDPOINTS: [Host; 2] = [Host::A3, Host::A2];
/// How long one look waits: a packet to an unknown address may vanish.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(100);

/// The marker and the port it has now.
pub(super) struct Marker {
    port: u16,
}

impl Marker {
    /// Adds the marker to the objects.
    pub(super) fn place(objects: &Objects) -> Result<Self> {
        objects.place("deleted-endpoints.yaml", &endpoints("deleted", ENDPOINTS[0]))?;
        let marker = Self { port: FIRST_PORT };
        marker.write(objects)?;
        Ok(marker)
    }

    /// Waits until the proxy has programmed all that is in the objects now. Returns how long that took.
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
            wait_until_reached(world, self.address()?, self.endpoint(), timeout)?;
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

    /// Adds what is to be deleted with the objects of a step, and waits until it is programmed.
    pub(super) fn prepare_deletion(world: &mut World, objects: &Objects, timeout: Duration) -> Result<()> {
        let address: SocketAddr = DELETED.parse()?;
        objects.apply(&key("Service", "deleted"), &serde_yaml_ng::from_str(&service("deleted", address))?)?;
        wait_until_reached(world, address, ENDPOINTS[0], timeout)
    }

    /// Deletes it, after the objects of the step, and waits until it is gone.
    pub(super) fn delete(world: &mut World, objects: &Objects, timeout: Duration) -> Result<()> {
        objects.delete(&key("Service", "deleted"))?;
        let address: SocketAddr = DELETED.parse()?;
        match Deadline::after(timeout)
            .poll(|| is_reached(world, address, ENDPOINTS[0]).map(|is| (!is).then_some(())).transpose())
        {
            Some(result) => result,
            None => bail!("the proxy has not removed the deleted Service {address} after {timeout:?}"),
        }
    }
}

fn is_reached(world: &mut World, address: SocketAddr, endpoint: Host) -> Result<bool> {
    let request =
        ConnectRequest { timeout: scaled(REQUEST_TIMEOUT), ..ConnectRequest::new(address, Protocol::Tcp, 1) };
    let attempts = world.agent(Host::Node1)?.connect(request)?;
    Ok(attempts.iter().any(|one| matches!(one, Attempt::Answered(answer) if answer.host == endpoint.name())))
}

fn wait_until_reached(
    world: &mut World,
    address: SocketAddr,
    endpoint: Host,
    timeout: Duration,
) -> Result<()> {
    let mut look = || is_reached(world, address, endpoint).map(|is| is.then_some(())).transpose();
    match Deadline::after(timeout).poll(&mut look) {
        Some(result) => result,
        None => bail!(
            "the proxy has not programmed the change: after {timeout:?} node1 does not reach {endpoint} at {address}, a \
             Service of the runner's own that it changes with each step"
        ),
    }
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
