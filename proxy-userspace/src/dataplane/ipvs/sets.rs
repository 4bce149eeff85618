//! kube-proxy's ipsets (`pkg/proxy/ipvs/ipset.go`): their names, types, comments and entries.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use crate::{
    kernel::ipvs::VirtualKey,
    model::{IpFamily, Protocol},
};

/// An ipset. Each IP family has its own set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// Endpoints of this node, each with its own address as the source: hairpin traffic.
    LoopBack,
    /// Cluster IPs with their ports.
    ClusterIp,
    /// External IPs with their ports, if externalTrafficPolicy is Cluster.
    ExternalIp,
    /// External IPs with their ports, if externalTrafficPolicy is Local.
    ExternalIpLocal,
    /// Load-balancer IPs with their ports.
    LoadBalancer,
    /// The subset of `LoadBalancer` whose externalTrafficPolicy is Local.
    LoadBalancerLocal,
    /// The subset of `LoadBalancer` that has source ranges.
    LoadBalancerFirewall,
    /// The source ranges of load-balancer IPs.
    LoadBalancerSourceCidr,
    /// Load-balancer IPs as their own source, if a source range contains the node.
    LoadBalancerSourceIp,
    /// Node ports of TCP.
    NodePortTcp,
    /// The subset of `NodePortTcp` whose externalTrafficPolicy is Local.
    NodePortLocalTcp,
    /// Node ports of UDP.
    NodePortUdp,
    /// The subset of `NodePortUdp` whose externalTrafficPolicy is Local.
    NodePortLocalUdp,
    /// Node ports of SCTP, with the node's addresses.
    NodePortSctp,
    /// The subset of `NodePortSctp` whose externalTrafficPolicy is Local.
    NodePortLocalSctp,
    /// healthCheckNodePorts.
    HealthCheckNodePort,
    /// The addresses of the dummy link.
    Addresses,
}

/// The sets in the order of [`Set`]: name, and comment of the rules that match the set, both
/// without their prefixes.
const SETS: [(Set, &str, &str); 17] = [
    (Set::LoopBack, "LOOP-BACK", "endpoints dst ip:port, source ip for solving hairpin purpose"),
    (Set::ClusterIp, "CLUSTER-IP", "service cluster ip + port for masquerade purpose"),
    (Set::ExternalIp, "EXTERNAL-IP", "service external ip + port for masquerade and filter purpose"),
    (
        Set::ExternalIpLocal,
        "EXTERNAL-IP-LOCAL",
        "service external ip + port with externalTrafficPolicy=local",
    ),
    (Set::LoadBalancer, "LOAD-BALANCER", "service lb portal"),
    (
        Set::LoadBalancerLocal,
        "LOAD-BALANCER-LOCAL",
        "service load balancer ip + port with externalTrafficPolicy=local",
    ),
    (
        Set::LoadBalancerFirewall,
        "LOAD-BALANCER-FW",
        "service load balancer ip + port for load balancer with sourceRange",
    ),
    (
        Set::LoadBalancerSourceCidr,
        "LOAD-BALANCER-SOURCE-CIDR",
        "service load balancer ip + port + source cidr for packet filter purpose",
    ),
    (
        Set::LoadBalancerSourceIp,
        "LOAD-BALANCER-SOURCE-IP",
        "service load balancer ip + port + source IP for packet filter purpose",
    ),
    (Set::NodePortTcp, "NODE-PORT-TCP", "nodeport TCP port for masquerade purpose"),
    (Set::NodePortLocalTcp, "NODE-PORT-LOCAL-TCP", "nodeport TCP port with externalTrafficPolicy=local"),
    (Set::NodePortUdp, "NODE-PORT-UDP", "nodeport UDP port for masquerade purpose"),
    (Set::NodePortLocalUdp, "NODE-PORT-LOCAL-UDP", "nodeport UDP port with externalTrafficPolicy=local"),
    (
        Set::NodePortSctp,
        "NODE-PORT-SCTP-HASH",
        "nodeport SCTP port for masquerade purpose with type 'hash ip:port'",
    ),
    (
        Set::NodePortLocalSctp,
        "NODE-PORT-LOCAL-SCTP-HASH",
        "nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'",
    ),
    (Set::HealthCheckNodePort, "HEALTH-CHECK-NODE-PORT", "health check node port"),
    (Set::Addresses, "IPVS-IPS", ""),
];

