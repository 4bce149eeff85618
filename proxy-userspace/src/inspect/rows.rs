//! The items of the lists, as JSON has them, and as rows of a table.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// An item of a list.
pub trait Row: Serialize + DeserializeOwned + Send + 'static {
    /// The columns of a table, and then those that only `-o wide` has.
    const COLUMNS: (&'static [&'static str], &'static [&'static str]);

    /// Returns a cell for each column.
    fn cells(&self) -> Vec<String>;

    /// Returns a cell for each column of `-o wide`.
    fn wide_cells(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The name of a service port in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamedPort {
    /// The namespace.
    pub namespace: String,
    /// The name of the Service.
    pub name: String,
    /// The name of the port; may be empty.
    pub port_name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
}

impl NamedPort {
    pub(super) fn cells(&self) -> Vec<String> {
        [&self.namespace, &self.name, &self.port_name, &self.protocol].map(|cell| or_dash(cell)).to_vec()
    }
}

pub(super) const NAMED: [&str; 4] = ["NAMESPACE", "NAME", "PORT", "PROTOCOL"];

/// A service port in one family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRow {
    /// The service port.
    #[serde(flatten)]
    pub port: NamedPort,
    /// Addresses with ports, with the kind of each.
    pub addresses: Vec<ServedAddress>,
    /// `internalTrafficPolicy`.
    pub internal_traffic_policy: String,
    /// `externalTrafficPolicy`.
    pub external_traffic_policy: String,
    /// The timeout of `ClientIP` affinity.
    pub affinity_seconds: Option<u32>,
    /// How clients from outside get an endpoint: `random` or `maglev`.
    #[serde(default)]
    pub balance: String,
    /// Source ranges of load-balancer addresses.
    pub source_ranges: Vec<String>,
    /// Endpoints that some client may get.
    pub eligible_endpoints: usize,
    /// All endpoints.
    pub total_endpoints: usize,
    /// What was counted. `None` where the mode does not count this service port.
    pub counts: Option<Counts>,
    /// When it was last programmed (RFC 3339). `None` if it waits, or is left out.
    pub programmed: Option<String>,
    /// Why it is left out.
    pub left_out: Option<String>,
    /// What the kernel holds otherwise than it was written. `None` if it was not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<Vec<String>>,
}

/// An address at which clients reach a service port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServedAddress {
    /// `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancerIP`.
    pub kind: String,
    /// `address:port`; a node port has `*` as its address.
    pub address: String,
}

/// Counts of a service port since shunt counts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// Connections, and flows of datagrams.
    pub connections: u64,
    /// Connections that were refused. `None` where the mode does not count them.
    pub refusals: Option<u64>,
    /// Packets that were dropped. `None` where the mode does not count them.
    pub drops: Option<u64>,
    /// Bytes to endpoints, of packets that came in on links.
    pub bytes_to_endpoints: u64,
    /// Bytes to clients.
    pub bytes_to_clients: u64,
}

const SERVICE_COLUMNS: [&str; 10] = [
    NAMED[0],
    NAMED[1],
    NAMED[2],
    NAMED[3],
    "ADDRESSES",
    "ENDPOINTS",
    "CONNECTIONS",
    "REFUSED",
    "DROPPED",
    "STATE",
];

impl Row for ServiceRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &SERVICE_COLUMNS,
        &[
            "INTERNAL",
            "EXTERNAL",
            "AFFINITY",
            "BALANCE",
            "SOURCE RANGES",
            "BYTES IN",
            "BYTES OUT",
            "PROGRAMMED",
        ],
    );

    fn cells(&self) -> Vec<String> {
        let count = |of: fn(&Counts) -> Option<u64>| number(self.counts.as_ref().and_then(of));
        let addresses: Vec<_> = self.addresses.iter().map(|served| served.address.as_str()).collect();
        let state = match (&self.left_out, &self.programmed) {
            (Some(reason), _) => format!("left out: {reason}"),
            (None, Some(_)) => match self.drift.as_deref() {
                None => "programmed".to_owned(),
                Some([]) => "programmed, no drift".to_owned(),
                Some([only]) => format!("drift: {only}"),
                Some([first, more @ ..]) => format!("drift: {first}, and {} more", more.len()),
            },
            (None, None) => "waiting".to_owned(),
        };
        let mut cells = self.port.cells();
        cells.extend([
            or_dash(&addresses.join(",")),
            format!("{}/{}", self.eligible_endpoints, self.total_endpoints),
            count(|counts| Some(counts.connections)),
            count(|counts| counts.refusals),
            count(|counts| counts.drops),
            state,
        ]);
        cells
    }

    fn wide_cells(&self) -> Vec<String> {
        let count = |of: fn(&Counts) -> u64| number(self.counts.as_ref().map(of));
        vec![
            self.internal_traffic_policy.clone(),
            self.external_traffic_policy.clone(),
            self.affinity_seconds.map_or("-".to_owned(), |seconds| format!("{seconds}s")),
            or_dash(&self.balance),
            or_dash(&self.source_ranges.join(",")),
            count(|counts| counts.bytes_to_endpoints),
            count(|counts| counts.bytes_to_clients),
            or_dash(self.programmed.as_deref().unwrap_or_default()),
        ]
    }
}

