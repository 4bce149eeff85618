//! One change to the kernel, as data.

use std::collections::BTreeSet;

use proxy_common::{
    Addr,
    layout::{
        DsrKey, Endpoint, EndpointKey, EndpointValue, HardwareAddress, LocalDetection, Masquerading,
        MemberKey, NewFlows, ServiceKey, ServiceValue, SocketScope, VlanKey, XdpLinkValue,
    },
    prefilter::PrefilterItem,
};

use super::{
    super::{links::LinkHook, rules::RuleDuties},
    ranges::{LinkSubnet, Prefix, Range},
};
use crate::{
    kernel::clock,
    model::{LinkPath, PortRange, ServedLink, XdpLink},
    net::NetnsCookie,
};

/// An entry of a map that userspace writes from the Snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapEntry {
    /// A frontend leads to these endpoints.
    Service(ServiceKey, ServiceValue),
    /// An endpoint has this slot.
    Endpoint(EndpointKey, EndpointValue),
    /// An endpoint is in a list of a service port.
    Member(MemberKey),
    /// A service port accepts clients in this range.
    SourceRange(Range),
    /// Masqueraded packets to these endpoints have this source address.
    MasqueradeAddress(LinkSubnet, Addr),
    /// Node ports are served on this address.
    NodeAddress(Addr),
    /// Clients with a source in this range are local.
    LocalSource(Prefix),
    /// Packets that arrive on the link with this index are from local clients.
    LocalLink(u32),
    /// Flows that come in on the link with this index may take the direct path.
    DirectLink(u32),
    /// Packets that leave on the link with this index may be handed to its peer.
    PeerLink(u32),
    /// The XDP program forwards packets on the link with this index.
    XdpLink(u32, XdpLinkValue),
    /// The node at this address takes packets of the tunnel for an endpoint.
    DsrEndpoint(DsrKey, Addr),
    /// A node with the tunnel has this address, which is a
    /// [`DsrAddress`](proxy_common::layout::DsrAddress) to it.
    DsrNode(Addr, u8),
    /// The link with this index is a port of a bridge. Packets that arrive there are for the node
    /// itself if they are for the bridge.
    BridgePort(u32, HardwareAddress),
    /// The link of this VLAN has programs, and translates its packets.
    Vlan(VlanKey),
    /// The socket programs leave this network namespace alone, with
    /// [`SocketScope::NotExempt`](proxy_common::layout::SocketScope).
    ExemptNetns(NetnsCookie),
    /// The pod with this address is in a network namespace that the socket programs leave alone, or
    /// left alone.
    ExemptSource(Addr),
}

impl MapEntry {
    /// Returns the name of the map.
    pub const fn map(&self) -> &'static str {
        match self {
            Self::Service(..) => "services",
            Self::Endpoint(..) => "endpoints",
            Self::Member(_) => "members",
            Self::SourceRange(_) => "source_ranges",
            Self::MasqueradeAddress(..) => "masquerade_addresses",
            Self::NodeAddress(_) => "node_addresses",
            Self::LocalSource(_) => "local_sources",
            Self::LocalLink(_) => "local_links",
            Self::DirectLink(_) => "direct_links",
            Self::PeerLink(_) => "peer_links",
            Self::XdpLink(..) => "xdp_links",
            Self::DsrEndpoint(..) => "dsr_endpoints",
            Self::DsrNode(..) => "dsr_nodes",
            Self::BridgePort(..) => "bridge_ports",
            Self::Vlan(_) => "vlans",
            Self::ExemptNetns(_) => "exempt_netns",
            Self::ExemptSource(_) => "exempt_sources",
        }
    }

    /// Returns the identifier of the service port that the entry belongs to, if any.
    pub const fn service(&self) -> Option<u32> {
        match self {
            Self::Service(_, value) => Some(value.service),
            Self::Endpoint(key, _) => Some(key.service),
            Self::Member(key) => Some(key.service),
            Self::SourceRange(range) => Some(range.service),
            Self::DsrEndpoint(key, _) => Some(key.service),
            Self::MasqueradeAddress(..)
            | Self::NodeAddress(_)
            | Self::LocalSource(_)
            | Self::LocalLink(_)
            | Self::DirectLink(_)
            | Self::PeerLink(_)
            | Self::XdpLink(..)
            | Self::DsrNode(..)
            | Self::BridgePort(..)
            | Self::Vlan(_)
            | Self::ExemptNetns(_)
            | Self::ExemptSource(_) => None,
        }
    }

    /// Returns the item of the prefilter without which programs do not look for the entry.
    pub(crate) const fn prefilter_item(&self) -> Option<PrefilterItem> {
        match self {
            Self::Service(key, _) => Some(PrefilterItem::of_service(&key.addr, key.port)),
            Self::Endpoint(_, EndpointValue { endpoint, .. }) | Self::Member(MemberKey { endpoint, .. }) => {
                Some(PrefilterItem::of_endpoint(&endpoint.addr, endpoint.port))
            }
            _ => None,
        }
    }
}

