//! The conformance runner. For each case it runs the real proxy on the nodes of the case, gives it
//! objects, and checks flows.

mod cluster;
mod config;
mod differences;
mod link_flags;
mod manifests;
mod marker;
mod objects;
mod proxy;
mod report;
mod selection;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

pub use self::{
    cluster::Cluster,
    config::compose,
    differences::adapt_to_mode,
    link_flags::LinkFlags,
    manifests::Manifests,
    objects::{ObjectSourceKind, Objects},
    proxy::{Proxy, last_lines},
    report::{CaseReport, FlowReport, Summary},
    selection::{IptablesVariant, Selection},
};
use self::{marker::Marker, report::not_run};
use crate::{
    agent::Agent,
    case::{Case, Commands, Flow, Step},
    deadline::{Deadline, Stopwatch},
    explained,
    flow::{self, FlowResult},
    world::{Host, World},
};

/// The time for the proxy to program a change. It usually takes milliseconds.
const PROGRAM_TIMEOUT: Duration = Duration::from_mins(1);
/// The time for a flow to hold, if it does not at first. It usually takes a second at most.
const HOLD_TIMEOUT: Duration = Duration::from_secs(30);
const LOG_LINES: usize = 25;

/// Runs cases in a world.
pub struct Runner {
    /// The world for all cases that do not need their own.
    pub world: World,
    /// The proxy's binary. Without a proxy, nothing is translated, so flows that need one must
    /// fail.
    pub shunt: Option<PathBuf>,
    /// The mode of the proxy.
    pub mode: String,
    /// The source of the proxy's objects.
    pub source: ObjectSourceKind,
    /// Selects the cases that must hold.
    pub selection: Selection,
    /// The iptables variant that node1 signals in the worlds of single cases. The runner's own
    /// world signals it already.
    pub iptables: Option<IptablesVariant>,
    /// Flags of the proxy for links.
    pub links: LinkFlags,
    /// Other flags of the proxy, with their values.
    pub flags: Vec<(&'static str, String)>,
}

/// A running case.
struct CaseRun<'a> {
    world: &'a mut World,
    case: &'a Case,
    objects: Objects,
    marker: Marker,
    /// One for each node of the case. Empty in a run without a proxy.
    proxies: Vec<Proxy>,
    proxy_is_up: bool,
    links_have_xdp: bool,
    report: CaseReport,
}

impl Runner {
    /// Runs one case. Errors are in its report.
    pub fn run(&mut self, case: &Case) -> CaseReport {
        let began = Stopwatch::start();
        let mut report = CaseReport::new(case);
        report.left_out = self.selection.skip_reason(case);
        if report.left_out.is_none() {
            match self.run_in_world(case) {
                Ok(ended) => report = ended,
                Err(error) => {
                    report.add_problem("prepare the case", &error);
                    report.add_unrun_flows(case, 0, &error);
                }
            }
        }
        report.took = began.elapsed();
        report
    }

    /// Runs a case in the shared world, or in a world of its own, which is removed afterwards.
    fn run_in_world(&mut self, case: &Case) -> Result<CaseReport> {
        if !case.needs_own_world() {
            return Ok(self.start(case)?.complete());
        }
        let mut world = World::build(&self.world.hosts(), self.world.program())?;
        self.iptables.map_or(Ok(()), |iptables| iptables.write_hint(&world))?;
        self.links.prepare(&mut world)?;
        case.outside_cgroup.iter().try_for_each(|host| world.move_out_of_cgroup(*host))?;
        run_commands(&world, &case.world)?;
        world.take_frames_of_drivers(&case.ports_with_xdp)?;
        std::mem::swap(&mut self.world, &mut world);
        let report = self.start(case).map(CaseRun::complete);
        std::mem::swap(&mut self.world, &mut world);
        report
    }

    fn start<'a>(&'a mut self, case: &'a Case) -> Result<CaseRun<'a>> {
        let has_one_node = case.proxies.len() == 1;
        let create = if has_one_node { Objects::create } else { Objects::create_for_all };
        let objects = create(self.source, &self.world)?;
        let marker = Marker::place(&self.world, &objects, &case.proxies)?;
        let new = |node: &Host| self.new_proxy(*node, case, &objects);
        let proxies = case.proxies.iter().filter_map(|node| new(node).transpose());
        let proxies = proxies.collect::<Result<_>>()?;
        Ok(CaseRun {
            world: &mut self.world,
            case,
            objects,
            marker,
            proxies,
            proxy_is_up: false,
            links_have_xdp: self.links.has_xdp(),
            report: CaseReport::new(case),
        })
    }

    fn new_proxy(&self, node: Host, case: &Case, objects: &Objects) -> Result<Option<Proxy>> {
        let Some(shunt) = &self.shunt else { return Ok(None) };
        let mut proxy = Proxy::new(node, &self.world, shunt, &self.mode, objects, &case.config)?;
        proxy.clear_log()?;
        self.links.set(&mut proxy);
        self.flags.iter().for_each(|(flag, value)| proxy.set_flag(flag, value));
        Ok(Some(proxy))
    }
}