/// The length of the longest name of a set (`IPSET_MAXNAMELEN` without the terminating zero).
const LONGEST_NAME: usize = 31;

impl Set {
    /// Returns all sets.
    pub(super) fn all() -> [Self; SETS.len()] {
        SETS.map(|(set, ..)| set)
    }

    /// Returns the set's name in a family. A name that is too long is truncated, as kube-proxy
    /// does.
    pub fn name(self, family: IpFamily) -> String {
        let prefix = if family == IpFamily::V4 { "KUBE-" } else { "KUBE-6-" };
        let mut name = format!("{prefix}{}", SETS[self as usize].1);
        name.truncate(LONGEST_NAME);
        name
    }

    /// Returns the family and the set that have this name.
    pub(super) fn from_name(name: &str) -> Option<(IpFamily, Self)> {
        let mut all = IpFamily::ALL.into_iter().flat_map(|family| Self::all().map(|set| (family, set)));
        all.find(|(family, set)| set.name(*family) == name)
    }

    /// Returns the type of the set.
    const fn kind(self) -> &'static str {
        match self {
            Self::Addresses => "hash:ip",
            Self::LoopBack | Self::LoadBalancerSourceIp => "hash:ip,port,ip",
            Self::LoadBalancerSourceCidr => "hash:ip,port,net",
            Self::NodePortTcp
            | Self::NodePortLocalTcp
            | Self::NodePortUdp
            | Self::NodePortLocalUdp
            | Self::HealthCheckNodePort => "bitmap:port",
            _ => "hash:ip,port",
        }
    }

    /// Returns the set's type and options, as kube-proxy creates it.
    pub fn definition(self, family: IpFamily) -> String {
        let kind = self.kind();
        if kind == "bitmap:port" {
            return format!("{kind} range 0-65535");
        }
        format!("{kind} family {} hashsize 1024 maxelem 65536", family_word(family))
    }

    /// Returns true if a set with this type and these options can be used. Its sizes may differ.
    pub(super) fn is_compatible(self, family: IpFamily, definition: &str) -> bool {
        let mut words = definition.split(' ');
        let kind = words.next().unwrap_or_default();
        let found = words.skip_while(|word| *word != "family").nth(1);
        kind == self.kind() && found.is_none_or(|found| found == family_word(family))
    }

    /// Returns the comment of rules that match the set.
    pub(super) fn comment(self) -> String {
        format!("Kubernetes {}", SETS[self as usize].2)
    }

    /// Returns true if the same frontend of a service port needs both entries in this set.
    pub(super) fn have_same_frontend(self, one: Entry, other: Entry) -> bool {
        let (Some(first), Some(second)) = (one.server(), other.server()) else { return one == other };
        match self {
            Self::NodePortSctp | Self::NodePortLocalSctp => first.address.port() == second.address.port(),
            _ => first == second,
        }
    }

    /// Returns true if the entries protect something: an entry must be deleted after the object
    /// that it protects.
    pub(super) const fn is_guard(self) -> bool {
        matches!(self, Self::LoadBalancerFirewall | Self::Addresses)
    }
}

const fn family_word(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "inet",
        IpFamily::V6 => "inet6",
    }
}

/// An address, a protocol and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destination {
    /// The address.
    pub address: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// An entry of a set, without the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entry {
    /// An entry of a set of type `bitmap:port`.
    Port(u16),
    /// An entry of a set of type `hash:ip`.
    Address(IpAddr),
    /// An entry of a set of type `hash:ip,port`.
    Destination(Destination),
    /// An entry of a set of type `hash:ip,port,ip`.
    From(Destination, IpAddr),
    /// An entry of a set of type `hash:ip,port,net`.
    Within(Destination, IpNet),
}

/// An entry with its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SetEntry {
    /// The family of the set.
    pub family: IpFamily,
    /// The set.
    pub set: Set,
    /// The entry.
    pub entry: Entry,
}

/// As `ipset restore` takes it.
impl fmt::Display for SetEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.set.name(self.family), self.entry)
    }
}

/// With the number of the protocol. ipset knows the names only if the file `/etc/protocols` exists,
/// and small container images lack it.
impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}:{}", self.address, self.protocol.number(), self.port)
    }
}

