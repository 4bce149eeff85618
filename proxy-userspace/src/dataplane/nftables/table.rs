//! What the table has whatever the Services: sets and maps, base chains with kube-proxy's names and priorities, and the chains
//! that these lead to.

use std::{
    net::IpAddr,
    sync::{Arc, LazyLock},
};

use crate::{
    kernel::nftables::{
        Chain, Family, Field, FieldKind, Holds, Hook, Key, Name, Rule, Selector, Set, Statement, Verdict,
    },
    model::{IpFamily, LocalTrafficDetector, NodeView},
};

/// The name of the tables.
pub const TABLE: &str = "kube-proxy";
/// What people read of them.
pub(super) const COMMENT: &str = "rules for kube-proxy";
/// The chain that refuses connections.
pub(super) const REJECT_CHAIN: &str = "reject-chain";

/// A set or map that is always there; maps of service-ips and below are what a Service's addresses lead to.
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
    ServiceEndpoints,
    ServiceLocalEndpoints,
    NodePortEndpoints,
    NodePortLocalEndpoints,
}

const ADDRESS: &[FieldKind] = &[FieldKind::Address];
const PORT: &[FieldKind] = &[FieldKind::Protocol, FieldKind::Port];
const ADDRESS_PORT: &[FieldKind] = &[FieldKind::Address, FieldKind::Protocol, FieldKind::Port];
const CONNECTION: &[FieldKind] =
    &[FieldKind::Address, FieldKind::Address, FieldKind::Protocol, FieldKind::Port];
const PORT_SLOT: &[FieldKind] = &[FieldKind::Protocol, FieldKind::Port, FieldKind::Number];
const ADDRESS_PORT_SLOT: &[FieldKind] =
    &[FieldKind::Address, FieldKind::Protocol, FieldKind::Port, FieldKind::Number];
const ENDPOINT: &[FieldKind] = &[FieldKind::Address, FieldKind::Port];

static SETS: LazyLock<Vec<Set>> = LazyLock::new(|| Base::ALL.map(Base::describe).into());

impl Base {
    pub(super) const ALL: [Self; 12] = [
        Self::ClusterIps,
        Self::NodePortIps,
        Self::HairpinConnections,
        Self::NoEndpointServices,
        Self::NoEndpointNodePorts,
        Self::FirewallIps,
        Self::ServiceIps,
        Self::ServiceNodePorts,
        Self::ServiceEndpoints,
        Self::ServiceLocalEndpoints,
        Self::NodePortEndpoints,
        Self::NodePortLocalEndpoints,
    ];

    /// The set, as the kernel is told it.
    pub(super) fn set(self) -> &'static Set {
        &SETS[self as usize]
    }

    pub(super) fn name(self) -> Name {
        self.set().name.clone()
    }

    /// The one that this set is.
    pub(super) fn of(set: &Set) -> Option<Self> {
        Self::ALL.into_iter().find(|base| base.set().name == set.name)
    }

    /// The part of a key that is the destination it is for; none where elements are not of one destination.
    pub(super) fn place(self, family: Family, key: &Key) -> Option<Place> {
        let address = if family == Family::Ip { 4 } else { 16 };
        let length = match self {
            Self::ClusterIps | Self::NodePortIps | Self::HairpinConnections => return None,
            Self::NoEndpointServices
            | Self::FirewallIps
            | Self::ServiceIps
            | Self::ServiceEndpoints
            | Self::ServiceLocalEndpoints => address + 8,
            Self::NoEndpointNodePorts
            | Self::ServiceNodePorts
            | Self::NodePortEndpoints
            | Self::NodePortLocalEndpoints => 8,
        };
        let mut place = [0; 24];
        place.get_mut(..length)?.copy_from_slice(key.bytes().get(..length)?);
        Some(place)
    }

    fn describe(self) -> Set {
        let (name, key, holds, comment) = match self {
            Self::ClusterIps => ("cluster-ips", ADDRESS, Holds::Members, "Active ClusterIPs"),
            Self::NodePortIps => {
                ("nodeport-ips", ADDRESS, Holds::Members, "IPs that accept NodePort traffic")
            }
            Self::HairpinConnections => {
                ("hairpin-connections", CONNECTION, Holds::Members, "service hairpin connections")
            }
            Self::NoEndpointServices => (
                "no-endpoint-services",
                ADDRESS_PORT,
                Holds::Verdicts,
                "vmap to drop or reject packets to services with no endpoints",
            ),
            Self::NoEndpointNodePorts => (
                "no-endpoint-nodeports",
                PORT,
                Holds::Verdicts,
                "vmap to drop or reject packets to service nodeports with no endpoints",
            ),
            Self::FirewallIps => (
                "firewall-ips",
                ADDRESS_PORT,
                Holds::Verdicts,
                "destinations that are subject to LoadBalancerSourceRanges",
            ),
            Self::ServiceIps => (
                "service-ips",
                ADDRESS_PORT,
                Holds::Verdicts,
                "ClusterIP, ExternalIP and LoadBalancer IP traffic",
            ),
            Self::ServiceNodePorts => ("service-nodeports", PORT, Holds::Verdicts, "NodePort traffic"),
            Self::ServiceEndpoints => (
                "service-endpoints",
                ADDRESS_PORT_SLOT,
                Holds::Data(ENDPOINT),
                "endpoints of each destination in service-ips, by number",
            ),
            Self::ServiceLocalEndpoints => (
                "service-local-endpoints",
                ADDRESS_PORT_SLOT,
                Holds::Data(ENDPOINT),
                "the same of this node, for traffic policy Local",
            ),
            Self::NodePortEndpoints => (
                "nodeport-endpoints",
                PORT_SLOT,
                Holds::Data(ENDPOINT),
                "endpoints of each port in service-nodeports, by number",
            ),
            Self::NodePortLocalEndpoints => (
                "nodeport-local-endpoints",
                PORT_SLOT,
                Holds::Data(ENDPOINT),
                "the same of this node, for traffic policy Local",
            ),
        };
        Set { name: name.into(), key, holds, comment }
    }
}

