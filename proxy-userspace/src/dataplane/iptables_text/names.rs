//! Names of kube-proxy's chains, with the hashes that distinguish service ports and endpoints.

use std::{fmt, net::SocketAddr};

use crate::{dataplane::name_hash::base32, model::ServicePortName};

/// What a chain of a service port is for. The prefixes are upstream's
/// (`pkg/proxy/iptables/proxier.go`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// The endpoints of policy Cluster.
    Cluster,
    /// The endpoints of policy Local.
    Local,
    /// Traffic to addresses that clients outside the cluster use.
    External,
    /// The source ranges of load-balancer IPs.
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

/// The number of base32 digits of a hash in a name. Names of chains have at most 28 bytes.
const DIGITS: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NameHash([u8; DIGITS]);

impl NameHash {
    /// The hash of a service port: upstream's `portProtoHash`.
    pub(crate) fn of_port(name: &ServicePortName) -> Self {
        Self(base32(&format!("{name}{}", name.protocol.lowercase_name())))
    }

    /// The hash of an endpoint: upstream's `servicePortEndpointChainName`.
    pub(crate) fn of_endpoint(name: &ServicePortName, endpoint: SocketAddr) -> Self {
        Self(base32(&format!("{name}{}{endpoint}", name.protocol.lowercase_name())))
    }

    fn parse(text: &str) -> Option<Self> {
        let digits: [u8; DIGITS] = text.as_bytes().try_into().ok()?;
        digits.iter().all(|digit| matches!(digit, b'A'..=b'Z' | b'2'..=b'7')).then_some(Self(digits))
    }
}

impl fmt::Display for NameHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.0).unwrap_or_default())
    }
}

/// A chain of kube-proxy or shunt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Chain {
    Fixed(&'static str),
    /// A chain of a service port or an endpoint, in the iptables mode.
    Of(Purpose, NameHash),
}

/// Selects the service port of a packet.
pub(crate) const SERVICES: Chain = Chain::Fixed("KUBE-SERVICES");
/// Refuses or drops packets to addresses that clients outside the cluster use.
pub(crate) const EXTERNAL_SERVICES: Chain = Chain::Fixed("KUBE-EXTERNAL-SERVICES");
/// Node ports; in the table filter, health check node ports.
pub(crate) const NODE_PORTS: Chain = Chain::Fixed("KUBE-NODEPORTS");
/// Masquerades the packets that have the mark.
pub(crate) const POSTROUTING: Chain = Chain::Fixed("KUBE-POSTROUTING");
/// Sets the mark of packets to be masqueraded.
pub(crate) const MARK_MASQ: Chain = Chain::Fixed("KUBE-MARK-MASQ");
/// Accepts forwarded traffic of Services.
pub(crate) const FORWARD: Chain = Chain::Fixed("KUBE-FORWARD");
/// Drops packets that no source range allowed.
pub(crate) const PROXY_FIREWALL: Chain = Chain::Fixed("KUBE-PROXY-FIREWALL");
/// A chain of the kubelet, which upstream's proxy fills too. It keeps other hosts from loopback
/// addresses while `route_localnet` is on.
pub(crate) const KUBELET_FIREWALL: Chain = Chain::Fixed("KUBE-FIREWALL");
/// An empty chain in the table mangle. It exists if the iptables mode, and nobody else, set
/// `route_localnet`. Upstream has no such chain, because it never resets the setting.
pub(crate) const ROUTES_LOCALNET: Chain = Chain::Fixed("KUBE-PROXY-ROUTE-LOCALNET");
/// An empty chain. If it is missing, somebody has flushed the table.
pub(crate) const CANARY: Chain = Chain::Fixed("KUBE-PROXY-CANARY");

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
    /// Returns the chain of the iptables mode with this name; `None` if the mode has no such chain.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        if let Some(fixed) = FIXED.into_iter().find(|chain| chain.is_named(name)) {
            return Some(fixed);
        }
        Purpose::ALL.into_iter().find_map(|purpose| {
            let hash = NameHash::parse(name.strip_prefix(purpose.prefix())?)?;
            Some(Self::Of(purpose, hash))
        })
    }

    /// Returns true if this is a chain with this fixed name.
    pub(crate) fn is_named(self, name: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::key;

    #[test]
    fn hashes_equal_upstreams() {
        let lbs = key("default/lbs", "").name;
        assert_eq!(
            Chain::Of(Purpose::Cluster, NameHash::of_port(&lbs)).to_string(),
            "KUBE-SVC-FYZB2HTOW53NRIPL"
        );
        let endpoint = NameHash::of_endpoint(&lbs, "10.244.2.11:8080".parse().unwrap());
        assert_eq!(Chain::Of(Purpose::Endpoint, endpoint).to_string(), "KUBE-SEP-HFWLTVTPDOVGG2MS");
    }

    #[test]
    fn written_names_are_parsed_and_other_names_are_not() {
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
