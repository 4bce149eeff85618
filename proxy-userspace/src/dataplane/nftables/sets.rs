//! The sets and maps of the table, and what of their keys is a destination.

use std::{collections::HashMap, net::IpAddr, sync::LazyLock};

use super::lists::{List, Size, Sized};
use crate::kernel::nftables::{ElementKey, Family, Field, FieldType, Name, Selector, Set, SetKind};

/// A set or map that Services share.
///
/// Verdict maps lead to chains that one Service has to itself, and have kube-proxy's names and shapes. All others hold no verdict
/// that leads anywhere: the kernel looks for loops, element by element, only where such a verdict is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Base {
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
    /// Destinations with so many endpoints; it is there once a destination needs it.
    Sized(Sized),
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

static SETS: LazyLock<Vec<Set>> = LazyLock::new(|| Base::every().map(Base::describe).collect());
static BY_NAME: LazyLock<HashMap<Name, Base>> =
    LazyLock::new(|| Base::every().map(|base| (base.name(), base)).collect());

impl Base {
    /// Those that are always there.
    pub(super) const ALL: [Self; 16] = [
        Self::ClusterIps,
        Self::NodePortIps,
        Self::HairpinConnections,
        Self::NoEndpointServices,
        Self::NoEndpointNodePorts,
        Self::FirewallIps,
        Self::ServiceIps,
        Self::ServiceNodePorts,
        Self::ExternalServices,
        Self::PolicyLocalServices,
        Self::ExternalNodePorts,
        Self::PolicyLocalNodePorts,
        Self::ServiceEndpoints,
        Self::ServiceLocalEndpoints,
        Self::NodePortEndpoints,
        Self::NodePortLocalEndpoints,
    ];

    /// All that may be there.
    pub(super) fn every() -> impl Iterator<Item = Self> {
        let of_list = |list| Size::ALL.into_iter().map(move |size| Self::Sized(Sized { list, size }));
        Self::ALL.into_iter().chain(List::ALL.into_iter().flat_map(of_list))
    }