/// A destination as the bytes that keys begin with.
pub(super) type Place = [u8; 24];

/// Where a packet goes to: what the first parts of keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Destination {
    /// None for a node port.
    pub(super) address: Option<IpAddr>,
    pub(super) protocol: u8,
    pub(super) port: u16,
}

impl Destination {
    pub(super) fn key(&self) -> Key {
        Key::new(&self.fields().collect::<Vec<_>>())
    }

    pub(super) fn slot(&self, number: u32) -> Key {
        Key::new(&self.fields().chain([Field::Number(number)]).collect::<Vec<_>>())
    }

    /// That of an element of [`Base::ServiceIps`] or [`Base::ServiceNodePorts`].
    pub(super) fn read(base: Base, key: &Key) -> Option<Self> {
        let (address, rest) = match (base, key.bytes().len()) {
            (Base::ServiceNodePorts, 8) => (None, key.bytes()),
            (Base::ServiceIps, 12) => {
                let (octets, rest) = key.bytes().split_first_chunk::<4>()?;
                (Some(IpAddr::from(*octets)), rest)
            }
            (Base::ServiceIps, 24) => {
                let (octets, rest) = key.bytes().split_first_chunk::<16>()?;
                (Some(IpAddr::from(*octets)), rest)
            }
            _ => return None,
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
pub(super) const DIALLED: [Selector; 3] =
    [Selector::Destination, Selector::Protocol, Selector::DestinationPort];
/// The same of a node port.
pub(super) const DIALLED_PORT: [Selector; 2] = [Selector::Protocol, Selector::DestinationPort];

/// What rules depend on besides Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Basis {
    /// The bit of a packet's mark that has it masqueraded.
    pub(super) masquerade: u32,
    pub(super) masquerade_all: bool,
    pub(super) detector: LocalTrafficDetector,
    /// The node's own address, by family: V4 and V6.
    pub(super) primary: [Option<IpAddr>; 2],
}

impl Basis {
    pub(super) fn new(masquerade: u32, node: &NodeView) -> Self {
        Self {
            masquerade,
            masquerade_all: node.masquerade_all,
            detector: node.local_detector.clone(),
            primary: IpFamily::ALL.map(|family| node.primary_addresses.get(&family).copied()),
        }
    }

    /// That the packet comes from a pod of this node, or does not; none where that cannot be told.
    pub(super) fn is_from_pod(&self, family: Family, inside: bool) -> Option<Statement> {
        match &self.detector {
            LocalTrafficDetector::None => None,
            LocalTrafficDetector::Cidrs(cidrs) => {
                let range = cidrs.iter().find(|cidr| Family::of(cidr.addr()) == family)?;
                Some(Statement::Source { range: *range, inside })
            }
            LocalTrafficDetector::BridgeInterface(name) => {
                Some(Statement::InputInterface { name: Arc::clone(name), inside })
            }
            LocalTrafficDetector::InterfaceNamePrefix(prefix) => {
                Some(Statement::InputInterface { name: format!("{prefix}*").into(), inside })
            }
        }
    }

    fn cluster_ip_masquerading(&self, family: Family) -> Option<Rule> {
        let to_cluster_ip = Statement::In(vec![Selector::Destination], Base::ClusterIps.name());
        let mark = Statement::SetMark(self.masquerade);
        if self.masquerade_all {
            let rule = Rule::new([to_cluster_ip, mark]);
            return Some(rule.comment("masquerade all clusterIP traffic"));
        }
        let outside = self.is_from_pod(family, false)?;
        let rule = Rule::new([to_cluster_ip, outside, mark]);
        Some(rule.comment("masquerade clusterIP traffic from outside cluster"))
    }
}

/// `NF_INET_*`.
const PREROUTING: u32 = 0;
const INPUT: u32 = 1;
const FORWARD: u32 = 2;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;

/// The chains that are always there, those that others lead to first, with their rules.
///
/// Priorities are kube-proxy's: others order themselves around them. What is refused is so in filter chains, after
/// translation found nothing to translate to, as an answer of a nat chain would not belong to the connection.
pub(super) fn chains(basis: &Basis, family: Family) -> Vec<(Chain, Vec<Rule>)> {
    let mut chains = vec![
        helper(
            REJECT_CHAIN,
            "helper for @no-endpoint-services / @no-endpoint-nodeports",
            vec![Rule::new([Statement::Reject])],
        ),
        helper("firewall-check", "", vec![Rule::new([by_address(Base::FirewallIps)])]),
        helper("service-endpoints-check", "", vec![Rule::new([by_address(Base::NoEndpointServices)])]),
        helper("nodeport-endpoints-check", "", vec![by_node_port(Base::NoEndpointNodePorts)]),
        helper("cluster-ips-check", "", vec![invalid_port()]),
        helper("services", "", services(basis, family)),
        helper("masquerading", "", masquerading(basis)),
    ];
    let new = |to: &str| Rule::new([Statement::StateNew, jump(to)]);
    let all = |to: &str| Rule::new([jump(to)]);
    chains.extend([
        base("filter-prerouting-pre-dnat", "filter", PREROUTING, -110, vec![new("firewall-check")]),
        base("filter-output-pre-dnat", "filter", OUTPUT, -110, vec![new("firewall-check")]),
        base(
            "filter-input",
            "filter",
            INPUT,
            0,
            vec![new("nodeport-endpoints-check"), new("service-endpoints-check")],
        ),
        base(
            "filter-forward",
            "filter",
            FORWARD,
            0,
            vec![new("service-endpoints-check"), new("cluster-ips-check")],
        ),
        base(
            "filter-output",
            "filter",
            OUTPUT,
            0,
            vec![new("service-endpoints-check"), new("cluster-ips-check")],
        ),
        base("nat-prerouting", "nat", PREROUTING, -100, vec![all("services")]),
        base("nat-output", "nat", OUTPUT, -100, vec![all("services")]),
        base("nat-postrouting", "nat", POSTROUTING, 100, vec![all("masquerading")]),
    ]);
    chains
}

fn helper(name: &str, comment: &'static str, rules: Vec<Rule>) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: None, comment }, rules)
}

fn base(name: &str, kind: &'static str, number: u32, priority: i32, rules: Vec<Rule>) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: Some(Hook { kind, number, priority }), comment: "" }, rules)
}

fn jump(to: &str) -> Statement {
    Statement::Verdict(Verdict::Jump(to.into()))
}

fn by_address(map: Base) -> Statement {
    Statement::VerdictMap(DIALLED.into(), map.name())
}

fn by_node_port(map: Base) -> Rule {
    Rule::new([
        Statement::In(vec![Selector::Destination], Base::NodePortIps.name()),
        Statement::VerdictMap(DIALLED_PORT.into(), map.name()),
    ])
}

fn invalid_port() -> Rule {
    let to_cluster_ip = Statement::In(vec![Selector::Destination], Base::ClusterIps.name());
    Rule::new([to_cluster_ip, Statement::Reject]).comment("Reject traffic to invalid ports of ClusterIPs")
}

fn services(basis: &Basis, family: Family) -> Vec<Rule> {
    let masquerading = basis.cluster_ip_masquerading(family);
    let by_address = Rule::new([by_address(Base::ServiceIps)]);
    masquerading.into_iter().chain([by_address, by_node_port(Base::ServiceNodePorts)]).collect()
}

/// The mark is taken off, since the packet may pass here again, as when it is put into a tunnel.
fn masquerading(basis: &Basis) -> Vec<Rule> {
    let bit = basis.masquerade;
    let hairpin =
        vec![Selector::Source, Selector::Destination, Selector::Protocol, Selector::DestinationPort];
    vec![
        Rule::new([Statement::Marked(bit), Statement::FlipMark(bit), Statement::Masquerade]),
        Rule::new([
            Statement::StatusDnat,
            Statement::In(hairpin, Base::HairpinConnections.name()),
            Statement::Masquerade,
        ]),
    ]
}