impl CaseRun<'_> {
    fn complete(mut self) -> CaseReport {
        let case = self.case;
        for (number, step) in case.steps.iter().enumerate() {
            let applied = self.apply_changes(number, step);
            for (flow_number, flow) in step.flows.iter().enumerate() {
                let result = match &applied {
                    Err(error) => not_run(error),
                    Ok(()) => self.run_flow(flow),
                };
                self.report.flows.push(FlowReport::new(number, flow_number, flow, result));
            }
            if let Err(error) = applied {
                self.report.add_problem(&format!("step {}", number + 1), &error);
                self.report.add_unrun_flows(case, number + 1, &error);
                break;
            }
        }
        self.end();
        self.report
    }

    /// Makes the changes of a step, and waits until all proxies have programmed them.
    fn apply_changes(&mut self, number: usize, step: &Step) -> Result<()> {
        if step.stop {
            self.proxies.iter_mut().try_for_each(|proxy| proxy.stop().with_context(|| at(proxy)))?;
            self.proxy_is_up = false;
        }
        if step.cleanup {
            ensure!(!self.proxy_is_up, "cleanup: the proxy runs; stop it first");
            self.proxies
                .iter()
                .try_for_each(|proxy| proxy.clean_up(self.world).with_context(|| at(proxy)))?;
        }
        if let Some(mode) = &step.mode {
            ensure!(!self.proxy_is_up, "mode: the proxy runs; stop it first");
            self.proxies.iter_mut().try_for_each(|proxy| proxy.set_mode(mode, &self.case.config))?;
        }
        let deletes = self.proxy_is_up && !step.delete.is_empty();
        if deletes {
            self.marker.prepare_deletion(self.world, &self.objects, PROGRAM_TIMEOUT)?;
        }
        step.delete.iter().try_for_each(|key| self.objects.delete(key))?;
        step.apply.iter().try_for_each(|object| self.objects.apply(&object.key, &object.manifest))?;
        if number == 0 || step.start {
            self.start_proxies()?;
        } else if self.proxy_is_up {
            if deletes {
                self.marker.delete(self.world, &self.objects, PROGRAM_TIMEOUT)?;
            }
            self.marker.wait_until_programmed(self.world, &self.objects, PROGRAM_TIMEOUT)?;
        }
        run_commands(self.world, &step.run)
    }

    fn start_proxies(&mut self) -> Result<()> {
        for proxy in &mut self.proxies {
            proxy.start(self.world).with_context(|| at(proxy))?;
            self.proxy_is_up = true;
        }
        Ok(())
    }

    fn run_flow(&mut self, flow: &Flow) -> FlowResult {
        // Without a proxy, there is nothing to wait for.
        let patience = if self.proxies.is_empty() { Duration::ZERO } else { HOLD_TIMEOUT };
        let explained = self.check_explanation(flow);
        match flow::run(self.world, flow, patience) {
            Ok(FlowResult::Held { late }) => match explained.or_else(|_| self.check_later(flow)) {
                Ok(()) => FlowResult::Held { late },
                Err(why) => FlowResult::Failed { why, seen: "the flow held".to_owned() },
            },
            Ok(failed) => failed,
            Err(error) => not_run(&error),
        }
    }

    /// Compares what `shunt explain` says about a flow with what is expected of it.
    fn check_explanation(&self, flow: &Flow) -> Result<(), String> {
        let Some(request) = explained::request(self.case, flow).filter(|_| self.proxy_is_up) else {
            return Ok(());
        };
        let explanation = self.world.explain(&request).map_err(|error| format!("{error:#}"))?;
        explained::check(flow, &explanation)
    }

    /// Does the same until it is right. The proxy may learn of a change of links later.
    fn check_later(&self, flow: &Flow) -> Result<(), String> {
        let in_time = Deadline::after(HOLD_TIMEOUT).poll(|| self.check_explanation(flow).ok());
        in_time.map_or_else(|| self.check_explanation(flow), Ok)
    }

    /// Closes the connections that flows kept open, stops the proxies and has them clean up.
    fn end(&mut self) {
        if self.links_have_xdp && self.proxy_is_up {
            // The case may have ended in a mode without this count.
            let counts = self.proxies.iter().filter_map(|proxy| proxy.sent_before_stack(self.world).ok());
            self.report.sent_before_stack = Some(counts.sum());
        }
        for host in self.world.hosts() {
            if let Err(error) = self.world.agent(host).and_then(Agent::close) {
                self.report.add_problem(&format!("close the connections of {host}"), &error);
            }
        }
        for proxy in &mut self.proxies {
            if let Err(error) = proxy.stop() {
                self.report.add_problem(&format!("stop {}", at(proxy)), &error);
            }
            if let Err(error) = proxy.clean_up(self.world) {
                self.report.add_problem(&format!("clean up {}", at(proxy)), &error);
            }
        }
        if self.report.failed() > 0 {
            let tails = self.proxies.iter().map(|proxy| (proxy.node(), proxy.log_tail(LOG_LINES)));
            self.report.log_tails = tails.collect();
        }
    }
}

fn at(proxy: &Proxy) -> String {
    format!("the proxy on {}", proxy.node())
}

fn run_commands(world: &World, commands: &[Commands]) -> Result<()> {
    let lines = commands.iter().flat_map(|of| of.run.iter().map(|line| (of.on, line)));
    lines.map(|(host, line)| world.run(host, line)).try_for_each(|done| done.map(drop))
}

/// Returns the directory of the project's cases.
pub fn cases_directory() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cases"))
}
