//! The hosts of the test world as data: their addresses, the routes between them, and the cgroups
//! of their processes.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// A host of the world. Each host is a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Host {
    /// The node under test, with the proxy.
    Node1,
    /// A pod on node1.
    A1,
    /// A pod on node1.
    A2,
    /// A pod on node1.
    A3,
    /// Another node. Few cases have a proxy there.
    Node2,
    /// A pod on node2.
    B1,
    /// A pod on node2.
    B2,
    /// A host outside the cluster. node1's default route points to it.
    Client,
    /// A router beside the nodes, without pods. Only the benchmark has it.
    Router,
}

/// The cgroup v2 subtree of a host's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupSubtree {
    /// node1 and its pods: the subtree to which the eBPF socket programs attach.
    Node1,
    /// node2 and its pods: the subtree for a proxy on node2.
    Node2,
    /// All other hosts.
    Others,
}

/// A route that a host needs in addition to those of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination.
    pub to: IpNet,
    /// The gateway. It must be reachable through a link that is already set up.
    pub via: IpAddr,
}

impl Host {
    /// All hosts that cases use, nodes before their pods.
    pub const ALL: [Self; 8] =
        [Self::Node1, Self::A1, Self::A2, Self::A3, Self::Node2, Self::B1, Self::B2, Self::Client];

