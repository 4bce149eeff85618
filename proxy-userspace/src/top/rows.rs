//! The rows of the tables, as JSON has them, and as cells.

use serde::{Deserialize, Serialize};

use super::{
    Key, View,
    rates::{as_f64, short, short_or_dash},
};
use crate::{
    inspect::{Counts, EndpointRow, NamedPort, Row},
    kernel::bpf::programs::ProgramRuns,
};

/// A row of a live table.
pub trait TopRow: Row {
    /// Returns the value of a cell for sorting.
    fn key(&self, column: usize) -> Key<'_>;

    /// Returns true if a name or address in the row contains a text in lower case.
    fn contains(&self, text: &str) -> bool;

    /// Returns what stays the same in the next reading.
    fn id(&self) -> String;
}

/// The rows of one view.
#[derive(Clone, Debug)]
pub enum Rows {
    /// Of [`View::Services`].
    Services(Vec<ServiceRate>),
    /// Of [`View::Endpoints`].
    Endpoints(Vec<EndpointLoad>),
    /// Of [`View::Maps`].
    Maps(Vec<MapRow>),
    /// Of [`View::Programs`].
    Programs(Vec<ProgramLoad>),
}

impl Rows {
    /// Returns no rows.
    pub const fn none(view: View) -> Self {
        match view {
            View::Services => Self::Services(Vec::new()),
            View::Endpoints => Self::Endpoints(Vec::new()),
            View::Maps => Self::Maps(Vec::new()),
            View::Programs => Self::Programs(Vec::new()),
        }
    }

    /// Returns the view.
    pub const fn view(&self) -> View {
        match self {
            Self::Services(_) => View::Services,
            Self::Endpoints(_) => View::Endpoints,
            Self::Maps(_) => View::Maps,
            Self::Programs(_) => View::Programs,
        }
    }
}

/// What happens at a service port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRate {
    /// The service port. All names are empty for those that have no counts of their own.
    #[serde(flatten)]
    pub port: NamedPort,
    /// Endpoints that some client may get.
    pub eligible_endpoints: Option<usize>,
    /// All endpoints.
    pub total_endpoints: Option<usize>,
    /// What happened a second. `None` where the mode does not count this service port.
    pub per_second: Option<Rates>,
    /// What was counted until now.
    pub counts: Option<Counts>,
}

/// What happened a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// Connections, and flows of datagrams.
    pub connections: f64,
    /// Connections that were refused. `None` where the mode does not count them.
    pub refusals: Option<f64>,
    /// Packets that were dropped. `None` where the mode does not count them.
    pub drops: Option<f64>,
    /// Bytes to endpoints, of packets that came in on links.
    pub bytes_to_endpoints: f64,
    /// Bytes to clients.
    pub bytes_to_clients: f64,
}

impl ServiceRate {
    /// The index of the column of connections a second.
    pub(super) const CONNECTIONS: usize = 5;
    pub(super) const NAMES: &'static [&'static str] = Self::COLUMNS.0;

    fn rate(&self, column: usize) -> Option<f64> {
        let rates = self.per_second.as_ref()?;
        match column {
            Self::CONNECTIONS => Some(rates.connections),
            6 => rates.refusals,
            7 => rates.drops,
            8 => Some(rates.bytes_to_endpoints),
            9 => Some(rates.bytes_to_clients),
            _ => None,
        }
    }

    fn count(&self, column: usize) -> Option<u64> {
        let counts = self.counts.as_ref()?;
        match column {
            10 => Some(counts.connections),
            11 => counts.refusals,
            12 => counts.drops,
            _ => None,
        }
    }
}

