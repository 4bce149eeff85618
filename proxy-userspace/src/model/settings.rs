//! Facts from outside that the model resolves with: this node's configuration, and its kernel's links and addresses.

use std::{net::IpAddr, sync::Arc};

use glob::Pattern;
use ipnet::IpNet;

/// `nodePortAddresses`: on which of the node's addresses node ports are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Unset: every address of the node, loopback included.
    #[default]
    All,
    /// `primary`: the node's own address of each family, as in its Node object. `cidrs` are served besides. A family with
    /// neither serves all its addresses, as upstream.
    Primary {
        /// Ranges named next to `primary`.
        cidrs: Vec<IpNet>,
    },
    /// Addresses of the node within these ranges. A family without a range serves all its addresses, as upstream.
    Cidrs(Vec<IpNet>),
}

/// `detectLocalMode` as configured; resolved into [`super::LocalTrafficDetector`] once the Node is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectLocalMode {
    /// Sources in `clusterCIDR`.
    ClusterCidr,
    /// Sources in the Node's pod CIDRs.
    NodeCidr,
    /// `detectLocal.bridgeInterface`.
    BridgeInterface(Arc<str>),
    /// `detectLocal.interfaceNamePrefix`.
    InterfaceNamePrefix(Arc<str>),
}

/// The configuration that resolution depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSettings {
    /// This node's name.
    pub node_name: Arc<str>,
    /// `bindAddress`, unless it is the unspecified one: the node's own address of its family, whatever the Node object says.
    pub bind_address: Option<IpAddr>,
    /// `clusterCIDR`, split; may be empty.
    pub cluster_cidrs: Vec<IpNet>,
    /// `detectLocalMode`.
    pub detect_local: DetectLocalMode,
    /// `nodePortAddresses`.
    pub node_port_addresses: NodePortAddresses,
    /// `masqueradeAll`: all traffic to cluster IPs is masqueraded.
    pub masquerade_all: bool,
    /// Which links are served.
    pub interfaces: InterfaceGlobs,
}

/// Which links are served, by their names. Loopback never is: what a process of the node dials is translated at its socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceGlobs {
    /// `interfaces`; empty for all.
    pub only: Vec<Pattern>,
    /// `excludeInterfaces`; wins over `only`.
    pub except: Vec<Pattern>,
}

impl InterfaceGlobs {
    /// Whether a link of this name is served.
    pub fn allow(&self, name: &str) -> bool {
        let named_in = |globs: &[Pattern]| globs.iter().any(|glob| glob.matches(name));
        (self.only.is_empty() || named_in(&self.only)) && !named_in(&self.except)
    }
}

/// What a link's packets begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkHeader {
    /// An Ethernet header.
    Ethernet,
    /// The IP header: tunnels.
    Ip,
    /// Something that shunt does not know, as on InfiniBand: the number that Linux gives the kind of link (`ARPHRD_*`).
    Other(u16),
}

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(pub [u8; 6]);

/// A link of the node's network namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// Its index: unlike its name, it stays while the link lives.
    pub index: u32,
    /// Its name.
    pub name: Arc<str>,
    /// The index of the bridge, bond or VRF that it is a port of.
    pub master: Option<u32>,
    /// What its packets begin with.
    pub header: LinkHeader,
    /// It is loopback.
    pub is_loopback: bool,
    /// It is a bridge, and this is its own address, which need not be that of any of its ports.
    pub bridge_address: Option<MacAddress>,
}

/// One address on a link of the node's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkAddress {
    /// The link's name.
    pub link: Arc<str>,
    /// The address.
    pub address: IpAddr,
    /// Bits of the prefix it was configured with.
    pub prefix_len: u8,
}

/// What the kernel says of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Every address on every link that is not an IPv6 link-local one; sorted.
    pub addresses: Vec<LinkAddress>,
    /// Every link; sorted.
    pub links: Vec<Link>,
}