/// An endpoint of a service port, used or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRow {
    /// The service port.
    #[serde(flatten)]
    pub port: NamedPort,
    /// Address and port.
    pub address: SocketAddr,
    /// The node.
    pub node: Option<String>,
    /// It is on this node.
    pub local: bool,
    /// `conditions`.
    pub conditions: Conditions,
    /// Zones of its hints.
    pub zones: Vec<String>,
    /// Nodes of its hints.
    pub nodes: Vec<String>,
    /// Some client may get it.
    pub eligible: bool,
    /// Why policy `Cluster` leaves it out.
    pub not_for_cluster: Option<String>,
    /// Why policy `Local` leaves it out.
    pub not_for_local: Option<String>,
}

/// The conditions of an endpoint, as in its EndpointSlice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// It takes new connections.
    pub ready: bool,
    /// It answers, also while it terminates.
    pub serving: bool,
    /// It ends.
    pub terminating: bool,
}

impl Conditions {
    /// Returns the state in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self { ready: true, .. } => "ready",
            Self { serving: true, terminating: true, .. } => "terminating, serves",
            Self { terminating: true, .. } => "terminating",
            _ => "not ready",
        }
    }
}

impl EndpointRow {
    /// Returns `yes`, `no`, or the policy whose clients alone may get it.
    pub const fn used(&self) -> &'static str {
        match (self.eligible, &self.not_for_cluster, &self.not_for_local) {
            (false, ..) => "no",
            (true, None, None) => "yes",
            (true, None, Some(_)) => "policy Cluster",
            (true, Some(_), _) => "policy Local",
        }
    }

    /// Returns why it is not used, at least by one policy.
    pub fn reason(&self) -> Option<&str> {
        self.not_for_cluster.as_deref().or(self.not_for_local.as_deref())
    }
}

impl Row for EndpointRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &[NAMED[0], NAMED[1], NAMED[2], NAMED[3], "ADDRESS", "NODE", "STATE", "USED", "REASON"],
        &["ZONES", "HINTED NODES"],
    );

    fn cells(&self) -> Vec<String> {
        let node = self.node.as_deref().unwrap_or_default();
        let mut cells = self.port.cells();
        cells.extend([
            self.address.to_string(),
            if self.local { format!("{node} (this)") } else { or_dash(node) },
            self.conditions.name().to_owned(),
            self.used().to_owned(),
            or_dash(self.reason().unwrap_or_default()),
        ]);
        cells
    }

    fn wide_cells(&self) -> Vec<String> {
        vec![or_dash(&self.zones.join(",")), or_dash(&self.nodes.join(","))]
    }
}

/// A link on which packets are translated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkRow {
    /// The name.
    pub name: String,
    /// The interface index.
    pub index: u32,
    /// `ethernet` or `ip`: the header with which packets begin.
    pub header: String,
    /// What translates what comes in: `programs`, `direct`, `netfilter`, or why it is not served.
    pub path: String,
    /// `generic` or `native`: where the XDP program runs, if the link gets one.
    pub xdp: Option<String>,
    /// What comes in is from a local pod, where local detection is by links.
    pub local: bool,
    /// The bridge of which it is a port has this address.
    pub bridge: Option<String>,
}

impl Row for LinkRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&["NAME", "INDEX", "HEADER", "PATH"], &["XDP", "LOCAL", "BRIDGE"]);

    fn cells(&self) -> Vec<String> {
        vec![self.name.clone(), self.index.to_string(), self.header.clone(), self.path.clone()]
    }

    fn wide_cells(&self) -> Vec<String> {
        let local = if self.local { "yes" } else { "no" };
        let [xdp, bridge] =
            [&self.xdp, &self.bridge].map(|cell| or_dash(cell.as_deref().unwrap_or_default()));
        vec![xdp, local.to_owned(), bridge]
    }
}

/// A pod whose sockets are left alone, because it redirects its own packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExemptRow {
    /// An address of such a pod.
    pub address: String,
}

impl Row for ExemptRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (&["ADDRESS"], &[]);

    fn cells(&self) -> Vec<String> {
        vec![self.address.clone()]
    }
}

/// A service port that is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeftOutRow {
    /// The service port.
    #[serde(flatten)]
    pub port: NamedPort,
    /// `map-full`, `protocol` or `rejected`.
    pub reason: String,
    /// The error, and what may help.
    pub message: String,
}

impl Row for LeftOutRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&[NAMED[0], NAMED[1], NAMED[2], NAMED[3], "FAMILY", "REASON", "MESSAGE"], &[]);

    fn cells(&self) -> Vec<String> {
        let mut cells = self.port.cells();
        cells.extend([self.port.family.clone(), self.reason.clone(), self.message.clone()]);
        cells
    }
}

pub(super) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

fn number(value: Option<u64>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}