impl Row for ServiceRate {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) = (
        &[
            "NAMESPACE",
            "NAME",
            "PORT",
            "PROTOCOL",
            "ENDPOINTS",
            "CONN/S",
            "REFUSED/S",
            "DROPPED/S",
            "IN B/S",
            "OUT B/S",
            "CONNECTIONS",
            "REFUSED",
            "DROPPED",
        ],
        &["FAMILY"],
    );

    fn cells(&self) -> Vec<String> {
        let NamedPort { namespace, name, port_name, protocol, .. } = &self.port;
        let endpoints = self.eligible_endpoints.zip(self.total_endpoints);
        let is_sum = namespace.is_empty();
        let mut cells = vec![
            or_dash(namespace),
            if is_sum { OTHERS.to_owned() } else { name.clone() },
            or_dash(port_name),
            or_dash(protocol),
            endpoints.map_or_else(|| "-".to_owned(), |(eligible, total)| format!("{eligible}/{total}")),
        ];
        cells.extend((5..10).map(|column| short_or_dash(self.rate(column))));
        cells.extend((10..13).map(|column| short_or_dash(self.count(column).map(as_f64))));
        cells
    }

    fn wide_cells(&self) -> Vec<String> {
        vec![or_dash(&self.port.family)]
    }
}

/// What stands for the service ports that have no counts of their own.
const OTHERS: &str = "(others)";

impl TopRow for ServiceRate {
    fn key(&self, column: usize) -> Key<'_> {
        let NamedPort { namespace, name, port_name, protocol, .. } = &self.port;
        match column {
            0 => Key::Text(namespace),
            1 => Key::Text(name),
            2 => Key::Text(port_name),
            3 => Key::Text(protocol),
            4 => Key::Number(self.eligible_endpoints.map(|count| as_f64(count as u64))),
            5..10 => Key::Number(self.rate(column)),
            _ => Key::Number(self.count(column).map(as_f64)),
        }
    }

    fn contains(&self, text: &str) -> bool {
        let NamedPort { namespace, name, port_name, .. } = &self.port;
        match text.split_once('/') {
            Some((of, rest)) => namespace.ends_with(of) && name.starts_with(rest),
            None => [namespace, name, port_name].iter().any(|part| part.contains(text)),
        }
    }

    fn id(&self) -> String {
        let NamedPort { namespace, name, port_name, protocol, family } = &self.port;
        format!("{namespace}/{name}:{port_name}/{protocol}/{family}")
    }
}

/// An endpoint of a Service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndpointLoad {
    /// The endpoint.
    #[serde(flatten)]
    pub endpoint: EndpointRow,
    /// The flows to it through this Service that links translate and that neither side has
    /// closed.
    pub flows: u64,
}

impl EndpointLoad {
    /// The index of the column of flows.
    pub(super) const FLOWS: usize = 5;
    pub(super) const NAMES: &'static [&'static str] = Self::COLUMNS.0;

    /// Returns the cells of `shunt get endpoints` in these columns.
    fn texts(&self) -> [String; 7] {
        let mut cells = self.endpoint.cells();
        let mut take = |index: usize| std::mem::take(&mut cells[index]);
        [take(2), take(3), take(4), take(5), take(6), take(7), take(8)]
    }
}

impl Row for EndpointLoad {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&["PORT", "PROTOCOL", "ADDRESS", "NODE", "STATE", "FLOWS", "USED", "REASON"], &[]);

    fn cells(&self) -> Vec<String> {
        let [port, protocol, address, node, state, used, reason] = self.texts();
        vec![port, protocol, address, node, state, self.flows.to_string(), used, reason]
    }
}

