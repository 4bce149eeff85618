//! The benchmark: what a Service costs against a direct connection, what a change costs, and what the proxy holds in memory.
//!
//! A time on one machine says little about another, so the data path is measured in ratios of rounds that are a few tens of
//! milliseconds apart, and the change path in counts beside its times.

mod changes;
mod cluster;
mod foreign;
mod load;
mod memory;
mod paths;
pub mod protocol;
mod ratio;
mod report;
mod targets;

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use self::protocol::BenchResponse;
pub use self::{
    paths::Path,
    protocol::{BenchRequest, Workload},
    report::Report,
};
use crate::{
    apiserver::ApiServer,
    runner::{IptablesVariant, Manifests, Proxy},
    world::{Host, World},
};

/// What to measure, and for how long.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The proxy's binary.
    pub shunt: PathBuf,
    /// Its mode.
    pub mode: String,
    /// The iptables that the node shows to use.
    pub iptables: Option<IptablesVariant>,
    /// Numbers of Services to measure with; one measurement of everything for each.
    pub services: Vec<usize>,
    /// What of it all to measure.
    pub parts: Vec<Part>,
    /// Ways to a Service that the data path is measured by.
    pub paths: Vec<Path>,
    /// What it is measured with.
    pub workloads: Vec<Workload>,
    /// How much time to spend.
    pub effort: Effort,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Connections and conversations through Services against direct ones.
    Data,
    /// Routed traffic with the proxy against without.
    Foreign,
    /// ChangeRequest and the first sync.
    Changes,
    /// The process's memory.
    Memory,
}

/// How often each thing is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Pairs of rounds, direct and through the Service, a workload and path.
    pub pairs: usize,
    /// Milliseconds of a round.
    pub round_ms: u64,
    /// How often the proxy is started and removed around traffic that is none of its own.
    pub turns: usize,
    /// ChangeRequest of one endpoint, and as many of one Service.
    pub changes: usize,
}

impl Effort {
    /// Enough for differences of half a percent on a quiet machine.
    pub const FULL: Self = Self { pairs: 60, round_ms: 50, turns: 8, changes: 500 };
    /// Enough to see that all of it works.
    pub const QUICK: Self = Self { pairs: 10, round_ms: 30, turns: 2, changes: 100 };
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Data, Self::Foreign, Self::Changes, Self::Memory];

    const fn name(self) -> &'static str {
        match self {
            Self::Data => "data path",
            Self::Foreign => "traffic that is none of the proxy's",
            Self::Changes => "change path",
            Self::Memory => "memory",
        }
    }
}

impl Bench {
    /// Measures everything; `tell` hears what is being done.
    pub fn run(&self, tell: &mut dyn FnMut(&str)) -> Result<Report> {
        let mut report = Report::new(&self.mode);
        for &services in &self.services {
            for part in &self.parts {
                tell(&format!("{services} Services: {}", part.name()));
                match part {
                    Part::Data => self.data_path(services, &mut report),
                    Part::Foreign => self.foreign(services, &mut report),
                    Part::Changes => self.change_path(services, &mut report),
                    Part::Memory => self.memory(services, &mut report),
                }
                .with_context(|| format!("{services} Services: {}", part.name()))?;
            }
        }
        report.judge();
        Ok(report)
    }

    fn data_path(&self, services: usize, report: &mut Report) -> Result<()> {
        let hosts = [Host::Node1, Host::A1, Host::A2, Host::Client];
        let (mut world, mut proxy) = self.scene(&hosts, services)?;
        paths::serve(&mut world)?;
        // Else the connections of a minute fill the kernel's table, and the rest of the figures are those of a full one.
        world.run(Host::Node1, "sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_time_wait=5")?;
        proxy.start(&mut world)?;
        let what = (&*self.paths, &*self.workloads);
        report.paths.extend(paths::measure(&mut world, services, what, self.effort)?);
        proxy.stop()?;
        proxy.clean_up(&world)
    }

    fn foreign(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.scene(&[Host::Node1, Host::A2, Host::Client], services)?;
        paths::serve(&mut world)?;
        report.foreign.extend(foreign::measure(&mut world, &mut proxy, services, self.effort)?);
        Ok(())
    }

    fn change_path(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, proxy) = self.scene(&[Host::Node1], services)?;
        let request =
            protocol::ChangeRequest { arguments: proxy.arguments().to_vec(), changes: self.effort.changes };
        report.changes.extend(changes::ask(world.agent(Host::Node1)?, services, request)?);
        Ok(())
    }

    fn memory(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.scene(&[Host::Node1], services)?;
        report.memory.push(memory::measure(&mut world, &mut proxy, services, "manifests")?);
        let url = memory::serve_api(world.agent(Host::Node1)?, services)?;
        proxy.watch_api(&url);
        report.memory.push(memory::measure(&mut world, &mut proxy, services, "API")?);
        Ok(())
    }

    /// A world with the proxy ready to be started on a cluster of so many Services.
    fn scene(&self, hosts: &[Host], services: usize) -> Result<(World, Proxy)> {
        let world = World::build(hosts, &std::env::current_exe()?)?;
        self.iptables.map_or(Ok(()), |iptables| iptables.write_hint(&world))?;
        let manifests = Manifests::create(world.directory())?;
        cluster::write(&manifests, services)?;
        let proxy = Proxy::new(&world, &self.shunt, &self.mode, &manifests, &serde_yaml_ng::Mapping::new())?;
        Ok((world, proxy))
    }
}

/// The benchmark's part of an agent.
#[derive(Debug, Default)]
pub struct AgentBench {
    api: Option<ApiServer>,
}

impl AgentBench {
    /// Does what is asked; servers go on meanwhile only where they have threads of their own. Needs a tokio runtime.
    pub fn execute(&mut self, request: BenchRequest) -> BenchResponse {
        let outcome = match request {
            BenchRequest::Serve(ports) => load::serve(&ports).map(|()| BenchResponse::Done),
            BenchRequest::Compare(compare) => load::compare(&compare),
            BenchRequest::Changes(changes) => changes::measure(&changes).map(BenchResponse::Changes),
            BenchRequest::ServeApi(services) => self.serve_api(services).map(BenchResponse::Api),
        };
        outcome.unwrap_or_else(|error| BenchResponse::Failed(format!("{error:#}")))
    }

    fn serve_api(&mut self, services: usize) -> Result<String> {
        let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let server = ApiServer::start_on(tokio::net::TcpListener::from_std(listener)?)?;
        cluster::objects(services).try_for_each(|object| server.put(object).map(drop))?;
        Ok(self.api.insert(server).url())
    }
}
