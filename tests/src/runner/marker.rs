//! A Service of the runner's own that tells when the proxy has programmed a change.
//!
//! It is changed after the objects of a step; once node1 reaches its new port, the proxy has seen the step. Then it is
//! changed again: by the time the second port answers, the sync that took up the step has ended.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, bail};
use serde_yaml_ng::Mapping;

use super::manifests::Manifests;
use crate::{
    agent::protocol::{Dial, Protocol, Try},
    case::ObjectKey,
    deadline::{Deadline, Stopwatch, patient},
    world::{Host, World},
};

/// An address in the cluster's range that no case uses.
const CLUSTER_IP: &str = "10.96.255.254";
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
        manifests.place("marker-endpoints.yaml", &endpoints())?;
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
            self.wait_until_reached(world, within)?;
        }
        Ok(began.elapsed())
    }

    fn wait_until_reached(&self, world: &mut World, within: Duration) -> Result<()> {
        let address = SocketAddr::new(CLUSTER_IP.parse()?, self.port);
        let agent = world.agent(Host::Node1)?;
        let found = Deadline::after(within).poll(|| {
            match agent.dial(Dial { timeout: patient(LOOK_FOR), ..Dial::new(address, Protocol::Tcp, 1) }) {
                Err(error) => Some(Err(error)),
                Ok(tries) => tries.iter().any(|one| matches!(one, Try::Answered(_))).then_some(Ok(())),
            }
        });
        match found {
            Some(result) => result,
            None => bail!(
                "the proxy has not programmed the change: after {within:?} node1 does not reach {address}, \
                 the Service conformance/marker that the runner changes last"
            ),
        }
    }

    fn write(&self, manifests: &Manifests) -> Result<()> {
        let manifest: Mapping = serde_yaml_ng::from_str(&service(self.port))?;
        let key = ObjectKey {
            kind: "Service".to_owned(),
            namespace: Some("conformance".to_owned()),
            name: "marker".to_owned(),
        };
        manifests.apply(&key, &manifest)
    }
}

fn service(port: u16) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: marker, namespace: conformance}}
spec:
  type: ClusterIP
  clusterIP: {CLUSTER_IP}
  clusterIPs: [{CLUSTER_IP}]
  ipFamilies: [IPv4]
  ipFamilyPolicy: SingleStack
  internalTrafficPolicy: Cluster
  sessionAffinity: None
  ports: [{{port: {port}, protocol: TCP, targetPort: 8080}}]
"
    )
}

/// A pod of node1 answers for the marker: that holds in every mode and needs no other node.
fn endpoints() -> String {
    "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: marker
  namespace: conformance
  labels: {kubernetes.io/service-name: marker}
addressType: IPv4
endpoints:
- addresses: [10.244.1.13]
  conditions: {ready: true, serving: true, terminating: false}
  nodeName: node1
ports: [{name: '', port: 8080, protocol: TCP}]
"
    .to_owned()
}