/// What masquerades, and with which source ports, as in the map `node`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasqueradeFields {
    /// The [`Masquerading`].
    pub masquerading: u16,
    /// The first port.
    pub first_port: u16,
    /// The last port.
    pub last_port: u16,
}

impl MasqueradeFields {
    /// Returns the fields after these for a node on which the programs masquerade with these ports,
    /// or netfilter does. Flows that the programs know go on.
    pub(crate) fn after(self, ports: Option<PortRange>) -> Self {
        match ports {
            Some(PortRange { first, last }) => {
                let masquerading = Masquerading::Programs as u16;
                Self { masquerading, first_port: first, last_port: last }
            }
            None if self.masquerading == Masquerading::Programs as u16 => {
                Self { masquerading: Masquerading::KnownFlows as u16, ..self }
            }
            None => self,
        }
    }
}

/// The epoch of the direct path ([`NodeValue::direct_epoch`](proxy_common::layout::NodeValue)). It
/// only increases, so that an entry of an earlier epoch never counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectEpoch(pub u64);

impl DirectEpoch {
    /// Returns true if packets take the direct path.
    pub(crate) const fn is_on(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns the next epoch in which packets take the direct path.
    pub(crate) const fn next_on(self) -> Self {
        Self(self.off().0 + 1)
    }

    /// Returns the next epoch in which they do not, or this one if they do not already.
    pub(crate) const fn off(self) -> Self {
        Self(self.0 + (self.0 & 1))
    }
}

/// Which flows take the direct path, as in the map `node`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectFields {
    /// The epoch.
    pub epoch: DirectEpoch,
    /// The [`DirectScope`](proxy_common::layout::DirectScope).
    pub scope: u16,
    /// [`NodeValue::direct_lease_ns`](proxy_common::layout::NodeValue).
    pub lease_ns: u64,
}

impl DirectFields {
    /// Returns the fields for a path.
    pub(crate) fn of(path: &LinkPath, epoch: DirectEpoch) -> Option<Self> {
        let LinkPath::Direct { scope, lease, .. } = path else { return None };
        Some(Self { epoch, scope: *scope as u16, lease_ns: clock::nanos(*lease) })
    }
}

/// The tunnel to other nodes, as in the map `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelFields {
    /// The interface index of its link, or 0 without one.
    pub link: u32,
    /// The bytes of the longest packet that leaves the node in one piece.
    pub mtu: u32,
    /// The source of its packets to nodes with an IPv4 address. `::` if there is none, as in a new
    /// map.
    pub v4: Addr,
    /// The same for nodes with an IPv6 address.
    pub v6: Addr,
    /// 1 if packets for clients go back through the tunnel.
    pub returns: u32,
}

