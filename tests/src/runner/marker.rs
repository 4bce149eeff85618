//! A Service of the runner's own that tells when the proxy has programmed a change.
//!
//! It is changed after the objects of a step; once node1 reaches its new port, the proxy has seen the step. Then it is
//! changed again: by the time the second port answers, the sync that took up the step has ended.
//!
//! A source may doubt for a while that a file is gone for good. So a step that deletes objects deletes one more, another
//! Service of the runner's own, and nothing else counts until node1 reaches that no more.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, bail};

use super::manifests::Manifests;
use crate::{
    agent::protocol::{Dial, Protocol, Try},
    case::ObjectKey,
    deadline::{Deadline, Stopwatch, patient},
    world::{Host, World},
};

/// An address in the cluster's range that no case uses.
const CLUSTER_IP: &str = "10.96.255.254";
/// That of the Service that is deleted.
const DELETED: &str = "10.96.255.253:20000";
const FIRST_PORT: u16 = 20_000;
/// How long one look waits: a packet to an unknown address may vanish.
const LOOK_FOR: Duration = Duration::from_millis(100);

/// The marker and the port it has now.
pub(super) struct Marker {
    port: u16,
}

impl Marker {
    /// Adds the marker to the manifests.
    pub(super) fn place(manifests: &Manifests) -> Result<Self> {
        manifests.place("marker-endpoints.yaml", &(endpoints("marker") + "---" + &endpoints("deleted")))?;
        let marker = Self { port: FIRST_PORT };
        marker.write(manifests)?;
        Ok(marker)
    }

    /// Waits until the proxy has programmed all that is in the manifests now. Returns how long that took.
    pub(super) fn wait_until_programmed(
        &mut self,
        world: &mut World,
        manifests: &Manifests,
        within: Duration,
    ) -> Result<Duration> {
        let began = Stopwatch::start();
        for _ in 0..2 {
            self.port += 1;
            self.write(manifests)?;
            wait_until_reached(world, self.address()?, within)?;
        }
        Ok(began.elapsed())
    }

    fn write(&self, manifests: &Manifests) -> Result<()> {
        let address = self.address()?;
        manifests.apply(&key("marker"), &serde_yaml_ng::from_str(&service("marker", address))?)
    }

    fn address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::new(CLUSTER_IP.parse()?, self.port))
    }

    /// Adds what is to be deleted with the objects of a step, and waits until it is programmed.
    pub(super) fn prepare_deletion(world: &mut World, manifests: &Manifests, within: Duration) -> Result<()> {
        let address: SocketAddr = DELETED.parse()?;
        manifests.apply(&key("deleted"), &serde_yaml_ng::from_str(&service("deleted", address))?)?;
        wait_until_reached(world, address, within)
    }

    /// Deletes it, after the objects of the step, and waits until it is gone.
    pub(super) fn delete(world: &mut World, manifests: &Manifests, within: Duration) -> Result<()> {
        manifests.delete(&key("deleted"))?;
        let address: SocketAddr = DELETED.parse()?;
        match Deadline::after(within)
            .poll(|| is_reached(world, address).map(|is| (!is).then_some(())).transpose())
        {
            Some(result) => result,
            None => bail!("the proxy has not removed the deleted Service {address} after {within:?}"),
        }
    }
}

fn is_reached(world: &mut World, address: SocketAddr) -> Result<bool> {
    let dial = Dial { timeout: patient(LOOK_FOR), ..Dial::new(address, Protocol::Tcp, 1) };
    let tries = world.agent(Host::Node1)?.dial(dial)?;
    Ok(tries.iter().any(|one| matches!(one, Try::Answered(_))))
}

fn wait_until_reached(world: &mut World, address: SocketAddr, within: Duration) -> Result<()> {
    match Deadline::after(within).poll(|| is_reached(world, address).map(|is| is.then_some(())).transpose()) {
        Some(result) => result,
        None => bail!(
            "the proxy has not programmed the change: after {within:?} node1 does not reach {address}, a Service of \
             the runner's own that it changes with each step"
        ),
    }
}

fn key(name: &str) -> ObjectKey {
    ObjectKey { kind: "Service".into(), namespace: Some("conformance".into()), name: name.into() }
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

/// A pod of node1 answers for the marker: that holds in every mode and needs no other node.
fn endpoints(name: &str) -> String {
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
- addresses: [10.244.1.13]
  conditions: {{ready: true, serving: true, terminating: false}}
  nodeName: node1
ports: [{{name: '', port: 8080, protocol: TCP}}]
"
    )
}
