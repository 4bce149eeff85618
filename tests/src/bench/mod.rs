//! The benchmark: the cost of a Service compared with a direct connection, the cost of a change,
//! and the memory of the proxy.
//!
//! A time on one machine says little about another machine. The data path is therefore measured as
//! ratios of rounds that are a few tens of milliseconds apart, and the change path also as the
//! number of kernel changes.

mod changes;
mod cluster;
mod floods;
mod floor;
mod foreign;
mod kernel_maps;
mod load;
mod maglev;
mod memory;
mod outside;
mod packets;
mod paths;
pub mod protocol;
mod ratio;
mod report;
mod restart;
mod rollout;
mod targets;
mod time_wait;
mod way;

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use self::protocol::BenchResponse;
pub use self::{
    paths::Path,
    protocol::{BenchRequest, Workload},
    report::Report,
    targets::sizes,
    way::Way,
};
use crate::{
    runner::{Cluster, IptablesVariant, Manifests, Proxy},
    world::{Host, World},
};

/// What to measure, and how thoroughly.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The binary of the proxy.
    pub shunt: PathBuf,
    /// The mode of the proxy.
    pub mode: String,
    /// The iptables variant that the node signals to use.
    pub iptables: Option<IptablesVariant>,
    /// The numbers of Services. Everything is measured once for each.
    pub services: Vec<usize>,
    /// The parts to measure.
    pub parts: Vec<Part>,
    /// The paths of the data path to measure.
    pub paths: Vec<Path>,
    /// The ways of traffic from outside to measure.
    pub ways: Vec<Way>,
    /// The workloads for the data path.
    pub workloads: Vec<Workload>,
    /// The number of repetitions.
    pub effort: Effort,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Connections and conversations through Services, compared with direct ones.
    Data,
    /// Traffic from outside, compared with clean connections of the same length.
    Outside,
    /// Short connections from outside to endpoints that keep closed connections in `TIME_WAIT`.
    TimeWait,
    /// Packets a second of one core, of traffic from outside.
    Packets,
    /// Maglev tables of many Services.
    Maglev,
    /// Foreign (routed) traffic with the proxy, compared with the traffic without it.
    Foreign,
    /// Changes and the first sync.
    Changes,
    /// The memory of the process, and of its maps in the kernel.
    Memory,
    /// Restarts with nothing changed.
    Restart,
    /// Floods of packets with forged sources.
    Floods,
    /// All endpoints of a large Service replaced, one after the other.
    Rollout,
}

/// The number of repetitions of each measurement.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Pairs of rounds, direct and through the Service, for each workload and path.
    pub pairs: usize,
    /// The duration of a round in milliseconds.
    pub round_ms: u64,
    /// How often the proxy is started and removed while foreign traffic is measured.
    pub turns: usize,
    /// The number of changes of one endpoint, and of changes of one Service.
    pub changes: usize,
    /// The number of packets of a flood.
    pub flood: u32,
    /// The number of endpoints of the Service that is rolled out.
    pub rollout: usize,
    /// The number of restarts.
    pub restarts: usize,
}

impl Effort {
    /// Enough for differences of half a percent on a quiet machine.
    pub const FULL: Self = Self {
        pairs: 60,
        round_ms: 50,
        turns: 8,
        changes: 500,
        flood: 10_000_000,
        rollout: 5_000,
        restarts: 5,
    };
    /// Enough to see that everything works.
    pub const QUICK: Self =
        Self { pairs: 10, round_ms: 30, turns: 2, changes: 100, flood: 200_000, rollout: 500, restarts: 2 };
}

