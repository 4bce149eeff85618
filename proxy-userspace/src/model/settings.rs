//! Facts from outside that the model resolves with: this node's configuration and its kernel's addresses.

use std::{net::IpAddr, sync::Arc};

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
    /// `clusterCIDR`, split; may be empty.
    pub cluster_cidrs: Vec<IpNet>,
    /// `detectLocalMode`.
    pub detect_local: DetectLocalMode,
    /// `nodePortAddresses`.
    pub node_port_addresses: NodePortAddresses,
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
}
