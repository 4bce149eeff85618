//! Reads what a view shows: from the daemon, and for programs from the kernel.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Change, EndpointLoad, MapRow, ProgramLoad, Rows, ServiceRate, View,
    rates::{as_f64, rounded},
    rows::Rates,
};
use crate::{
    health::{NodeReport, ReportedMap},
    inspect::{
        Client, ClientError, CountedPort, Counts, EndpointRow, Filter, NamedPort, Resource, ServiceName,
        ServiceRow, counts_of_unused, counts_protocol,
    },
    kernel::{
        KernelError,
        bpf::programs::{self, ProgramRuns, RunStatistics},
    },
    mode::Mode,
};

/// How often the list of all service ports is read again. Their counts are read each time.
const LIST_EVERY: Duration = Duration::from_secs(10);
/// How the names of shunt's programs begin.
const PROGRAMS: &str = "shunt_";

/// There is no answer.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// The daemon does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The kernel does not answer.
    #[error("{0} (this needs CAP_SYS_ADMIN)")]
    Kernel(#[source] KernelError),
    /// The mode has no such thing.
    #[error("the mode {mode} has no {view}: only the ebpf mode has them")]
    OnlyEbpf {
        /// The view, in lower case.
        view: String,
        /// The mode that runs.
        mode: String,
    },
    /// The Service is not there.
    #[error("there is no Service {}/{} on this node", .0.namespace, .0.name)]
    NoService(ServiceName),
}

/// The rows of a view, with what the daemon reports about itself.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The report of the daemon.
    pub node: NodeReport,
    /// The rows.
    pub rows: Rows,
    /// There is a reading before, so that the rows have rates.
    pub has_rates: bool,
}

/// Reads again and again, and remembers the last reading.
#[derive(Debug, Default)]
pub struct Sampler {
    ports: Option<(Instant, Vec<KnownPort>)>,
    counts: Option<(Instant, Counted)>,
    runs: Option<(Instant, HashMap<u32, ProgramRuns>)>,
    statistics: Option<RunStatistics>,
}

/// A service port of the list.
#[derive(Clone, Debug)]
pub(super) struct KnownPort {
    pub(super) port: NamedPort,
    pub(super) eligible_endpoints: usize,
    pub(super) total_endpoints: usize,
}

impl Sampler {
    /// Reads the rows of a view. `service` is the Service of [`View::Endpoints`].
    ///
    /// The kernel measures programs only while they are asked for.
    pub async fn sample(&mut self, view: View, service: Option<&ServiceName>) -> Result<Sample, TopError> {
        if view != View::Programs {
            (self.statistics, self.runs) = (None, None);
        }
        let mut client = Client::connect().await?;
        let node = client.node().await?;
        let mode = node.mode.as_deref().unwrap_or("that comes");
        if view.is_of_ebpf() && mode != Mode::Ebpf.name() {
            return Err(TopError::OnlyEbpf { view: view.title().to_lowercase(), mode: mode.to_owned() });
        }
        let has_rates = match view {
            View::Services => self.counts.is_some(),
            View::Programs => self.runs.is_some(),
            View::Endpoints | View::Maps => true,
        };
        let rows = match view {
            View::Services => Rows::Services(self.services(&mut client).await?),
            View::Endpoints => Rows::Endpoints(endpoints(&mut client, service).await?),
            View::Maps => Rows::Maps(maps(&mut client).await?),
            View::Programs => Rows::Programs(self.programs().map_err(TopError::Kernel)?),
        };
        Ok(Sample { node, rows, has_rates })
    }

    async fn services(&mut self, client: &mut Client) -> Result<Vec<ServiceRate>, TopError> {
        let counted = client.counts().await?;
        let now = Instant::now();
        if self.must_list(now, &counted) {
            self.ports = Some((now, list(client).await?));
        }
        let counted: Counted =
            counted.into_iter().map(|counted| (counted.port.unwrap_or_default(), counted.counts)).collect();
        let ports = self.ports.as_ref().map(|(_, ports)| ports.as_slice()).unwrap_or_default();
        let before = self.counts.as_ref().map(|(at, counts)| (now.saturating_duration_since(*at), counts));
        let rows = service_rows(ports, before, &counted);
        self.counts = Some((now, counted));
        Ok(rows)
    }

    /// Returns true if the list is old, or lacks a service port that is counted.
    fn must_list(&self, now: Instant, counted: &[CountedPort]) -> bool {
        let Some((at, ports)) = &self.ports else { return true };
        let known: HashSet<_> = ports.iter().map(|known| &known.port).collect();
        now.saturating_duration_since(*at) >= LIST_EVERY
            || counted.iter().filter_map(|counted| counted.port.as_ref()).any(|port| !known.contains(port))
    }

    fn programs(&mut self) -> Result<Vec<ProgramLoad>, KernelError> {
        if self.statistics.is_none() {
            self.statistics = Some(RunStatistics::enable()?);
        }
        let (now, loaded) = (Instant::now(), programs::loaded(PROGRAMS)?);
        let before = self.runs.take();
        let load = |runs: &ProgramRuns| match &before {
            Some((at, before)) => {
                program_load(before.get(&runs.id), runs, now.saturating_duration_since(*at))
            }
            None => runs.clone().into(),
        };
        let rows = loaded.iter().map(load).collect();
        self.runs = Some((now, loaded.into_iter().map(|runs| (runs.id, runs)).collect()));
        Ok(rows)
    }
}

