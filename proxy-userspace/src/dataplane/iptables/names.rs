//! Names of tables and chains: upstream's, with the hashes that tell the chains of service ports and endpoints apart.

use std::{fmt, net::SocketAddr};

use crate::{
    dataplane::name_hash::base32,
    model::{Protocol, ServicePortName},
};

/// A table that holds something of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    /// Only the canary.
    Mangle,
    /// What refuses, drops and lets through.
    Filter,
    /// What translates and masquerades.
    Nat,
}

impl Table {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [Self::Mangle, Self::Filter, Self::Nat];

    /// iptables' word for it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Filter => "filter",
            Self::Nat => "nat",
        }
    }
}

/// What a chain of a service port is for; upstream's prefixes (`pkg/proxy/iptables/proxier.go`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Purpose {
    /// The endpoints of policy Cluster.
    Cluster,
    /// The endpoints of policy Local.
    Local,
    /// Traffic to addresses that are reached from outside.
    External,
    /// Source ranges of load-balancer addresses.
    Firewall,
    /// One endpoint.
    Endpoint,
}

impl Purpose {
    const ALL: [Self; 5] = [Self::Cluster, Self::Local, Self::External, Self::Firewall, Self::Endpoint];

    const fn prefix(self) -> &'static str {
        match self {
            Self::Cluster => "KUBE-SVC-",
            Self::Local => "KUBE-SVL-",
            Self::External => "KUBE-EXT-",
            Self::Firewall => "KUBE-FW-",
            Self::Endpoint => "KUBE-SEP-",
        }
    }
}

/// Digits of base32 (RFC 4648) that a name keeps of its hash: names may not be longer than 28 bytes.
const DIGITS: usize = 16;

/// What tells a service port or an endpoint apart in names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NameHash([u8; DIGITS]);

impl NameHash {
    /// Upstream's `portProtoHash`.
    pub(super) fn of_port(name: &ServicePortName) -> Self {
        Self(base32(&format!("{name}{}", protocol(name.protocol))))
    }

    /// That of an endpoint: upstream's `servicePortEndpointChainName`.
    pub(super) fn of_endpoint(name: &ServicePortName, endpoint: SocketAddr) -> Self {
        Self(base32(&format!("{name}{}{endpoint}", protocol(name.protocol))))
    }

    fn parse(text: &str) -> Option<Self> {
        let digits: [u8; DIGITS] = text.as_bytes().try_into().ok()?;
        digits.iter().all(|digit| matches!(digit, b'A'..=b'Z' | b'2'..=b'7')).then_some(Self(digits))
    }
}

impl fmt::Display for NameHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|digit| fmt::Write::write_char(f, char::from(*digit)))
    }
}

impl fmt::Debug for NameHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A chain of ours.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Chain {
    /// One that is always there.
    Fixed(&'static str),
    /// One of a service port or an endpoint.
    Of(Purpose, NameHash),
}

/// Where traffic to Services is told apart.
pub(super) const SERVICES: Chain = Chain::Fixed("KUBE-SERVICES");
/// What is refused or dropped on addresses that are reached from outside.
pub(super) const EXTERNAL_SERVICES: Chain = Chain::Fixed("KUBE-EXTERNAL-SERVICES");
/// Node ports; in the table filter, health check node ports.
pub(super) const NODE_PORTS: Chain = Chain::Fixed("KUBE-NODEPORTS");
/// Masquerades what is marked.
pub(super) const POSTROUTING: Chain = Chain::Fixed("KUBE-POSTROUTING");
/// Marks what is to be masqueraded.
pub(super) const MARK_MASQ: Chain = Chain::Fixed("KUBE-MARK-MASQ");
/// Lets Services' traffic through FORWARD.
pub(super) const FORWARD: Chain = Chain::Fixed("KUBE-FORWARD");
/// Drops what source ranges did not let pass.
pub(super) const PROXY_FIREWALL: Chain = Chain::Fixed("KUBE-PROXY-FIREWALL");
/// The kubelet's, which upstream's proxy fills too: it keeps other hosts from loopback addresses while `route_localnet` is on.
pub(super) const KUBELET_FIREWALL: Chain = Chain::Fixed("KUBE-FIREWALL");
/// Empty, in the table mangle: it was this mode, and nobody else, that set `route_localnet`. Not upstream's, which never sets it back.
pub(super) const ROUTES_LOCALNET: Chain = Chain::Fixed("KUBE-PROXY-ROUTE-LOCALNET");
/// Empty; where it is gone, somebody has flushed the table.
pub(super) const CANARY: Chain = Chain::Fixed("KUBE-PROXY-CANARY");

const FIXED: [Chain; 10] = [
    SERVICES,
    EXTERNAL_SERVICES,
    NODE_PORTS,
    POSTROUTING,
    MARK_MASQ,
    FORWARD,
    PROXY_FIREWALL,
    KUBELET_FIREWALL,
    ROUTES_LOCALNET,
    CANARY,
];

impl Chain {
    /// The chain of this name; none where it is not ours.
    pub(super) fn parse(name: &str) -> Option<Self> {
        if let Some(fixed) = FIXED.into_iter().find(|chain| chain.is_named(name)) {
            return Some(fixed);
        }
        Purpose::ALL.into_iter().find_map(|purpose| {
            let hash = NameHash::parse(name.strip_prefix(purpose.prefix())?)?;
            Some(Self::Of(purpose, hash))
        })
    }

    fn is_named(self, name: &str) -> bool {
        matches!(self, Self::Fixed(fixed) if fixed == name)
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(name) => f.write_str(name),
            Self::Of(purpose, hash) => write!(f, "{}{hash}", purpose.prefix()),
        }
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// iptables' word for a protocol.
pub(super) const fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::key;

    #[test]
    fn hashes_are_upstreams() {
        let lbs = key("default/lbs", "").name;
        assert_eq!(
            Chain::Of(Purpose::Cluster, NameHash::of_port(&lbs)).to_string(),
            "KUBE-SVC-FYZB2HTOW53NRIPL"
        );
        let endpoint = NameHash::of_endpoint(&lbs, "10.244.2.11:8080".parse().unwrap());
        assert_eq!(Chain::Of(Purpose::Endpoint, endpoint).to_string(), "KUBE-SEP-HFWLTVTPDOVGG2MS");
    }

    #[test]
    fn names_are_read_as_they_are_written_and_those_of_others_are_not_ours() {
        for name in
            ["KUBE-SERVICES", "KUBE-FIREWALL", "KUBE-FW-FYZB2HTOW53NRIPL", "KUBE-SEP-HFWLTVTPDOVGG2MS"]
        {
            assert_eq!(Chain::parse(name).expect(name).to_string(), name);
        }
        for name in [
            "KUBE-KUBELET-CANARY",
            "KUBE-SVC-",
            "KUBE-SVC-fyzb2htow53nripl",
            "KUBE-POD-FW-AAAAAAAAAAAAAAAA",
            "",
        ] {
            assert_eq!(Chain::parse(name), None, "{name}");
        }
    }
}
