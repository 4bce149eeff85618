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