async fn list(client: &mut Client) -> Result<Vec<KnownPort>, ClientError> {
    let mut ports = Vec::new();
    let each = |row: ServiceRow| {
        let ServiceRow { port, eligible_endpoints, total_endpoints, .. } = row;
        ports.push(KnownPort { port, eligible_endpoints, total_endpoints });
    };
    client.list(Resource::Services, &Filter::default(), each).await?;
    Ok(ports)
}

async fn endpoints(
    client: &mut Client,
    service: Option<&ServiceName>,
) -> Result<Vec<EndpointLoad>, TopError> {
    let Some(service) = service else { return Ok(Vec::new()) };
    let (namespace, name) = (Some(service.namespace.clone()), Some(service.name.clone()));
    let filter = Filter { namespace, name, ..Filter::default() };
    let mut endpoints: Vec<EndpointRow> = Vec::new();
    client.list(Resource::Endpoints, &filter, |row| endpoints.push(row)).await?;
    if endpoints.is_empty() {
        let mut is_there = false;
        client.list(Resource::Services, &filter, |_: ServiceRow| is_there = true).await?;
        return if is_there { Ok(Vec::new()) } else { Err(TopError::NoService(service.clone())) };
    }
    let open = client.open_flows(service).await?.into_iter();
    let open: HashMap<_, _> = open.map(|open| ((open.address, open.protocol), open.flows)).collect();
    let row = |endpoint: EndpointRow| {
        let key = (endpoint.address, endpoint.port.protocol.clone());
        EndpointLoad { flows: open.get(&key).copied().unwrap_or(0), endpoint }
    };
    Ok(endpoints.into_iter().map(row).collect())
}

async fn maps(client: &mut Client) -> Result<Vec<MapRow>, ClientError> {
    let row = |map: ReportedMap| MapRow {
        fill_percent: rounded(100.0 * as_f64(map.entries as u64) / f64::from(map.capacity.max(1))),
        name: map.name,
        entries: map.entries,
        capacity: map.capacity,
    };
    Ok(client.maps().await?.into_iter().map(row).collect())
}

/// The counts of one reading. The empty name stands for the service ports without counts of their
/// own.
pub(super) type Counted = HashMap<NamedPort, Counts>;

/// Returns a row for each service port, from the last reading, with the time since, and from this
/// one.
pub(super) fn service_rows(
    ports: &[KnownPort],
    before: Option<(Duration, &Counted)>,
    now: &Counted,
) -> Vec<ServiceRate> {
    let (nobody, nothing) = (NamedPort::default(), nothing(now));
    let others = now.get(&nobody);
    // The daemon leaves out the service ports that were never used.
    let of_unused = counts_of_unused(now.values(), others);
    let row = |port: &NamedPort, endpoints: Option<&KnownPort>| {
        let of_unused = of_unused.as_ref().filter(|unused| counts_protocol(&port.protocol, unused));
        let counts = now.get(port).or(of_unused);
        let before = before.map(|(elapsed, before)| (elapsed, before.get(port).unwrap_or(&nothing)));
        ServiceRate {
            port: port.clone(),
            eligible_endpoints: endpoints.map(|known| known.eligible_endpoints),
            total_endpoints: endpoints.map(|known| known.total_endpoints),
            per_second: before.zip(counts).and_then(|((elapsed, before), now)| rates(before, now, elapsed)),
            counts: counts.cloned(),
        }
    };
    let mut rows: Vec<_> = ports.iter().map(|known| row(&known.port, Some(known))).collect();
    rows.extend(others.filter(|others| **others != nothing).map(|_| row(&nobody, None)));
    rows
}

/// Returns the counts of a service port that nobody used, with refusals and drops if others have
/// them.
fn nothing(counted: &Counted) -> Counts {
    let has_failures = counted.values().next().is_some_and(|counts| counts.refusals.is_some());
    let failures = has_failures.then_some(0);
    Counts { connections: 0, refusals: failures, drops: failures, bytes_to_endpoints: 0, bytes_to_clients: 0 }
}

/// Returns what happened a second between two readings. `None` if the counts began again.
pub(super) fn rates(before: &Counts, now: &Counts, elapsed: Duration) -> Option<Rates> {
    let rate = |before, now| Change::between(before, now, elapsed).map(Change::per_second);
    Some(Rates {
        connections: rate(before.connections, now.connections)?,
        refusals: before.refusals.zip(now.refusals).and_then(|(before, now)| rate(before, now)),
        drops: before.drops.zip(now.drops).and_then(|(before, now)| rate(before, now)),
        bytes_to_endpoints: rate(before.bytes_to_endpoints, now.bytes_to_endpoints)?,
        bytes_to_clients: rate(before.bytes_to_clients, now.bytes_to_clients)?,
    })
}

/// Returns what a program cost between two readings. One that is new has run since the first of
/// them.
pub(super) fn program_load(
    before: Option<&ProgramRuns>,
    now: &ProgramRuns,
    elapsed: Duration,
) -> ProgramLoad {
    let (runs, time) = before.map_or((0, Duration::ZERO), |before| (before.runs, before.run_time));
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let ran = Change::between(runs, now.runs, elapsed);
    let took = Change::between(nanos(time), nanos(now.run_time), elapsed);
    let each = ran.zip(took).filter(|(ran, _)| ran.difference > 0);
    ProgramLoad {
        runs_per_second: ran.map(Change::per_second),
        nanoseconds_per_run: each
            .map(|(ran, took)| rounded(as_f64(took.difference) / as_f64(ran.difference))),
        cpu_percent: took.map(|took| rounded(took.per_second() / 1e7)),
        ..now.clone().into()
    }
}