/// How a part is measured.
enum Measurement {
    /// With Services of its own.
    Once(fn(&Bench, &mut Report) -> Result<()>),
    /// For each number of Services.
    OfServices(fn(&Bench, usize, &mut Report) -> Result<()>),
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 11] = [
        Self::Data,
        Self::Outside,
        Self::TimeWait,
        Self::Packets,
        Self::Maglev,
        Self::Foreign,
        Self::Changes,
        Self::Memory,
        Self::Restart,
        Self::Floods,
        Self::Rollout,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Data => "data path",
            Self::Outside => "traffic from outside",
            Self::TimeWait => "endpoints with TIME_WAIT",
            Self::Packets => "packets a second",
            Self::Maglev => "Maglev tables",
            Self::Foreign => "foreign traffic",
            Self::Changes => "change path",
            Self::Memory => "memory",
            Self::Restart => "restart",
            Self::Floods => "floods",
            Self::Rollout => "rollout",
        }
    }

    fn measurement(self) -> Measurement {
        match self {
            Self::Data => Measurement::OfServices(Bench::data_path),
            Self::Outside => Measurement::Once(Bench::outside),
            Self::TimeWait => Measurement::Once(Bench::time_wait),
            Self::Packets => Measurement::Once(Bench::packets),
            Self::Maglev => Measurement::Once(Bench::maglev),
            Self::Foreign => Measurement::OfServices(Bench::foreign),
            Self::Changes => Measurement::OfServices(Bench::change_path),
            Self::Memory => Measurement::OfServices(Bench::memory),
            Self::Restart => Measurement::OfServices(Bench::restart),
            Self::Floods => Measurement::Once(Bench::floods),
            Self::Rollout => Measurement::Once(Bench::rollout),
        }
    }
}

impl Bench {
    /// Measures everything. `progress` receives a line before each step.
    pub fn run(&self, progress: &mut dyn FnMut(&str)) -> Result<Report> {
        let mut report = Report::new(&self.mode);
        for part in &self.parts {
            match part.measurement() {
                Measurement::Once(measure) => {
                    progress(part.name());
                    measure(self, &mut report).context(part.name())?;
                }
                Measurement::OfServices(measure) => {
                    for &services in &self.services {
                        let what = format!("{services} Services: {}", part.name());
                        progress(&what);
                        measure(self, services, &mut report).context(what)?;
                    }
                }
            }
        }
        report.check_targets(self);
        Ok(report)
    }

    fn data_path(&self, services: usize, report: &mut Report) -> Result<()> {
        let hosts = [Host::Node1, Host::A1, Host::A2, Host::Client];
        let (mut world, mut proxy) = self.prepare(&hosts, services)?;
        paths::serve(&mut world)?;
        paths::forget_closed_connections(&world)?;
        proxy.start(&mut world)?;
        let (of_kernel, served): (Vec<Path>, Vec<Path>) =
            self.paths.iter().partition(|path| path.is_of_kernel());
        let measure = |world: &mut World, paths: &[Path]| {
            paths::measure(world, services, (paths, &self.workloads), self.effort)
        };
        report.paths.extend(measure(&mut world, &served)?);
        proxy.stop()?;
        proxy.clean_up(&world)?;
        paths::add_kernel_nat(&world)?;
        report.paths.extend(measure(&mut world, &of_kernel)?);
        Ok(())
    }

    fn foreign(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.prepare(&[Host::Node1, Host::A2, Host::Client], services)?;
        paths::serve(&mut world)?;
        let load = (&*self.workloads, self.effort);
        report.foreign.extend(foreign::measure(&mut world, &mut proxy, services, load)?);
        Ok(())
    }

