//! The node, pods and Services that the programs other than the conformance runner share.

use std::fmt::Write as _;

use anyhow::Result;

use crate::{runner::Manifests, world::Host};

/// A node, its three pods, and a client outside the cluster.
pub const HOSTS: [Host; 5] = [Host::Node1, Host::A1, Host::A2, Host::A3, Host::Client];
/// The VIP of the first Service.
pub const CLUSTER_IP: &str = "10.96.0.80:80";
/// The node port of the first Service, at the first address of the node.
pub const NODE_PORT: &str = "192.168.57.11:30080";
/// The UDP node port of a third Service, which not all programs have.
pub const NODE_PORT_UDP: &str = "192.168.57.11:30053";
/// The VIP of a second Service, over UDP.
pub const DNS: &str = "10.96.0.53:53";
/// The first and the second Service.
pub const SERVICES: &str = include_str!("small_cluster.yaml");
/// The third Service.
pub const OUTSIDE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: outside, namespace: default}\n\
                           spec: {type: NodePort, clusterIP: 10.96.0.54, ports: [{port: 53, nodePort: 30053, protocol: UDP}]}\n";
/// The Node object of node1.
pub const NODE: &str = include_str!("../demo/node.yaml");

/// Ports of a slice, as in its manifest.
pub const WEB_PORT: &str = "{name: '', protocol: TCP, port: 8080}";
/// Ports of a slice, as in its manifest.
pub const DNS_PORT: &str = "{name: '', protocol: UDP, port: 5353}";

/// A file of EndpointSlices.
#[derive(Debug, Default)]
pub struct Slices {
    text: String,
}

impl Slices {
    /// Adds an EndpointSlice of a Service in one family, with these hosts as endpoints.
    pub fn add(&mut self, service: &str, is_v6: bool, port: &str, hosts: &[Host]) {
        let endpoints: Vec<String> = hosts.iter().map(|host| endpoint(*host, is_v6)).collect();
        let family = if is_v6 { "IPv6" } else { "IPv4" };
        let _infallible = write!(
            self.text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {service}-{}, namespace: default, \
             labels: {{kubernetes.io/service-name: {service}}}}}\naddressType: {family}\nendpoints: [{}]\nports: [{port}]\n",
            family.to_lowercase(),
            endpoints.join(", ")
        );
    }

    /// Returns the EndpointSlices of both Services, with these hosts as endpoints.
    pub fn for_all_services(pods: &[Host]) -> Self {
        let mut slices = Self::default();
        slices.add("web", false, WEB_PORT, pods);
        slices.add("dns", false, DNS_PORT, pods);
        slices
    }

    /// Returns the text of the manifests.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Replaces the previous EndpointSlices in one step.
    pub fn place(&self, manifests: &Manifests) -> Result<()> {
        manifests.place("endpoints.yaml", &self.text)
    }
}

fn endpoint(host: Host, is_v6: bool) -> String {
    let addresses = host.addresses();
    let address = addresses.iter().map(ipnet::IpNet::addr).find(|address| address.is_ipv6() == is_v6);
    let address = address.map(|address| address.to_string()).unwrap_or_default();
    let node = host.node().unwrap_or(host);
    format!(
        "{{addresses: ['{address}'], nodeName: {node}, conditions: {{ready: true}}, \
         targetRef: {{kind: Pod, name: {host}}}}}"
    )
}
