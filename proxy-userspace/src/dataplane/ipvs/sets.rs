//! Upstream's ipsets (`pkg/proxy/ipvs/ipset.go`): their names, types and comments, and what is in them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use ipnet::IpNet;

use crate::{
    kernel::ipvs::VirtualKey,
    model::{IpFamily, Protocol},
};

/// A set, of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    /// Endpoints of this node, each with its own address as the source: hairpin traffic.
    LoopBack,
    /// Cluster IPs with their ports.
    ClusterIp,
    /// External IPs with their ports.
    ExternalIp,
    /// Those of externalTrafficPolicy Local instead.
    ExternalIpLocal,
    /// Load-balancer IPs with their ports.
    LoadBalancer,
    /// Those of externalTrafficPolicy Local too.
    LoadBalancerLocal,
    /// Those with source ranges too.
    LoadBalancerFirewall,
    /// Their ranges.
    LoadBalancerSourceCidr,
    /// Themselves as sources, where a range holds the node.
    LoadBalancerSourceIp,
    /// Node ports of TCP.
    NodePortTcp,
    /// Those of externalTrafficPolicy Local too.
    NodePortLocalTcp,
    /// Node ports of UDP.
    NodePortUdp,
    /// Those of externalTrafficPolicy Local too.
    NodePortLocalUdp,
    /// Node ports of SCTP, with the node's addresses.
    NodePortSctp,
    /// Those of externalTrafficPolicy Local too.
    NodePortLocalSctp,
    /// healthCheckNodePorts.
    HealthCheckNodePort,
    /// The addresses of the dummy link.
    Addresses,
}

/// The longest name that a set can have (`IPSET_MAXNAMELEN`, without the zero that ends it).
const LONGEST_NAME: usize = 31;

impl Set {
    /// All of them.
    pub(super) const ALL: [Self; 17] = [
        Self::LoopBack,
        Self::ClusterIp,
        Self::ExternalIp,
        Self::ExternalIpLocal,
        Self::LoadBalancer,
        Self::LoadBalancerLocal,
        Self::LoadBalancerFirewall,
        Self::LoadBalancerSourceCidr,
        Self::LoadBalancerSourceIp,
        Self::NodePortTcp,
        Self::NodePortLocalTcp,
        Self::NodePortUdp,
        Self::NodePortLocalUdp,
        Self::NodePortSctp,
        Self::NodePortLocalSctp,
        Self::HealthCheckNodePort,
        Self::Addresses,
    ];

