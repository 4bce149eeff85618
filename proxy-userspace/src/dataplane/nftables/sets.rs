//! The sets and maps that all Services share, and the destinations in their keys.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::LazyLock,
};

use super::lists::{EndpointList, ListSize, SizedList};
use crate::{
    kernel::nftables::{ElementKey, Field, FieldType, Name, Selector, Set, SetKind},
    model::{IpFamily, Protocol},
};

/// A set or map that all Services share.
///
/// The verdict maps lead to the chains of one service port. They have kube-proxy's names and keys.
/// All other sets and maps have no verdict that leads to a chain: whenever such a verdict is added,
/// the kernel checks every element for loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SharedSet {
    ClusterIps,
    NodePortIps,
    HairpinConnections,
    NoEndpointServices,
    NoEndpointNodePorts,
    FirewallIps,
    ServiceIps,
    ServiceNodePorts,
    ExternalServices,
    PolicyLocalServices,
    ExternalNodePorts,
    PolicyLocalNodePorts,
    ServiceEndpoints,
    ServiceLocalEndpoints,
    NodePortEndpoints,
    NodePortLocalEndpoints,
    /// The destinations whose list has this size. It is added when the first destination needs it.
    Sized(SizedList),
}

const ADDRESS: &[FieldType] = &[FieldType::Address];
const PORT: &[FieldType] = &[FieldType::Protocol, FieldType::Port];
const ADDRESS_PORT: &[FieldType] = &[FieldType::Address, FieldType::Protocol, FieldType::Port];
const CONNECTION: &[FieldType] =
    &[FieldType::Address, FieldType::Address, FieldType::Protocol, FieldType::Port];
const PORT_SLOT: &[FieldType] = &[FieldType::Protocol, FieldType::Port, FieldType::Number];
const ADDRESS_PORT_SLOT: &[FieldType] =
    &[FieldType::Address, FieldType::Protocol, FieldType::Port, FieldType::Number];
const ENDPOINT: &[FieldType] = &[FieldType::Address, FieldType::Port];

static DEFINITIONS: LazyLock<BTreeMap<SharedSet, Set>> =
    LazyLock::new(|| SharedSet::all().map(|set| (set, set.define())).collect());
static BY_NAME: LazyLock<HashMap<Name, SharedSet>> =
    LazyLock::new(|| SharedSet::all().map(|set| (set.name(), set)).collect());

impl SharedSet {
    /// The sets that always exist, with names and comments.
    const PERMANENT: [(Self, &str, &str); 16] = [
        (Self::ClusterIps, "cluster-ips", "Active ClusterIPs"),
        (Self::NodePortIps, "nodeport-ips", "IPs that accept NodePort traffic"),
        (Self::HairpinConnections, "hairpin-connections", "service hairpin connections"),
        (
            Self::NoEndpointServices,
            "no-endpoint-services",
            "vmap to drop or reject packets to services with no endpoints",
        ),
        (
            Self::NoEndpointNodePorts,
            "no-endpoint-nodeports",
            "vmap to drop or reject packets to service nodeports with no endpoints",
        ),
        (Self::FirewallIps, "firewall-ips", "destinations that are subject to LoadBalancerSourceRanges"),
        (Self::ServiceIps, "service-ips", "ClusterIP, ExternalIP and LoadBalancer IP traffic"),
        (Self::ServiceNodePorts, "service-nodeports", "NodePort traffic"),
        (
            Self::ExternalServices,
            "service-ips-external",
            "ExternalIPs and LoadBalancer IPs with policy Cluster",
        ),
        (
            Self::PolicyLocalServices,
            "service-ips-policy-local",
            "ExternalIPs and LoadBalancer IPs with policy Local",
        ),
        (Self::ExternalNodePorts, "service-nodeports-external", "NodePorts with policy Cluster"),
        (Self::PolicyLocalNodePorts, "service-nodeports-policy-local", "NodePorts with policy Local"),
        (Self::ServiceEndpoints, "service-endpoints", "endpoints of each destination, by number"),
        (
            Self::ServiceLocalEndpoints,
            "service-local-endpoints",
            "local endpoints of each destination, by number",
        ),
        (Self::NodePortEndpoints, "nodeport-endpoints", "endpoints of each NodePort, by number"),
        (
            Self::NodePortLocalEndpoints,
            "nodeport-local-endpoints",
            "local endpoints of each NodePort, by number",
        ),
    ];

    /// Returns the sets that always exist.
    pub(super) fn permanent() -> impl Iterator<Item = Self> {
        Self::PERMANENT.into_iter().map(|(set, ..)| set)
    }

