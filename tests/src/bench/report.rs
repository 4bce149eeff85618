//! The report of all measurements: JSON for programs, a table for people.

use std::fmt;

use serde::Serialize;

use super::{
    Bench,
    changes::ChangeResult,
    floods::FloodResult,
    foreign::ForeignResult,
    maglev::MaglevTables,
    memory::Memory,
    outside::OutsideResult,
    packets::{NewFlows, PacketsResult},
    paths::PathResult,
    ratio::Ratio,
    restart::Restart,
    rollout::RolloutResult,
    targets::{self, TargetResult, mebibytes, microseconds},
    time_wait::TimeWaitResult,
};

/// The number of BPF maps that the table names.
const NAMED_MAPS: usize = 6;

/// A report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub(super) mode: String,
    kernel: String,
    pub(super) paths: Vec<PathResult>,
    pub(super) outside: Vec<OutsideResult>,
    pub(super) time_wait: Vec<TimeWaitResult>,
    pub(super) packets: Vec<PacketsResult>,
    pub(super) new_flows: Option<NewFlows>,
    pub(super) maglev: Option<MaglevTables>,
    pub(super) foreign: Vec<ForeignResult>,
    pub(super) changes: Vec<ChangeResult>,
    pub(super) memory: Vec<Memory>,
    pub(super) restarts: Vec<Restart>,
    pub(super) floods: Vec<FloodResult>,
    pub(super) rollout: Option<RolloutResult>,
    targets: Vec<TargetResult>,
}

impl Report {
    pub(super) fn new(mode: &str) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            mode: mode.to_owned(),
            kernel: kernel.trim().to_owned(),
            paths: Vec::new(),
            outside: Vec::new(),
            time_wait: Vec::new(),
            packets: Vec::new(),
            new_flows: None,
            maglev: None,
            foreign: Vec::new(),
            changes: Vec::new(),
            memory: Vec::new(),
            restarts: Vec::new(),
            floods: Vec::new(),
            rollout: None,
            targets: Vec::new(),
        }
    }

    pub(super) fn check_targets(&mut self, bench: &Bench) {
        self.targets = targets::check(self, bench);
    }

    /// Returns true if every promise of the mode holds. One that was not measured does not hold,
    /// unless the command line chose other parts, paths or workloads.
    pub fn meets_all_targets(&self) -> bool {
        self.targets.iter().all(|target| target.verdict.is_acceptable())
    }

    fn write_paths(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nOperations a second through the Service, relative to direct: median (quartiles), and direct relative to itself"
        )?;
        for result in &self.paths {
            let figure = match (&result.ratio, &result.control, &result.not_served) {
                (Some(ratio), Some(control), _) => format!("{ratio}  {:.3}", control.median),
                (.., why) => format!("not served: {}", why.as_deref().unwrap_or("no rounds")),
            };
            let (path, workload) = (result.path.name(), result.workload.name());
            writeln!(f, "  {path:<23}{workload:<24}{:>6} Services  {figure}", result.services)?;
        }
        writeln!(f, "\nForeign (routed) traffic with the proxy, relative to the traffic without it")?;
        for result in &self.foreign {
            let figure = result.ratio.as_ref().map_or_else(|| "-".to_owned(), Ratio::to_string);
            let node = if result.tracked { "with conntrack" } else { "without conntrack" };
            let port = if result.to_endpoint { "endpoint" } else { "other port" };
            let (workload, services) = (result.workload.name(), result.services);
            writeln!(f, "  {workload:<24}{port:<12}node {node:<17}{services:>6} Services  {figure}")?;
        }
        Ok(())
    }

    fn write_outside(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.outside.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "\nTraffic from outside, operations a second relative to a clean connection of the same length"
        )?;
        for OutsideResult { way, length, workload, ratio } in &self.outside {
            let figure = ratio.as_ref().map_or_else(|| "-".to_owned(), Ratio::to_string);
            let (way, length, workload) = (way.name(), length.name(), workload.name());
            writeln!(f, "  {way:<22}{length:<26}{workload:<24}{figure}")?;
        }
        Ok(())
    }

    fn write_time_wait(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.time_wait.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "\nShort connections to endpoints that keep closed ones in TIME_WAIT, relative to clean connections"
        )?;
        for result in &self.time_wait {
            let TimeWaitResult { seconds, repeated_syns, in_time_wait, .. } = result;
            let figure = result.ratio.as_ref().map_or_else(|| "-".to_owned(), Ratio::to_string);
            let (way, length) = (result.way.name(), result.length.name());
            writeln!(
                f,
                "  {way:<22}{length:<26}{figure}; {repeated_syns} SYNs repeated in {seconds:.0} s, \
                 {in_time_wait} in TIME_WAIT"
            )?;
        }
        Ok(())
    }

    fn write_packets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.packets.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nMillions of packets a second of one core, and relative to a router without a proxy")?;
        for PacketsResult { way, flows, per_second, ratio } in &self.packets {
            let figure = ratio.as_ref().map_or_else(|| "-".to_owned(), Ratio::to_string);
            let (way, flows, millions) = (way.name(), flows.name(), per_second / 1e6);
            writeln!(f, "  {way:<22}{flows:<16}{millions:>6.3}  {figure}")?;
        }
        if let Some(NewFlows { per_second, ratio: Some(ratio) }) = &self.new_flows {
            let millions = per_second / 1e6;
            writeln!(
                f,
                "  new flows by Maglev tables, relative to random endpoints: {millions:.3}  {ratio}"
            )?;
        }
        Ok(())
    }

    fn write_maglev(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(MaglevTables { services, endpoints, all_ms, change_ms }) = self.maglev else {
            return Ok(());
        };
        writeln!(f, "\nMaglev tables of {services} Services of {endpoints} endpoints, CPU time")?;
        writeln!(f, "  all tables {all_ms:.0} ms; after a change of one endpoint {change_ms:.2} ms")
    }

    fn write_changes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nFrom a decoded event to the changed kernel")?;
        writeln!(f, "  {:<44}{:>6}             median       p99       CPU       changes", "", "")?;
        for result in &self.changes {
            let (least, most) = result.operations;
            let calls = if least == most { least.to_string() } else { format!("{least} to {most}") };
            let times = [result.median_us, result.p99_us, result.cpu_us].map(microseconds);
            let [median, p99, cpu] = &times;
            let (what, services) = (result.changed.name(), result.services);
            writeln!(f, "  {what:<44}{services:>6} Services  {median:>8}  {p99:>8}  {cpu:>8}  {calls:>12}")?;
        }
        Ok(())
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nMemory of the process: resident, anonymous part of it, and maximum resident")?;
        for memory in &self.memory {
            let [settled, anonymous, peak] =
                [memory.settled_kib, memory.anonymous_kib, memory.peak_kib].map(mebibytes);
            let (source, services) = (memory.source, memory.services);
            writeln!(
                f,
                "  objects from {source:<31}{services:>6} Services  {settled:>9}  {anonymous:>9}  {peak:>9}"
            )?;
            Self::write_maps(f, memory)?;
        }
        Ok(())
    }

    /// Writes the memory of BPF maps, with the names of the largest.
    fn write_maps(f: &mut fmt::Formatter<'_>, memory: &Memory) -> fmt::Result {
        let Some(total) = memory.maps_kib() else { return Ok(()) };
        let largest = memory.maps.iter().take(NAMED_MAPS);
        let largest: Vec<String> =
            largest.map(|map| format!("{} {}", map.name, mebibytes(map.kib))).collect();
        let (count, total) = (memory.maps.len(), mebibytes(total));
        writeln!(f, "    {count} BPF maps in the kernel: {total}; {}, ...", largest.join(", "))
    }

    fn write_restarts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nRestart with nothing changed, objects from the API: until /healthz returns 200")?;
        for restart in &self.restarts {
            let Restart { services, restarts, median_ms, max_ms, cpu_ms, sync_ms } = restart;
            writeln!(
                f,
                "  {services:>6} Services, {restarts} restarts: median {median_ms:.0} ms, at most {max_ms:.0} ms; \
                 {cpu_ms:.0} ms of CPU; {sync_ms:.0} ms of the time for the first sync"
            )?;
        }
        Ok(())
    }

    fn write_floods(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.floods.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nConnections that ended while packets of clients that do not exist came in")?;
        for result in &self.floods {
            let FloodResult { count, per_second, cpu_ns, active, lost, failures, .. } = result;
            let (what, idle) = (result.attack.name(), result.idle.as_deref().unwrap_or("lives"));
            writeln!(
                f,
                "  {count} {what}, {per_second:.0} a second, {cpu_ns} ns of CPU each: {lost} of {active}; the idle one {idle}"
            )?;
            failures.iter().take(3).try_for_each(|failure| writeln!(f, "    {failure}"))?;
        }
        Ok(())
    }
}

