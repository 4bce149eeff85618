//! The lines of a trace.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

/// A line of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all_fields = "camelCase")]
pub enum TraceRecord {
    /// From now on, everything is traced.
    TraceStarted,
    /// A connection, a conversation of datagrams, or a packet that was refused or dropped.
    TraceEvent(TracedEvent),
    /// A packet on a link, before and after the program.
    TracePacket(TracedPacket),
    /// Events or packets came faster than they were read, or limits were reached.
    TraceLost {
        /// How many are missing.
        records: u64,
    },
    /// Nothing else happened for a second.
    TraceAlive,
    /// Nothing is traced any more.
    TraceEnded {
        /// Why.
        reason: String,
    },
}

/// What shunt did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TracedVerdict {
    /// The connection goes to an endpoint.
    Translated,
    /// It goes on unchanged: netfilter has no rule for it.
    Passed,
    /// The client gets an error at once.
    Refused,
    /// The client gets no answer.
    Dropped,
}

impl TracedVerdict {
    /// All verdicts.
    pub const ALL: [Self; 4] = [Self::Translated, Self::Passed, Self::Refused, Self::Dropped];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Translated => "translated",
            Self::Passed => "passed",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
        }
    }
}

/// What happened to a connection, or to a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedEvent {
    /// When, as RFC 3339 with microseconds.
    pub time: String,
    /// What shunt did.
    pub verdict: TracedVerdict,
    /// Why it was refused or dropped: a `fate` of the metric `shunt_link_packets_total`, or a table
    /// and chain.
    pub reason: Option<String>,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The client. A socket that connects has no address yet.
    pub client: Option<SocketAddr>,
    /// `node`, or the pod of the client, as far as shunt knows it.
    pub from: Option<String>,
    /// The address to which the client connects.
    pub vip: SocketAddr,
    /// The service port that has this address, as `namespace/name:port`.
    pub service: Option<String>,
    /// The endpoint.
    pub endpoint: Option<SocketAddr>,
    /// The pod of the endpoint, as far as shunt knows it.
    pub pod: Option<String>,
    /// What decided: a program, or `netfilter`.
    pub by: String,
    /// The link on which the packet came in.
    pub link: Option<String>,
}

impl fmt::Display for TracedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { time, verdict, reason, protocol, client, from, vip, service, endpoint, pod, by, link } =
            self;
        // Of the time of the day, the date and the zone are not interesting.
        let clock = time.split_once('T').map_or(time.as_str(), |(_, clock)| clock.trim_end_matches('Z'));
        write!(f, "{clock} {:<10} {protocol:<4} ", verdict.name())?;
        match client {
            Some(client) => named(f, client, from.as_deref())?,
            None => write!(f, "{}", from.as_deref().unwrap_or("a socket"))?,
        }
        f.write_str(" -> ")?;
        named(f, vip, service.as_deref())?;
        if let Some(endpoint) = endpoint {
            f.write_str(" -> ")?;
            named(f, endpoint, pod.as_deref())?;
        }
        let on = link.as_ref().map(|link| format!(" on {link}")).unwrap_or_default();
        let why = reason.as_ref().map(|reason| format!(", {reason}")).unwrap_or_default();
        write!(f, "  [{by}{on}{why}]")
    }
}

fn named(f: &mut fmt::Formatter<'_>, address: &SocketAddr, name: Option<&str>) -> fmt::Result {
    match name {
        Some(name) => write!(f, "{address} ({name})"),
        None => write!(f, "{address}"),
    }
}

/// A packet on a link, before and after a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedPacket {
    /// When, in nanoseconds since 1970.
    pub time_ns: u64,
    /// The name of the link.
    pub link: String,
    /// Its packets begin with an Ethernet header, and not with an IP header.
    pub is_ethernet: bool,
    /// The program.
    pub program: String,
    /// What the program did.
    pub verdict: TracedVerdict,
    /// The service port that has the address to which the client sends.
    pub service: Option<String>,
    /// The bytes of the packet. It may be longer than what was captured.
    pub length: u32,
    /// The first bytes before the program, in base64.
    pub before: String,
    /// The first bytes after the program, in base64. `None` if the program changed nothing.
    pub after: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_who_connects_where_and_what_decided() {
        let event = TracedEvent {
            time: "2026-11-25T10:41:07.123456Z".to_owned(),
            verdict: TracedVerdict::Translated,
            reason: None,
            protocol: "TCP".to_owned(),
            client: None,
            from: Some("node".to_owned()),
            vip: "10.96.0.80:80".parse().expect("an address"),
            service: Some("shop/web".to_owned()),
            endpoint: Some("10.244.1.12:8080".parse().expect("an address")),
            pod: Some("shop/web-1".to_owned()),
            by: "shunt_connect4".to_owned(),
            link: None,
        };
        assert_eq!(
            event.to_string(),
            "10:41:07.123456 translated TCP  node -> 10.96.0.80:80 (shop/web) -> 10.244.1.12:8080 (shop/web-1)  \
             [shunt_connect4]"
        );
        let refused = TracedEvent {
            verdict: TracedVerdict::Refused,
            reason: Some("refused".to_owned()),
            client: Some("192.0.2.1:4000".parse().expect("an address")),
            from: None,
            endpoint: None,
            by: "shunt_in_eth".to_owned(),
            link: Some("eth0".to_owned()),
            ..event
        };
        assert_eq!(
            refused.to_string(),
            "10:41:07.123456 refused    TCP  192.0.2.1:4000 -> 10.96.0.80:80 (shop/web)  [shunt_in_eth on eth0, refused]"
        );
        let line = serde_json::to_value(TraceRecord::TraceEvent(refused)).expect("JSON");
        assert_eq!((&line["kind"], &line["verdict"]), (&"TraceEvent".into(), &"refused".into()));
    }
}