impl Destination {
    fn parse(text: &str) -> Option<Self> {
        let (address, rest) = text.split_once(',')?;
        let (word, port) = rest.split_once(':')?;
        let matches =
            |it: &Protocol| it.name().to_ascii_lowercase() == word || it.number().to_string() == word;
        let protocol = Protocol::ALL.into_iter().find(matches)?;
        Some(Self { address: address.parse().ok()?, protocol, port: port.parse().ok()? })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "{port}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Destination(to) => write!(f, "{to}"),
            Self::From(to, source) => write!(f, "{to},{source}"),
            Self::Within(to, range) => write!(f, "{to},{range}"),
        }
    }
}

impl Entry {
    /// Returns the virtual server that the entry belongs to.
    pub(super) fn server(self) -> Option<VirtualKey> {
        match self {
            Self::Destination(to) | Self::From(to, _) | Self::Within(to, _) => {
                Some(VirtualKey { protocol: to.protocol, address: SocketAddr::new(to.address, to.port) })
            }
            Self::Port(_) | Self::Address(_) => None,
        }
    }

    /// Parses an entry as `ipset save` prints it. Returns `None` if shunt cannot have added it.
    pub(super) fn parse(set: Set, text: &str) -> Option<Self> {
        let last = || text.rsplit_once(',');
        match set.kind() {
            "bitmap:port" => text.parse().ok().map(Self::Port),
            "hash:ip" => text.parse().ok().map(Self::Address),
            "hash:ip,port" => Destination::parse(text).map(Self::Destination),
            "hash:ip,port,ip" => {
                let (to, source) = last()?;
                Some(Self::From(Destination::parse(to)?, source.parse().ok()?))
            }
            _ => {
                let (to, range) = last()?;
                // ipset prints a range of one address as that address.
                let range = range.parse().ok().or_else(|| Some(range.parse::<IpAddr>().ok()?.into()))?;
                Some(Self::Within(Destination::parse(to)?, range))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_kube_proxy_and_not_too_long() {
        assert_eq!(Set::ClusterIp.name(IpFamily::V4), "KUBE-CLUSTER-IP");
        assert_eq!(Set::LoadBalancerSourceCidr.name(IpFamily::V6), "KUBE-6-LOAD-BALANCER-SOURCE-CID");
        assert_eq!(Set::NodePortLocalSctp.name(IpFamily::V6), "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS");
        for set in Set::all() {
            assert_eq!(SETS[set as usize].0, set);
            for family in IpFamily::ALL {
                assert_eq!(Set::from_name(&set.name(family)), Some((family, set)));
            }
        }
        assert_eq!(Set::from_name("KUBE-ROUTER-SET"), None);
    }

    #[test]
    fn entries_are_parsed_as_ipset_prints_them() {
        for (set, text) in [
            (Set::NodePortTcp, "30080"),
            (Set::Addresses, "fd96::10"),
            (Set::ClusterIp, "10.96.0.10,udp:53"),
            (Set::LoopBack, "fd44:1::11,tcp:8080,fd44:1::11"),
            (Set::LoadBalancerSourceCidr, "198.51.100.25,sctp:80,192.0.2.0/24"),
        ] {
            let entry = Entry::parse(set, text).expect(text);
            assert_eq!(Entry::parse(set, &entry.to_string()), Some(entry), "also with a protocol number");
        }
        let single = Entry::parse(Set::LoadBalancerSourceCidr, "198.51.100.25,tcp:80,192.0.2.1").unwrap();
        assert_eq!(single.to_string(), "198.51.100.25,6:80,192.0.2.1/32");
        assert_eq!(Entry::parse(Set::ClusterIp, "10.96.0.10,icmp:ping"), None);
    }

    #[test]
    fn a_set_of_another_type_or_family_is_not_compatible() {
        let definition = Set::ClusterIp.definition(IpFamily::V4);
        assert!(
            Set::ClusterIp.is_compatible(IpFamily::V4, &format!("{definition} bucketsize 12 initval 0x1"))
        );
        assert!(!Set::ClusterIp.is_compatible(IpFamily::V6, &definition));
        assert!(!Set::LoopBack.is_compatible(IpFamily::V4, &definition));
        assert!(Set::NodePortTcp.is_compatible(IpFamily::V6, "bitmap:port range 0-65535"));
    }
}