impl Report {
    fn write_rollout(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(result) = &self.rollout else { return Ok(()) };
        let RolloutResult { endpoints, connections, failed, failures, changes, cpu_seconds, .. } = result;
        writeln!(f, "\nA rollout of {endpoints} endpoints, 100 a second")?;
        writeln!(f, "  {failed} of {connections} connections failed; {cpu_seconds:.2} s of CPU")?;
        if let (Some(changes), Some(median), Some(p99)) = (changes, result.median_us, result.p99_us) {
            let [median, p99] = [median, p99].map(microseconds);
            writeln!(f, "  from the event to the kernel: median {median}, p99 {p99}; {changes} changes")?;
        }
        failures.iter().take(3).try_for_each(|failure| writeln!(f, "    {failure}"))
    }
}

impl Report {
    fn write_targets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = &self.mode;
        writeln!(f, "\nTargets")?;
        for target in &self.targets {
            let TargetResult { what, target, goal, measured, verdict } = target;
            let goal = goal.as_ref().map(|goal| format!(" ({goal})")).unwrap_or_default();
            writeln!(f, "  {what:<52}{target:<18}{measured:>12}  {verdict}{goal}")?;
        }
        if targets::of_mode(mode).next().is_none() {
            writeln!(f, "  mode {mode} has none")?;
        }
        for other in targets::other_modes(mode) {
            writeln!(f, "  those of mode {other}: cargo xtask bench --mode {other} --check")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Mode {}, kernel {}", self.mode, self.kernel)?;
        self.write_paths(f)?;
        self.write_outside(f)?;
        self.write_time_wait(f)?;
        self.write_packets(f)?;
        self.write_maglev(f)?;
        self.write_changes(f)?;
        self.write_memory(f)?;
        self.write_restarts(f)?;
        self.write_floods(f)?;
        self.write_rollout(f)?;
        self.write_targets(f)
    }
}