    const fn base(self) -> &'static str {
        match self {
            Self::LoopBack => "LOOP-BACK",
            Self::ClusterIp => "CLUSTER-IP",
            Self::ExternalIp => "EXTERNAL-IP",
            Self::ExternalIpLocal => "EXTERNAL-IP-LOCAL",
            Self::LoadBalancer => "LOAD-BALANCER",
            Self::LoadBalancerLocal => "LOAD-BALANCER-LOCAL",
            Self::LoadBalancerFirewall => "LOAD-BALANCER-FW",
            Self::LoadBalancerSourceCidr => "LOAD-BALANCER-SOURCE-CIDR",
            Self::LoadBalancerSourceIp => "LOAD-BALANCER-SOURCE-IP",
            Self::NodePortTcp => "NODE-PORT-TCP",
            Self::NodePortLocalTcp => "NODE-PORT-LOCAL-TCP",
            Self::NodePortUdp => "NODE-PORT-UDP",
            Self::NodePortLocalUdp => "NODE-PORT-LOCAL-UDP",
            Self::NodePortSctp => "NODE-PORT-SCTP-HASH",
            Self::NodePortLocalSctp => "NODE-PORT-LOCAL-SCTP-HASH",
            Self::HealthCheckNodePort => "HEALTH-CHECK-NODE-PORT",
            Self::Addresses => "IPVS-IPS",
        }
    }

    /// Its name in a family; what is too long is cut, as upstream does.
    pub(super) fn name(self, family: IpFamily) -> String {
        let mut name = match family {
            IpFamily::V4 => format!("KUBE-{}", self.base()),
            IpFamily::V6 => format!("KUBE-6-{}", self.base()),
        };
        name.truncate(LONGEST_NAME);
        name
    }

    /// The set of this name.
    pub(super) fn named(name: &str) -> Option<(IpFamily, Self)> {
        let all = IpFamily::ALL.into_iter().flat_map(|family| Self::ALL.map(|set| (family, set)));
        all.into_iter().find(|(family, set)| set.name(*family) == name)
    }

    const fn kind(self) -> &'static str {
        match self {
            Self::LoopBack | Self::LoadBalancerSourceIp => "hash:ip,port,ip",
            Self::ClusterIp
            | Self::ExternalIp
            | Self::ExternalIpLocal
            | Self::LoadBalancer
            | Self::LoadBalancerLocal
            | Self::LoadBalancerFirewall
            | Self::NodePortSctp
            | Self::NodePortLocalSctp => "hash:ip,port",
            Self::LoadBalancerSourceCidr => "hash:ip,port,net",
            Self::NodePortTcp
            | Self::NodePortLocalTcp
            | Self::NodePortUdp
            | Self::NodePortLocalUdp
            | Self::HealthCheckNodePort => "bitmap:port",
            Self::Addresses => "hash:ip",
        }
    }

    /// Its type and options, as upstream makes it.
    pub(super) fn made_as(self, family: IpFamily) -> String {
        let kind = self.kind();
        match family {
            _ if kind == "bitmap:port" => format!("{kind} range 0-65535"),
            IpFamily::V4 => format!("{kind} family inet hashsize 1024 maxelem 65536"),
            IpFamily::V6 => format!("{kind} family inet6 hashsize 1024 maxelem 65536"),
        }
    }

    /// Whether a set that was made so can be used: sizes are as they are.
    pub(super) fn fits(self, family: IpFamily, made_as: &str) -> bool {
        let mut words = made_as.split(' ');
        let kind = words.next().unwrap_or_default();
        let made_family = words.skip_while(|word| *word != "family").nth(1);
        let wanted = match family {
            IpFamily::V4 => "inet",
            IpFamily::V6 => "inet6",
        };
        kind == self.kind() && made_family.is_none_or(|made| made == wanted)
    }

    /// What rules that use it are commented with.
    pub(super) const fn comment(self) -> &'static str {
        match self {
            Self::LoopBack => "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
            Self::ClusterIp => "Kubernetes service cluster ip + port for masquerade purpose",
            Self::ExternalIp => "Kubernetes service external ip + port for masquerade and filter purpose",
            Self::ExternalIpLocal => "Kubernetes service external ip + port with externalTrafficPolicy=local",
            Self::LoadBalancer => "Kubernetes service lb portal",
            Self::LoadBalancerLocal => {
                "Kubernetes service load balancer ip + port with externalTrafficPolicy=local"
            }
            Self::LoadBalancerFirewall => {
                "Kubernetes service load balancer ip + port for load balancer with sourceRange"
            }
            Self::LoadBalancerSourceCidr => {
                "Kubernetes service load balancer ip + port + source cidr for packet filter purpose"
            }
            Self::LoadBalancerSourceIp => {
                "Kubernetes service load balancer ip + port + source IP for packet filter purpose"
            }
            Self::NodePortTcp => "Kubernetes nodeport TCP port for masquerade purpose",
            Self::NodePortLocalTcp => "Kubernetes nodeport TCP port with externalTrafficPolicy=local",
            Self::NodePortUdp => "Kubernetes nodeport UDP port for masquerade purpose",
            Self::NodePortLocalUdp => "Kubernetes nodeport UDP port with externalTrafficPolicy=local",
            Self::NodePortSctp => {
                "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'"
            }
            Self::NodePortLocalSctp => {
                "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'"
            }
            Self::HealthCheckNodePort => "Kubernetes health check node port",
            Self::Addresses => "",
        }
    }

    /// Whether one frontend of a service port wants both of these in the set.
    pub(super) fn are_of_one_frontend(self, one: Entry, other: Entry) -> bool {
        let (Some(first), Some(second)) = (one.server(), other.server()) else { return one == other };
        match self {
            Self::NodePortSctp | Self::NodePortLocalSctp => first.address.port() == second.address.port(),
            _ => first == second,
        }
    }

    /// Whether taking something out of it opens what was closed: then it must go after what it guards.
    pub(super) const fn is_guard(self) -> bool {
        matches!(self, Self::LoadBalancerFirewall | Self::Addresses)
    }
}

/// An address and port of a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Destination {
    /// The address.
    pub(super) address: IpAddr,
    /// The protocol.
    pub(super) protocol: Protocol,
    /// The port.
    pub(super) port: u16,
}