impl TopRow for EndpointLoad {
    fn key(&self, column: usize) -> Key<'_> {
        match column {
            0 => Key::Text(&self.endpoint.port.port_name),
            1 => Key::Text(&self.endpoint.port.protocol),
            3 => Key::Text(self.endpoint.node.as_deref().unwrap_or_default()),
            Self::FLOWS => Key::Number(Some(as_f64(self.flows))),
            2 => Key::Address(self.endpoint.address),
            4 => Key::Text(self.endpoint.conditions.name()),
            6 => Key::Text(self.endpoint.used()),
            _ => Key::Text(self.endpoint.reason().unwrap_or_default()),
        }
    }

    fn contains(&self, text: &str) -> bool {
        self.texts().iter().any(|cell| cell.to_lowercase().contains(text))
    }

    fn id(&self) -> String {
        let NamedPort { port_name, protocol, .. } = &self.endpoint.port;
        format!("{port_name}/{protocol}/{}", self.endpoint.address)
    }
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapRow {
    /// The name.
    pub name: String,
    /// The number of entries.
    pub entries: usize,
    /// The maximum number of entries.
    pub capacity: u32,
    /// The share of them that is used, in percent.
    pub fill_percent: f64,
}

impl MapRow {
    /// The index of the column of the fill.
    pub(super) const FILL: usize = 3;
    pub(super) const NAMES: &'static [&'static str] = Self::COLUMNS.0;
}

impl Row for MapRow {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&["MAP", "ENTRIES", "CAPACITY", "FILL %"], &[]);

    fn cells(&self) -> Vec<String> {
        let fill = format!("{:.1}", self.fill_percent);
        vec![self.name.clone(), self.entries.to_string(), self.capacity.to_string(), fill]
    }
}

impl TopRow for MapRow {
    fn key(&self, column: usize) -> Key<'_> {
        match column {
            0 => Key::Text(&self.name),
            1 => Key::Number(Some(as_f64(self.entries as u64))),
            2 => Key::Number(Some(self.capacity.into())),
            _ => Key::Number(Some(self.fill_percent)),
        }
    }

    fn contains(&self, text: &str) -> bool {
        self.name.contains(text)
    }

    fn id(&self) -> String {
        self.name.clone()
    }
}

/// What a program costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgramLoad {
    /// The name in the kernel.
    pub name: String,
    /// The id.
    pub id: u32,
    /// How often it ran a second. `None` until there are two readings.
    pub runs_per_second: Option<f64>,
    /// The mean time of a run. `None` if it did not run.
    pub nanoseconds_per_run: Option<f64>,
    /// Its share of one CPU.
    pub cpu_percent: Option<f64>,
    /// How often it ran while statistics were on.
    pub runs: u64,
}

impl ProgramLoad {
    /// The index of the column of CPU time.
    pub(super) const CPU: usize = 4;
    pub(super) const NAMES: &'static [&'static str] = Self::COLUMNS.0;
}

impl From<ProgramRuns> for ProgramLoad {
    fn from(ProgramRuns { id, name, runs, .. }: ProgramRuns) -> Self {
        Self { name, id, runs_per_second: None, nanoseconds_per_run: None, cpu_percent: None, runs }
    }
}

impl Row for ProgramLoad {
    const COLUMNS: (&'static [&'static str], &'static [&'static str]) =
        (&["PROGRAM", "ID", "RUNS/S", "NS/RUN", "CPU %", "RUNS"], &[]);

    fn cells(&self) -> Vec<String> {
        let percent = self.cpu_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.2}"));
        vec![
            self.name.clone(),
            self.id.to_string(),
            short_or_dash(self.runs_per_second),
            short_or_dash(self.nanoseconds_per_run),
            percent,
            short(as_f64(self.runs)),
        ]
    }
}

impl TopRow for ProgramLoad {
    fn key(&self, column: usize) -> Key<'_> {
        match column {
            0 => Key::Text(&self.name),
            1 => Key::Number(Some(self.id.into())),
            2 => Key::Number(self.runs_per_second),
            3 => Key::Number(self.nanoseconds_per_run),
            4 => Key::Number(self.cpu_percent),
            _ => Key::Number(Some(as_f64(self.runs))),
        }
    }

    fn contains(&self, text: &str) -> bool {
        self.name.contains(text)
    }

    fn id(&self) -> String {
        self.id.to_string()
    }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}