    /// Returns all sets that can exist.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let sized = |list| ListSize::ALL.into_iter().map(move |size| Self::Sized(SizedList { list, size }));
        Self::permanent().chain(EndpointList::ALL.into_iter().flat_map(sized))
    }

    /// Returns true if kube-proxy has a set of this name too.
    pub(super) const fn is_kube_proxys(self) -> bool {
        matches!(
            self,
            Self::ClusterIps
                | Self::NodePortIps
                | Self::HairpinConnections
                | Self::NoEndpointServices
                | Self::NoEndpointNodePorts
                | Self::FirewallIps
                | Self::ServiceIps
                | Self::ServiceNodePorts
        )
    }

    pub(super) fn definition(self) -> &'static Set {
        &DEFINITIONS[&self]
    }

    pub(super) fn name(self) -> Name {
        self.definition().name.clone()
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        BY_NAME.get(name).copied()
    }

    /// Returns the part of a key that is the destination. Returns `None` if the set's elements do
    /// not belong to one destination.
    pub(super) fn destination(self, family: IpFamily, key: &ElementKey) -> Option<&[u8]> {
        let address = if family == IpFamily::V4 { 4 } else { 16 };
        let length = match self {
            Self::ClusterIps | Self::NodePortIps | Self::HairpinConnections => return None,
            _ if self.is_for_node_ports() => 8,
            _ => address + 8,
        };
        key.bytes().get(..length)
    }

    /// Returns the first set, in the order of sets, that can have the same destinations as this
    /// one.
    pub(super) const fn first_with_destination(self) -> Self {
        if self.is_for_node_ports() { Self::NoEndpointNodePorts } else { Self::NoEndpointServices }
    }

    const fn is_for_node_ports(self) -> bool {
        match self {
            Self::NoEndpointNodePorts
            | Self::ServiceNodePorts
            | Self::ExternalNodePorts
            | Self::PolicyLocalNodePorts
            | Self::NodePortEndpoints
            | Self::NodePortLocalEndpoints => true,
            Self::Sized(sized) => sized.list.is_for_node_ports(),
            _ => false,
        }
    }

    fn name_and_comment(self) -> (Name, &'static str) {
        if let Self::Sized(list) = self {
            let (name, comment) = list.set_name_and_comment();
            return (name.into(), comment.leak());
        }
        let entry = Self::PERMANENT.into_iter().find(|(set, ..)| *set == self);
        let (_, name, comment) = entry.expect("all other sets are permanent");
        (name.into(), comment)
    }

    fn define(self) -> Set {
        let (name, comment) = self.name_and_comment();
        let is_for_node_ports = self.is_for_node_ports();
        let destination = if is_for_node_ports { PORT } else { ADDRESS_PORT };
        let slot = if is_for_node_ports { PORT_SLOT } else { ADDRESS_PORT_SLOT };
        let (key, kind) = match self {
            Self::ClusterIps | Self::NodePortIps => (ADDRESS, SetKind::Plain),
            Self::HairpinConnections => (CONNECTION, SetKind::Plain),
            Self::NoEndpointServices
            | Self::NoEndpointNodePorts
            | Self::FirewallIps
            | Self::ServiceIps
            | Self::ServiceNodePorts => (destination, SetKind::VerdictMap),
            Self::ServiceEndpoints
            | Self::ServiceLocalEndpoints
            | Self::NodePortEndpoints
            | Self::NodePortLocalEndpoints => (slot, SetKind::DataMap(ENDPOINT)),
            Self::ExternalServices
            | Self::PolicyLocalServices
            | Self::ExternalNodePorts
            | Self::PolicyLocalNodePorts
            | Self::Sized(_) => (destination, SetKind::Plain),
        };
        Set { name, key, kind, comment }
    }
}

/// The destination of a packet, which the first fields of a key contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Destination {
    /// `None` for a node port.
    pub(super) address: Option<IpAddr>,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

impl Destination {
    pub(super) fn key(&self) -> ElementKey {
        ElementKey::new(&self.fields().collect::<Vec<_>>())
    }

    /// Returns the key of one of the destination's endpoints.
    pub(super) fn slot(&self, number: u32) -> ElementKey {
        ElementKey::new(&self.fields().chain([Field::Number(number)]).collect::<Vec<_>>())
    }

    /// Returns the destination of an element that leads to endpoints.
    pub(super) fn read(set: SharedSet, family: IpFamily, key: &ElementKey) -> Option<Self> {
        let leads_to_endpoints =
            matches!(set, SharedSet::ServiceIps | SharedSet::ServiceNodePorts | SharedSet::Sized(_));
        let bytes = set.destination(family, key).filter(|_| leads_to_endpoints)?;
        let (address, rest) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
        let address = match address.len() {
            0 => None,
            4 => address.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
            _ => address.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
        };
        Some(Self {
            address,
            protocol: Protocol::from_number(*rest.first()?)?,
            port: u16::from_be_bytes([*rest.get(4)?, *rest.get(5)?]),
        })
    }

    fn fields(&self) -> impl Iterator<Item = Field> {
        let address = self.address.map(Field::Address);
        address.into_iter().chain([Field::Protocol(self.protocol), Field::Port(self.port)])
    }
}

/// The key of a destination.
pub(super) const DESTINATION: [Selector; 3] =
    [Selector::Destination, Selector::Protocol, Selector::DestinationPort];
/// The key of a node port.
pub(super) const DESTINATION_PORT: [Selector; 2] = [Selector::Protocol, Selector::DestinationPort];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_has_a_name_of_its_own() {
        for set in SharedSet::all() {
            assert_eq!(SharedSet::from_name(&set.name()), Some(set));
        }
        assert_eq!(BY_NAME.len(), DEFINITIONS.len());
    }
}
