//! The part of the configuration that the model uses.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use glob::Pattern;
use ipnet::IpNet;

use super::{Balance, LinkName, PortRange};

/// `nodePortAddresses`: the node's addresses on which node ports are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Unset: all addresses of the node, including loopback.
    #[default]
    All,
    /// `primary`: the address of each family in the Node object, and addresses in `cidrs`. As
    /// upstream, a family with neither serves all its addresses.
    Primary {
        /// The ranges that are configured with `primary`.
        cidrs: Vec<IpNet>,
    },
    /// The node's addresses in these ranges. As upstream, a family without a range serves all its
    /// addresses.
    Cidrs(Vec<IpNet>),
}

/// `detectLocalMode`. The model resolves it into [`super::LocalTrafficDetector`] with the Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocalMode {
    /// Sources in `clusterCIDR` are local.
    #[default]
    ClusterCidr,
    /// Sources in the Node's pod CIDRs are local.
    NodeCidr,
    /// `detectLocal.bridgeInterface`.
    BridgeInterface(LinkName),
    /// `detectLocal.interfaceNamePrefix`.
    InterfaceNamePrefix(LinkName),
}

/// Which links have an XDP program, if they lead out of the node and flows take the direct path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpPolicy {
    /// None.
    #[default]
    Off,
    /// The devices whose drivers say that they run XDP programs.
    Auto,
    /// All, in the kernel.
    Generic,
    /// All, in the driver.
    Native,
}

/// The configuration that the model uses.
#[expect(clippy::struct_excessive_bools, reason = "each mirrors one setting")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSettings {
    /// This node's name.
    pub node_name: Arc<str>,
    /// `bindAddress`, unless it is unspecified. It replaces the address of its family in the Node
    /// object.
    pub bind_address: Option<IpAddr>,
    /// The ranges of `clusterCIDR`; may be empty.
    pub cluster_cidrs: Vec<IpNet>,
    /// `detectLocalMode`.
    pub detect_local: DetectLocalMode,
    /// `nodePortAddresses`.
    pub node_port_addresses: NodePortAddresses,
    /// Node ports are served on loopback addresses if `nodePortAddresses` contains them. Netfilter
    /// modes have their own rules for loopback addresses, and do not use this.
    pub loopback_node_ports: bool,
    /// `masqueradeAll`: masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// The source ports of the flows that the link programs masquerade. `None` if netfilter
    /// masquerades.
    pub masquerade_ports: Option<PortRange>,
    /// The link programs begin to masquerade only on a node that has the direct path.
    pub masquerades_with_direct_path: bool,
    /// How clients from outside get an endpoint of a Service that does not say (`links.maglev`).
    pub balance: Balance,
    /// Which links have an XDP program.
    pub xdp: XdpPolicy,
    /// The UDP port of the tunnel for direct server return. `None` if this node neither sends nor
    /// takes packets through it.
    pub dsr_port: Option<NonZeroU16>,
    /// Packets for clients that came through that tunnel go back through it.
    pub dsr_returns: bool,
    /// The links that are served.
    pub interfaces: InterfaceGlobs,
    /// External IPs of Services are not served (CVE-2020-8554): the feature gate
    /// `AllowServiceExternalIPs` is off. [`super::Model::new`] reads it.
    pub ignores_external_ips: bool,
    /// A cluster IP that is an address of one of the node's links is not served, because a process
    /// of the node serves it, such as a node-local DNS cache. Netfilter modes leave this decision
    /// to the NOTRACK rules of such a process.
    pub leaves_cluster_ips_of_links: bool,
}

/// The names of the links that are served. Loopback is never served: programs at the sockets
/// translate the connections of the node's processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceGlobs {
    /// `interfaces`; empty for all links.
    pub only: Vec<Pattern>,
    /// `excludeInterfaces`; takes precedence over `only`.
    pub except: Vec<Pattern>,
}

impl InterfaceGlobs {
    /// Returns true if a link of this name is served.
    pub fn allow(&self, name: &str) -> bool {
        let matches_any = |globs: &[Pattern]| globs.iter().any(|glob| glob.matches(name));
        (self.only.is_empty() || matches_any(&self.only)) && !matches_any(&self.except)
    }
}