    fn change_path(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, proxy) = self.prepare(&[Host::Node1], services)?;
        let request =
            protocol::ChangeRequest { arguments: proxy.arguments().to_vec(), changes: self.effort.changes };
        report.changes.extend(changes::measure_in_agent(world.agent(Host::Node1)?, services, request)?);
        Ok(())
    }

    fn outside(&self, report: &mut Report) -> Result<()> {
        let (mut world, manifests, mut proxy) = self.build_with_manifests(&outside::HOSTS, outside::place)?;
        let fields = serde_yaml_ng::Mapping::new();
        let mut other = Proxy::new(Host::Node2, &world, &self.shunt, &self.mode, &manifests, &fields)?;
        let proxies = (&mut proxy, &mut other);
        report.outside = outside::measure(&mut world, proxies, (&self.ways, &self.workloads), self.effort)?;
        Ok(())
    }

    fn time_wait(&self, report: &mut Report) -> Result<()> {
        for &way in self.ways.iter().filter(|way| way.masquerades()) {
            let (mut world, mut proxy) = self.build(&outside::HOSTS, outside::place)?;
            report.time_wait.extend(time_wait::measure(&mut world, &mut proxy, way, self.effort)?);
        }
        Ok(())
    }

    fn packets(&self, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.build(&outside::HOSTS, packets::place)?;
        (report.packets, report.new_flows) =
            packets::measure(&mut world, &mut proxy, &self.ways, self.effort)?;
        Ok(())
    }

    fn maglev(&self, report: &mut Report) -> Result<()> {
        let (mut world, manifests, mut proxy) = self.build_with_manifests(&[Host::Node1], maglev::place)?;
        report.maglev = Some(maglev::measure(&mut world, &mut proxy, &manifests)?);
        Ok(())
    }

    fn floods(&self, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.build(&floods::HOSTS, floods::place)?;
        report.floods = floods::measure(&mut world, &mut proxy, self.effort.flood)?;
        Ok(())
    }

    fn rollout(&self, report: &mut Report) -> Result<()> {
        let mut world = World::build(&rollout::HOSTS, &std::env::current_exe()?)?;
        self.iptables.map_or(Ok(()), |iptables| iptables.write_hint(&world))?;
        report.rollout = Some(rollout::measure(&mut world, &self.shunt, &self.mode, self.effort.rollout)?);
        Ok(())
    }

    fn memory(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.prepare(&[Host::Node1], services)?;
        report.memory.push(memory::measure(&mut world, &mut proxy, services, memory::MANIFESTS)?);
        let _api = watch_api(&world, &mut proxy, services)?;
        report.memory.push(memory::measure(&mut world, &mut proxy, services, memory::API)?);
        Ok(())
    }

    fn restart(&self, services: usize, report: &mut Report) -> Result<()> {
        let (mut world, mut proxy) = self.build(&[Host::Node1], |_| Ok(()))?;
        let _api = watch_api(&world, &mut proxy, services)?;
        report.restarts.push(restart::measure(&mut world, &mut proxy, services, self.effort.restarts)?);
        Ok(())
    }

    /// Returns a world with a cluster of this number of Services, and a proxy that is ready to
    /// start.
    fn prepare(&self, hosts: &[Host], services: usize) -> Result<(World, Proxy)> {
        self.build(hosts, |manifests| cluster::write(manifests, services))
    }

    fn build(&self, hosts: &[Host], place: impl FnOnce(&Manifests) -> Result<()>) -> Result<(World, Proxy)> {
        let (world, _, proxy) = self.build_with_manifests(hosts, place)?;
        Ok((world, proxy))
    }

    fn build_with_manifests(
        &self,
        hosts: &[Host],
        place: impl FnOnce(&Manifests) -> Result<()>,
    ) -> Result<(World, Manifests, Proxy)> {
        let world = World::build(hosts, &std::env::current_exe()?)?;
        self.iptables.map_or(Ok(()), |iptables| iptables.write_hint(&world))?;
        let manifests = Manifests::create(world.directory())?;
        place(&manifests)?;
        let proxy = Proxy::new(
            Host::Node1,
            &world,
            &self.shunt,
            &self.mode,
            &manifests,
            &serde_yaml_ng::Mapping::new(),
        )?;
        Ok((world, manifests, proxy))
    }
}

/// Has the proxy watch an API server with a cluster of this number of Services from its next start
/// on. The server runs until the result is dropped.
fn watch_api(world: &World, proxy: &mut Proxy, services: usize) -> Result<Cluster> {
    let cluster = Cluster::start(world)?;
    cluster::objects(services).try_for_each(|object| cluster.server().put(object).map(drop))?;
    proxy.watch_api(&cluster.server().url());
    Ok(cluster)
}

/// Executes a request in an agent. Servers continue afterwards, on threads of their own.
pub fn execute(request: BenchRequest) -> BenchResponse {
    let outcome = match request {
        BenchRequest::Serve(ports) => load::serve(&ports).map(|()| BenchResponse::Done),
        BenchRequest::Compare(compare) => load::compare(&compare),
        BenchRequest::Packets(burst) => packets::send_here(&burst),
        BenchRequest::Changes(changes) => changes::measure(&changes).map(BenchResponse::Changes),
    };
    outcome.unwrap_or_else(|error| BenchResponse::Failed(format!("{error:#}")))
}