impl Default for TunnelFields {
    /// Returns the fields without a tunnel, as in a new map.
    fn default() -> Self {
        Self { link: 0, mtu: 0, v4: Addr::UNSPECIFIED_V6, v6: Addr::UNSPECIFIED_V6, returns: 0 }
    }
}

/// The flows that [`Step::ForgetFlows`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleFlows {
    /// All flows: no program was on a link meanwhile.
    All,
    /// Those whose packets the programs only pass, from a time when they were on links.
    Passed,
    /// Those that the programs left to netfilter, and that conntrack does not have.
    Left,
}

/// One change to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Insert an entry, or replace its value.
    Put(MapEntry),
    /// Remove an entry. It has the value that is in the map.
    Remove(MapEntry),
    /// Recognize local clients in this way.
    SetLocalDetection(LocalDetection),
    /// Serve these sockets.
    SetSocketScope(SocketScope),
    /// Masquerade in this way.
    SetMasquerade(MasqueradeFields),
    /// Begin an epoch of the direct path.
    SetDirect(DirectFields),
    /// Send packets through this tunnel.
    SetTunnel(TunnelFields),
    /// Do this with new flows on links.
    SetNewFlows(NewFlows),
    /// Remove flows that are out of date because netfilter had new flows.
    ForgetFlows(StaleFlows),
    /// Remove the flows that the link programs masquerade with this address, which the node has no
    /// more.
    ForgetSource(Addr),
    /// Let conntrack keep the UDP flows that it translates, and the TCP connections that are not
    /// established yet. The link programs pass their packets. Other TCP connections need no step:
    /// the programs pass segments of connections that they do not know.
    LeaveFlowsToConntrack,
    /// Let conntrack keep the TCP connections to these frontends that it translates. Once a
    /// frontend has a Maglev table, the programs adopt connections that they do not know.
    LeaveConnectionsToConntrack {
        /// The frontends.
        frontends: BTreeSet<ServiceKey>,
    },
    /// Add entries to conntrack for the flows that the link programs translate.
    TrackFlows,
    /// Hand the flows that the link programs translate over to conntrack.
    HandFlowsToConntrack,
    /// Attach the socket programs to the cgroup.
    Attach,
    /// Apply the netfilter rules that the link programs need.
    InstallRules(RuleDuties),
    /// Let the programs refuse packets, unless the rules with these duties are to do it.
    LetProgramsRefuse(RuleDuties),
    /// Attach a program to a link.
    AttachLink(LinkHook, ServedLink),
    /// Detach our program from a link that is not to be served. A port of the bond with this index
    /// keeps it until the bond has one.
    DetachLink(LinkHook, Option<u32>),
    /// Detach our program from a link that netfilter serves from now on.
    LeaveLink(LinkHook),
    /// Attach the XDP program to the link with this index.
    AttachXdp(u32, XdpLink),
    /// Detach it.
    DetachXdp(u32),
    /// Destroy UDP sockets that are connected to endpoints which no longer serve.
    ReleaseSockets {
        /// The service port that they connected to.
        service: u32,
        /// The endpoints.
        endpoints: Vec<Endpoint>,
    },
}

impl Step {
    /// Returns the identifier of the service port that the step is for, if any.
    pub const fn service(&self) -> Option<u32> {
        match self {
            Self::Put(entry) | Self::Remove(entry) => entry.service(),
            Self::ReleaseSockets { service, .. } => Some(*service),
            _ => None,
        }
    }

    /// Returns true if the step may write netfilter rules.
    pub(crate) const fn may_change_rules(&self) -> bool {
        matches!(self, Self::InstallRules(_) | Self::LeaveFlowsToConntrack)
    }

    /// Returns the index of the link that the step is for, if any.
    pub const fn link(&self) -> Option<u32> {
        match self {
            Self::AttachLink(at, _) | Self::DetachLink(at, _) | Self::LeaveLink(at) => Some(at.index),
            Self::AttachXdp(index, _) | Self::DetachXdp(index) => Some(*index),
            _ => None,
        }
    }
}
