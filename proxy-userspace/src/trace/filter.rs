//! What a subscriber of a trace wants to see.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use super::record::{TracedEvent, TracedPacket, TracedVerdict};

/// What to trace. A field that is `None` does not filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceFilter {
    /// Services of this namespace.
    pub namespace: Option<String>,
    /// The Service of this name.
    pub name: Option<String>,
    /// With `name`: its port.
    pub service_port: Option<FilterPort>,
    /// The names of this port, once it was found.
    #[serde(skip)]
    pub(super) port_names: Option<Vec<String>>,
    /// Connections in which this is the address of the client, the Service or the endpoint.
    pub address: Option<IpAddr>,
    /// With `address`: its port.
    pub port: Option<u16>,
    /// What shunt did.
    #[serde(default)]
    pub verdicts: VerdictFilter,
    /// Packets on links too.
    #[serde(default)]
    pub packets: bool,
}

/// A port of a Service: its name or its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum FilterPort {
    /// The number at an address of the Service, or the node port.
    Number(NonZeroU16),
    /// The name. It always has a letter.
    Name(String),
}

impl From<String> for FilterPort {
    fn from(text: String) -> Self {
        text.parse().map_or(Self::Name(text), Self::Number)
    }
}

impl From<FilterPort> for String {
    fn from(port: FilterPort) -> Self {
        port.to_string()
    }
}

impl fmt::Display for FilterPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl TraceFilter {
    /// Returns true if the subscriber wants to see an event.
    pub fn matches(&self, event: &TracedEvent) -> bool {
        let addresses = [event.client, Some(event.vip), event.endpoint];
        self.verdicts.contains(event.verdict)
            && self.matches_service(event.service.as_deref())
            && self.matches_any(addresses.into_iter().flatten())
    }

    /// Returns true if the subscriber wants to see a packet with these addresses.
    pub fn matches_packet(&self, packet: &TracedPacket, addresses: &[SocketAddr]) -> bool {
        self.packets
            && self.verdicts.contains(packet.verdict)
            && self.matches_service(packet.service.as_deref())
            && self.matches_any(addresses.iter().copied())
    }

    /// Returns true if the service port, written `namespace/name:port`, is one of the wanted ones.
    pub(super) fn matches_service(&self, service: Option<&str>) -> bool {
        if self.namespace.is_none() && self.name.is_none() {
            return true;
        }
        let Some((namespace, port)) = service.and_then(|service| service.split_once('/')) else {
            return false;
        };
        let (name, port) = port.split_once(':').unwrap_or((port, ""));
        self.port_names.as_ref().is_none_or(|wanted| wanted.iter().any(|wanted| wanted == port))
            && self.namespace.as_deref().is_none_or(|wanted| wanted == namespace)
            && self.name.as_deref().is_none_or(|wanted| wanted == name)
    }

    /// Returns true if one of the addresses is the wanted one.
    fn matches_any(&self, addresses: impl IntoIterator<Item = SocketAddr>) -> bool {
        let Some(wanted) = self.address else { return true };
        let is_it = |address: SocketAddr| {
            address.ip() == wanted && self.port.is_none_or(|port| port == address.port())
        };
        addresses.into_iter().any(is_it)
    }
}

/// A set of verdicts. The empty set stands for all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct VerdictFilter(pub Vec<TracedVerdict>);

impl VerdictFilter {
    /// Returns true if the verdict is in the set.
    pub fn contains(&self, verdict: TracedVerdict) -> bool {
        self.0.is_empty() || self.0.contains(&verdict)
    }
}

impl From<VerdictFilter> for String {
    fn from(VerdictFilter(verdicts): VerdictFilter) -> Self {
        verdicts.iter().map(|verdict| verdict.name()).collect::<Vec<_>>().join(",")
    }
}

impl TryFrom<String> for VerdictFilter {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for VerdictFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let verdict = |name: &str| {
            let known = TracedVerdict::ALL.into_iter().find(|known| known.name() == name);
            known.ok_or_else(|| {
                format!("{name} is no verdict: must be translated, passed, refused or dropped")
            })
        };
        text.split(',').filter(|name| !name.is_empty()).map(verdict).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> TracedEvent {
        TracedEvent {
            time: String::new(),
            verdict: TracedVerdict::Refused,
            reason: None,
            protocol: "TCP".to_owned(),
            client: Some("192.0.2.1:4000".parse().expect("an address")),
            from: None,
            vip: "10.96.0.80:80".parse().expect("an address"),
            service: Some("shop/web:http".to_owned()),
            endpoint: None,
            pod: None,
            by: String::new(),
            link: None,
        }
    }

    fn filter(query: &str) -> TraceFilter {
        serde_urlencoded::from_str(query).expect("a filter")
    }

    #[test]
    fn each_part_of_a_filter_must_match() {
        for (query, is_wanted) in [
            ("", true),
            ("namespace=shop", true),
            ("namespace=shop&name=web", true),
            ("name=we", false),
            ("namespace=sho", false),
            ("address=192.0.2.1", true),
            ("address=192.0.2.1&port=80", false),
            ("address=10.96.0.80&port=80", true),
            ("address=10.244.1.1", false),
            ("verdicts=refused,dropped", true),
            ("verdicts=translated", false),
            ("name=web&verdicts=dropped", false),
        ] {
            assert_eq!(filter(query).matches(&event()), is_wanted, "{query}");
        }
        let unknown = TracedEvent { service: None, ..event() };
        assert!(!filter("name=web").matches(&unknown), "nobody knows whose it is");
    }

    #[test]
    fn a_filter_is_the_same_after_it_was_sent() {
        let sent = TraceFilter {
            namespace: Some("shop".to_owned()),
            address: Some("fd00::1".parse().expect("an address")),
            verdicts: "refused,dropped".parse().expect("verdicts"),
            packets: true,
            service_port: Some("80".to_owned().into()),
            ..TraceFilter::default()
        };
        assert_eq!(filter(&serde_urlencoded::to_string(&sent).expect("a query")), sent);
    }

    #[test]
    fn an_unknown_verdict_is_named() {
        let error = "refused,lost".parse::<VerdictFilter>().expect_err("lost is no verdict");
        assert_eq!(error, "lost is no verdict: must be translated, passed, refused or dropped");
    }
}
