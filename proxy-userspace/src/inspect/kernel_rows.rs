//! The items of the lists that are read from the kernel: flows, connections, affinity and drift.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::rows::{NAMED, NamedPort, Row, or_dash};

/// A flow from a client to an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowRow {
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The client.
    pub client: SocketAddr,
    /// The address of the Service.
    pub vip: SocketAddr,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// The service port that has the address now, as `namespace/name:port`.
    pub service: Option<String>,
    /// `unanswered`, `established`, `closing` or `closed`.
    pub state: String,
    /// `programs` or `netfilter`: what translates it.
    pub by: String,
    /// How long it is kept without packets, in seconds.
    pub expires_seconds: Option<u64>,
    /// How long no packet passed, in seconds. `None` for flows of netfilter.
    pub idle_seconds: Option<u64>,
    /// How long it exists, in seconds. `None` for flows of programs, and unless conntrack has
    /// timestamps.
    pub age_seconds: Option<u64>,
}

impl Row for FlowRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &["PROTOCOL", "CLIENT", "VIP", "ENDPOINT", "SERVICE", "STATE", "EXPIRES"],
        &["IDLE", "AGE", "TRANSLATED BY"],
    );

    fn cells(&self) -> Vec<String> {
        vec![
            self.protocol.clone(),
            self.client.to_string(),
            self.vip.to_string(),
            self.endpoint.to_string(),
            or_dash(self.service.as_deref().unwrap_or_default()),
            self.state.clone(),
            seconds(self.expires_seconds, "never"),
        ]
    }

    fn wide_cells(&self) -> Vec<String> {
        vec![seconds(self.idle_seconds, "-"), seconds(self.age_seconds, "-"), self.by.clone()]
    }
}

/// A connection that was translated at its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionRow {
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// `node`, the addresses of the pod, or the cookie of its network namespace.
    pub owner: String,
    /// The address of the socket.
    pub client: SocketAddr,
    /// Where the process connected to. `None` for connected UDP sockets.
    pub vip: Option<SocketAddr>,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// The service port that has the address now, as `namespace/name:port`.
    pub service: Option<String>,
    /// The state of the socket, as ss(8) calls it.
    pub state: String,
}

impl Row for ConnectionRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&["PROTOCOL", "OWNER", "CLIENT", "VIP", "ENDPOINT", "SERVICE", "STATE"], &[]);

    fn cells(&self) -> Vec<String> {
        vec![
            self.protocol.clone(),
            self.owner.clone(),
            self.client.to_string(),
            self.vip.map_or("-".to_owned(), |vip| vip.to_string()),
            self.endpoint.to_string(),
            or_dash(self.service.as_deref().unwrap_or_default()),
            self.state.clone(),
        ]
    }
}

/// A client whose next connection to a service port goes to the same endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AffinityRow {
    /// The service port.
    #[serde(flatten)]
    pub port: NamedPort,
    /// The address; for sockets `node`, the addresses of the pod, or the cookie of its namespace.
    pub client: String,
    /// `packets` with this source address, or `sockets` of this network namespace.
    pub of: String,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// How long, if the client does not connect again, in seconds. `None` if that is not known.
    pub remaining_seconds: Option<u64>,
}

impl Row for AffinityRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&[NAMED[0], NAMED[1], NAMED[2], NAMED[3], "CLIENT", "ENDPOINT", "REMAINING"], &["CLIENT'S"]);

    fn cells(&self) -> Vec<String> {
        let mut cells = self.port.cells();
        cells.extend([self.client.clone(), self.endpoint.to_string(), seconds(self.remaining_seconds, "-")]);
        cells
    }

    fn wide_cells(&self) -> Vec<String> {
        vec![self.of.clone()]
    }
}

/// Something that the kernel holds otherwise than it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriftRow {
    /// The service port. `None` for what all share.
    #[serde(flatten)]
    pub port: Option<NamedPort>,
    /// What differs.
    pub difference: String,
    /// Nothing was compared, because an IP family fails. `difference` says which one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_compared: bool,
}

impl Row for DriftRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&[NAMED[0], NAMED[1], NAMED[2], NAMED[3], "DIFFERENCE"], &[]);

    fn cells(&self) -> Vec<String> {
        let of_all = || NAMED.map(|_| or_dash("")).to_vec();
        let mut cells = self.port.as_ref().map_or_else(of_all, NamedPort::cells);
        cells.push(self.difference.clone());
        cells
    }
}

fn seconds(value: Option<u64>, none: &str) -> String {
    value.map_or(none.to_owned(), |seconds| format!("{seconds}s"))
}
