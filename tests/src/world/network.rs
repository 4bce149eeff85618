//! Builds the network of a world: a namespace for each host, a bridge, and the links between them.

use std::{collections::BTreeMap, os::fd::AsFd as _};

use anyhow::{Context as _, Result, bail};

use super::{Host, LINK, netlink::Netlink, netns::Netns, sysctl};

const BRIDGE: &str = "br0";

/// Returns the namespaces of these hosts, connected with each other.
pub(super) fn build(run: &str, hosts: &[Host]) -> Result<BTreeMap<Host, Netns>> {
    let mut namespaces = BTreeMap::new();
    for host in hosts {
        let namespace = Netns::create(&format!("{run}-{host}"))?;
        namespace.run(|| {
            sysctl::apply(host.node().is_none() && *host != Host::Client)?;
            Netlink::open()?.up("lo")
        })?;
        namespaces.insert(*host, namespace);
    }
    join_with_bridge(run, &namespaces)?;
    // Nodes before pods, and links before routes, because a gateway must be reachable when its
    // route is added.
    for (host, namespace) in namespaces.iter().filter(|(host, _)| host.node().is_none()) {
        namespace.run(|| set_up_link(*host)).with_context(|| host.name())?;
    }
    for (pod, namespace) in &namespaces {
        let Some(node) = pod.node() else { continue };
        let Some(node_namespace) = namespaces.get(&node) else { bail!("{pod} needs {node} in the world") };
        node_namespace.run(|| connect_pod(*pod, node, namespace)).with_context(|| pod.name())?;
        namespace.run(|| set_up_pod(*pod, node)).with_context(|| pod.name())?;
    }
    Ok(namespaces)
}

/// Creates a bridge in its own namespace, and connects the nodes and the client to it.
fn join_with_bridge(run: &str, namespaces: &BTreeMap<Host, Netns>) -> Result<()> {
    let bridge = Netns::create(&format!("{run}-bridge"))?;
    bridge.run(|| {
        sysctl::apply(false)?;
        let netlink = Netlink::open()?;
        netlink.add_bridge(BRIDGE)?;
        for (host, namespace) in namespaces.iter().filter(|(host, _)| host.node().is_none()) {
            netlink.add_veth(host.name(), namespace.file().as_fd(), LINK)?;
            netlink.join_bridge(host.name(), BRIDGE)?;
            netlink.up(host.name())?;
        }
        Ok(())
    })
}

/// Runs in a node or the client: sets up the link to the bridge.
fn set_up_link(host: Host) -> Result<()> {
    let netlink = Netlink::open()?;
    netlink.up(LINK)?;
    for address in host.addresses() {
        netlink.add_address(LINK, address)?;
    }
    host.routes().into_iter().try_for_each(|route| netlink.add_route(route))
}

/// Runs in the node: creates the pod's link and sets up the node's end.
fn connect_pod(pod: Host, node: Host, namespace: &Netns) -> Result<()> {
    let netlink = Netlink::open()?;
    let link = pod.node_link();
    netlink.add_veth(&link, namespace.file().as_fd(), LINK)?;
    netlink.up(&link)?;
    for gateway in node.gateways() {
        netlink.add_address(&link, gateway)?;
    }
    pod.addresses().into_iter().try_for_each(|address| netlink.add_link_route(address, &link))
}

/// Runs in the pod: sets up its end, with the default route through the node.
fn set_up_pod(pod: Host, node: Host) -> Result<()> {
    let netlink = Netlink::open()?;
    netlink.up(LINK)?;
    for address in pod.addresses() {
        netlink.add_address(LINK, address)?;
    }
    node.gateways().into_iter().try_for_each(|gateway| netlink.add_link_route(gateway, LINK))?;
    pod.routes().into_iter().try_for_each(|route| netlink.add_route(route))
}