    /// Returns the name in cases and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Node1 => "node1",
            Self::A1 => "a1",
            Self::A2 => "a2",
            Self::A3 => "a3",
            Self::Node2 => "node2",
            Self::B1 => "b1",
            Self::B2 => "b2",
            Self::Client => "client",
            Self::Router => "router",
        }
    }

    /// Returns the host with this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::every().find(|host| host.name() == name)
    }

    /// Returns all hosts, also the router.
    pub fn every() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain([Self::Router])
    }

    /// Returns the node of a pod. None for hosts that are not pods.
    pub fn node(self) -> Option<Self> {
        match self {
            Self::A1 | Self::A2 | Self::A3 => Some(Self::Node1),
            Self::B1 | Self::B2 => Some(Self::Node2),
            Self::Node1 | Self::Node2 | Self::Client | Self::Router => None,
        }
    }

    /// Returns the name of the node's end of a pod's veth pair.
    pub fn node_link(self) -> String {
        format!("veth{}", self.name())
    }

    /// Returns the addresses on the host's `eth0`, IPv4 before IPv6.
    pub fn addresses(self) -> Vec<IpNet> {
        let texts: &[&str] = match self {
            Self::Node1 => &["192.168.57.11/24", "192.168.57.111/24", "fd57::11/64", "fd57::111/64"],
            Self::Node2 => &["192.168.57.12/24", "fd57::12/64"],
            Self::Client => &["192.168.57.50/24", "fd57::50/64"],
            Self::Router => &["192.168.57.13/24", "fd57::13/64"],
            Self::A1 => &["10.244.1.11/32", "fd44:1::11/128"],
            Self::A2 => &["10.244.1.12/32", "fd44:1::12/128"],
            Self::A3 => &["10.244.1.13/32", "fd44:1::13/128"],
            Self::B1 => &["10.244.2.11/32", "fd44:2::11/128"],
            Self::B2 => &["10.244.2.12/32", "fd44:2::12/128"],
        };
        texts.iter().map(|text| net(text)).collect()
    }

    /// Returns the addresses of a node on the veths of its pods, which are the pods' gateways.
    /// Empty for other hosts.
    pub fn gateways(self) -> Vec<IpNet> {
        match self {
            Self::Node1 => vec![net("10.244.1.1/32"), net("fd44:1::1/128")],
            Self::Node2 => vec![net("10.244.2.1/32"), net("fd44:2::1/128")],
            _ => Vec::new(),
        }
    }

    /// Returns true if the host has this address, gateways included.
    pub fn owns(self, address: IpAddr) -> bool {
        self.addresses().iter().chain(&self.gateways()).any(|own| own.addr() == address)
    }

    /// Returns the routes through gateways. Pods have only the default route through their node.
    pub fn routes(self) -> Vec<Route> {
        match self {
            Self::Node1 => {
                let mut routes = routes(&["10.244.2.0/24", "fd44:2::/64"], Self::Node2);
                routes.extend(default_routes(&Self::Client.addresses()));
                routes
            }
            Self::Node2 => {
                let mut routes = routes(&["10.244.1.0/24", "fd44:1::/64"], Self::Node1);
                routes.extend(service_routes());
                routes
            }
            Self::Client => service_routes(),
            Self::Router => routes(&["10.244.2.0/24", "fd44:2::/64"], Self::Node2),
            pod => pod.node().map(|node| default_routes(&node.gateways())).unwrap_or_default(),
        }
    }

    /// Returns the cgroup subtree of this host's processes.
    pub fn cgroup(self) -> CgroupSubtree {
        match self {
            Self::Node1 | Self::A1 | Self::A2 | Self::A3 => CgroupSubtree::Node1,
            Self::Node2 | Self::B1 | Self::B2 => CgroupSubtree::Node2,
            Self::Client | Self::Router => CgroupSubtree::Others,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl CgroupSubtree {
    /// All subtrees.
    pub const ALL: [Self; 3] = [Self::Node1, Self::Node2, Self::Others];

    /// Returns the directory's name below the run's cgroup.
    pub fn name(self) -> &'static str {
        match self {
            Self::Node1 => "node1",
            Self::Node2 => "node2",
            Self::Others => "others",
        }
    }
}

/// Returns routes for the ranges of Service addresses, which an outside router sends to node1.
fn service_routes() -> Vec<Route> {
    routes(&["10.96.0.0/16", "198.51.100.0/24", "fd96::/112", "2001:db8:51::/64"], Host::Node1)
}

/// Returns routes to the ranges through the first address of `via` in the same family.
fn routes(ranges: &[&str], via: Host) -> Vec<Route> {
    let gateways = via.addresses();
    let gateway = |to: &IpNet| gateways.iter().find(|own| same_family(own, to)).map(IpNet::addr);
    ranges
        .iter()
        .filter_map(|range| {
            let to = net(range);
            gateway(&to).map(|via| Route { to, via })
        })
        .collect()
}

fn default_routes(gateways: &[IpNet]) -> Vec<Route> {
    gateways
        .iter()
        .map(|gateway| {
            let to = if gateway.addr().is_ipv4() { "0.0.0.0/0" } else { "::/0" };
            Route { to: net(to), via: gateway.addr() }
        })
        .collect()
}

fn same_family(one: &IpNet, other: &IpNet) -> bool {
    one.addr().is_ipv4() == other.addr().is_ipv4()
}

/// Parses a constant of this file.
#[expect(clippy::expect_used, reason = "only this file's constants come here; a test reads them all")]
fn net(text: &str) -> IpNet {
    text.parse().expect("a constant of the topology is an address with its prefix length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_unique_addresses_of_both_families() {
        let mut seen = std::collections::BTreeSet::new();
        for host in Host::every() {
            let own = host.addresses();
            assert!(
                own.iter().any(|a| a.addr().is_ipv4()) && own.iter().any(|a| a.addr().is_ipv6()),
                "{host}"
            );
            for address in own.iter().chain(&host.gateways()) {
                assert!(seen.insert(address.addr()), "{address} of {host} is taken");
            }
        }
    }

    #[test]
    fn every_gateway_is_an_address_of_another_host() {
        for host in Host::every() {
            for route in host.routes() {
                let owner = Host::every().find(|other| other.owns(route.via));
                assert!(owner.is_some_and(|owner| owner != host), "{host}: {route:?} leads to {owner:?}");
            }
        }
    }

    #[test]
    fn pods_run_in_the_cgroup_of_their_node() {
        for pod in Host::ALL {
            if let Some(node) = pod.node() {
                assert_eq!(pod.cgroup(), node.cgroup(), "{pod}");
            }
        }
        assert_ne!(Host::Node1.cgroup(), Host::Node2.cgroup());
    }

    #[test]
    fn hosts_are_found_by_their_displayed_names() {
        for host in Host::every() {
            assert_eq!(Host::by_name(&host.to_string()), Some(host));
        }
        assert_eq!(Host::by_name("c1"), None);
    }
}