/// What is in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Entry {
    /// In sets of type `bitmap:port`.
    Port(u16),
    /// In sets of type `hash:ip`.
    Address(IpAddr),
    /// In sets of type `hash:ip,port`.
    Destination(Destination),
    /// In sets of type `hash:ip,port,ip`.
    From(Destination, IpAddr),
    /// In sets of type `hash:ip,port,net`.
    Within(Destination, IpNet),
}

/// ipset's word for a protocol, where it can look one up.
const fn protocol_word(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

/// With the protocol's number: to ipset words mean something only where there is a file `/etc/protocols`, which small container
/// images lack.
impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}:{}", self.address, self.protocol.number(), self.port)
    }
}

impl FromStr for Destination {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, rest) = text.split_once(',').ok_or(())?;
        let (word, port) = rest.split_once(':').ok_or(())?;
        let is_named = |it: &Protocol| protocol_word(*it) == word || it.number().to_string() == word;
        Ok(Self {
            address: address.parse().map_err(drop)?,
            protocol: Protocol::ALL.into_iter().find(is_named).ok_or(())?,
            port: port.parse().map_err(drop)?,
        })
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
    /// The virtual server that it is about.
    pub(super) fn server(self) -> Option<VirtualKey> {
        match self {
            Self::Destination(to) | Self::From(to, _) | Self::Within(to, _) => {
                Some(VirtualKey { protocol: to.protocol, address: SocketAddr::new(to.address, to.port) })
            }
            Self::Port(_) | Self::Address(_) => None,
        }
    }

    /// Reads what `ipset save` prints of a set; none of what no rule of ours could have put there.
    pub(super) fn read(set: Set, text: &str) -> Option<Self> {
        let last = || text.rsplit_once(',');
        match set.kind() {
            "bitmap:port" => text.parse().ok().map(Self::Port),
            "hash:ip" => text.parse().ok().map(Self::Address),
            "hash:ip,port" => text.parse().ok().map(Self::Destination),
            "hash:ip,port,ip" => {
                let (to, source) = last()?;
                Some(Self::From(to.parse().ok()?, source.parse().ok()?))
            }
            _ => {
                let (to, range) = last()?;
                // A range of one address is printed as that.
                let range = range.parse().ok().or_else(|| Some(range.parse::<IpAddr>().ok()?.into()))?;
                Some(Self::Within(to.parse().ok()?, range))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_upstreams_and_none_is_too_long() {
        assert_eq!(Set::ClusterIp.name(IpFamily::V4), "KUBE-CLUSTER-IP");
        assert_eq!(Set::LoadBalancerSourceCidr.name(IpFamily::V6), "KUBE-6-LOAD-BALANCER-SOURCE-CID");
        assert_eq!(Set::NodePortLocalSctp.name(IpFamily::V6), "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS");
        for set in Set::ALL {
            for family in IpFamily::ALL {
                assert_eq!(Set::named(&set.name(family)), Some((family, set)));
            }
        }
        assert_eq!(Set::named("KUBE-ROUTER-SET"), None);
    }

    #[test]
    fn entries_are_read_as_they_are_printed() {
        for (set, text) in [
            (Set::NodePortTcp, "30080"),
            (Set::Addresses, "fd96::10"),
            (Set::ClusterIp, "10.96.0.10,udp:53"),
            (Set::LoopBack, "fd44:1::11,tcp:8080,fd44:1::11"),
            (Set::LoadBalancerSourceCidr, "198.51.100.25,sctp:80,192.0.2.0/24"),
        ] {
            let entry = Entry::read(set, text).expect(text);
            assert_eq!(Entry::read(set, &entry.to_string()), Some(entry), "with a number too");
        }
        let single = Entry::read(Set::LoadBalancerSourceCidr, "198.51.100.25,tcp:80,192.0.2.1").unwrap();
        assert_eq!(single.to_string(), "198.51.100.25,6:80,192.0.2.1/32");
        assert_eq!(Entry::read(Set::ClusterIp, "10.96.0.10,icmp:ping"), None);
    }

    #[test]
    fn a_set_of_another_type_or_family_does_not_fit() {
        let made = Set::ClusterIp.made_as(IpFamily::V4);
        assert!(Set::ClusterIp.fits(IpFamily::V4, &format!("{made} bucketsize 12 initval 0x1")));
        assert!(!Set::ClusterIp.fits(IpFamily::V6, &made));
        assert!(!Set::LoopBack.fits(IpFamily::V4, &made));
        assert!(Set::NodePortTcp.fits(IpFamily::V6, "bitmap:port range 0-65535"));
    }
}