    /// The set, as the kernel is told it.
    pub(super) fn set(self) -> &'static Set {
        &SETS[self.index()]
    }

    pub(super) fn name(self) -> Name {
        self.set().name.clone()
    }

    /// The one that has this name.
    pub(super) fn of(name: &str) -> Option<Self> {
        BY_NAME.get(name).copied()
    }

    /// The part of a key that is the destination it is for; none where elements are not of one destination.
    pub(super) fn destination(self, family: Family, key: &ElementKey) -> Option<&[u8]> {
        let address = if family == Family::Ip { 4 } else { 16 };
        let length = match self {
            Self::ClusterIps | Self::NodePortIps | Self::HairpinConnections => return None,
            _ if self.is_of_node_ports() => 8,
            _ => address + 8,
        };
        key.bytes().get(..length)
    }

    /// The first set that may have something of the destinations that this one is of.
    pub(super) const fn first_of_destination(self) -> Self {
        if self.is_of_node_ports() { Self::NoEndpointNodePorts } else { Self::NoEndpointServices }
    }

    const fn is_of_node_ports(self) -> bool {
        match self {
            Self::NoEndpointNodePorts
            | Self::ServiceNodePorts
            | Self::ExternalNodePorts
            | Self::PolicyLocalNodePorts
            | Self::NodePortEndpoints
            | Self::NodePortLocalEndpoints => true,
            Self::Sized(sized) => sized.list.is_of_node_ports(),
            _ => false,
        }
    }

    /// Its place in [`Self::every`].
    fn index(self) -> usize {
        match self {
            Self::ClusterIps => 0,
            Self::NodePortIps => 1,
            Self::HairpinConnections => 2,
            Self::NoEndpointServices => 3,
            Self::NoEndpointNodePorts => 4,
            Self::FirewallIps => 5,
            Self::ServiceIps => 6,
            Self::ServiceNodePorts => 7,
            Self::ExternalServices => 8,
            Self::PolicyLocalServices => 9,
            Self::ExternalNodePorts => 10,
            Self::PolicyLocalNodePorts => 11,
            Self::ServiceEndpoints => 12,
            Self::ServiceLocalEndpoints => 13,
            Self::NodePortEndpoints => 14,
            Self::NodePortLocalEndpoints => 15,
            Self::Sized(Sized { list, size }) => 16 + list as usize * Size::ALL.len() + size.index(),
        }
    }

    fn describe(self) -> Set {
        let (name, comment) = self.words();
        let destination = if self.is_of_node_ports() { PORT } else { ADDRESS_PORT };
        let slot = if self.is_of_node_ports() { PORT_SLOT } else { ADDRESS_PORT_SLOT };
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

    /// Its name and its comment.
    fn words(self) -> (Name, &'static str) {
        let (name, comment) = match self {
            Self::ClusterIps => ("cluster-ips", "Active ClusterIPs"),
            Self::NodePortIps => ("nodeport-ips", "IPs that accept NodePort traffic"),
            Self::HairpinConnections => ("hairpin-connections", "service hairpin connections"),
            Self::NoEndpointServices => {
                ("no-endpoint-services", "vmap to drop or reject packets to services with no endpoints")
            }
            Self::NoEndpointNodePorts => (
                "no-endpoint-nodeports",
                "vmap to drop or reject packets to service nodeports with no endpoints",
            ),
            Self::FirewallIps => {
                ("firewall-ips", "destinations that are subject to LoadBalancerSourceRanges")
            }
            Self::ServiceIps => ("service-ips", "ClusterIP, ExternalIP and LoadBalancer IP traffic"),
            Self::ServiceNodePorts => ("service-nodeports", "NodePort traffic"),
            Self::ExternalServices => {
                ("service-ips-external", "ExternalIPs and LoadBalancer IPs with policy Cluster")
            }
            Self::PolicyLocalServices => {
                ("service-ips-policy-local", "ExternalIPs and LoadBalancer IPs with policy Local")
            }
            Self::ExternalNodePorts => ("service-nodeports-external", "NodePorts with policy Cluster"),
            Self::PolicyLocalNodePorts => ("service-nodeports-policy-local", "NodePorts with policy Local"),
            Self::ServiceEndpoints => ("service-endpoints", "endpoints of each destination, by number"),
            Self::ServiceLocalEndpoints => {
                ("service-local-endpoints", "the same of this node, for traffic policy Local")
            }
            Self::NodePortEndpoints => ("nodeport-endpoints", "endpoints of each NodePort, by number"),
            Self::NodePortLocalEndpoints => {
                ("nodeport-local-endpoints", "the same of this node, for traffic policy Local")
            }
            Self::Sized(Sized { list, size }) => {
                let (most, what) = (size.numbers(), list.destinations());
                let comment = match most {
                    1 => "destinations with one endpoint".to_owned(),
                    2 => "destinations with two endpoints".to_owned(),
                    most => format!("destinations with {} to {most} endpoints", most / 2 + 1),
                };
                return (format!("{what}-{most}").into(), comment.leak());
            }
        };
        (name.into(), comment)
    }
}

/// Where a packet goes to: what the first parts of keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Destination {
    /// None for a node port.
    pub(super) address: Option<IpAddr>,
    pub(super) protocol: u8,
    pub(super) port: u16,
}

impl Destination {
    pub(super) fn key(&self) -> ElementKey {
        ElementKey::new(&self.fields().collect::<Vec<_>>())
    }

    pub(super) fn slot(&self, number: u32) -> ElementKey {
        ElementKey::new(&self.fields().chain([Field::Number(number)]).collect::<Vec<_>>())
    }

    /// That of an element that says where traffic is led.
    pub(super) fn read(base: Base, family: Family, key: &ElementKey) -> Option<Self> {
        let is_lead = matches!(base, Base::ServiceIps | Base::ServiceNodePorts | Base::Sized(_));
        let bytes = base.destination(family, key).filter(|_| is_lead)?;
        let (address, rest) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
        let address = match address.len() {
            0 => None,
            4 => address.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
            _ => address.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
        };
        Some(Self {
            address,
            protocol: *rest.first()?,
            port: u16::from_be_bytes([*rest.get(4)?, *rest.get(5)?]),
        })
    }

    fn fields(&self) -> impl Iterator<Item = Field> {
        let address = self.address.map(Field::Address);
        address.into_iter().chain([Field::Protocol(self.protocol), Field::Port(self.port)])
    }
}

/// What the key of a destination is made of.
pub(super) const DESTINATION: [Selector; 3] =
    [Selector::Destination, Selector::Protocol, Selector::DestinationPort];
/// The same of a node port.
pub(super) const DESTINATION_PORT: [Selector; 2] = [Selector::Protocol, Selector::DestinationPort];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_is_described_once_and_found_by_its_name() {
        for (index, base) in Base::every().enumerate() {
            assert_eq!(base.index(), index);
            assert_eq!(Base::of(&base.name()), Some(base));
        }
        assert_eq!(BY_NAME.len(), SETS.len());
    }
}
