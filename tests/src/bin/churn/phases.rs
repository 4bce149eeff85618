//! The phases of the churn test: what happens to the proxy and its Service while clients connect.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    deadline::{Deadline, Stopwatch},
    runner::{Manifests, Proxy},
    world::{Host, World},
};

use super::{
    Arguments, Check, ChurnTest,
    leftovers::{KernelState, PinnedObjects},
    load::{ANSWER_TIMEOUT, Client, Counts, LoadCondition},
    set_endpoints,
};

/// The endpoints in turn. Each set shares a member with the next. An endpoint that is removed
/// continues to answer on its connections.
pub(crate) const ENDPOINT_SETS: [&[Host]; 6] = [
    &[Host::A3, Host::B1],
    &[Host::B1, Host::B2],
    &[Host::B2],
    &[Host::B2, Host::A3],
    &[Host::A3],
    &[Host::A3, Host::B1, Host::B2],
];
const CHANGE_EVERY: Duration = Duration::from_millis(100);
const RESTART_EVERY: Duration = Duration::from_secs(2);
/// The minimum rate of connections a second. A lower rate means that something hangs.
const MIN_RATE: u64 = 50;
const MIN_DURATION: Duration = Duration::from_mins(1);
/// The time before and after a change of map sizes, and around the cleanup.
const PAUSE: Duration = Duration::from_secs(1);
const FOLLOW_TIMEOUT: Duration = Duration::from_mins(1);
/// Other sizes of the maps.
const SIZES: &str = "shunt: {ebpf: {mapSizes: {flows: 400000, services: 4000, endpoints: 9000, affinity: 3000, fragments: 1000, udpFlows: 2000}}}";

/// What was done while clients connected.
#[derive(Default)]
struct Disruptions {
    restarts: usize,
    changes: usize,
}

impl ChurnTest {
    /// Runs all phases, one after the other, and returns the checks.
    pub(crate) fn all_phases(&mut self, arguments: &Arguments) -> Result<Vec<Check>> {
        self.proxy.start(&mut self.world)?;
        self.clients.iter_mut().try_for_each(Client::open)?;
        let mut checks = Vec::new();
        if !arguments.only_switches {
            checks.push(self.churn(arguments.connections)?);
            checks.push(self.check_open_connections("afterwards")?);
            checks.push(self.check_follows()?);
        }
        if self.has_maps() && !arguments.only_switches {
            checks.push(self.resize("other map sizes", SIZES)?);
            checks.push(self.check_open_connections("afterwards")?);
            checks.push(self.resize("the first map sizes again", "{}")?);
            checks.push(self.check_open_connections("afterwards")?);
            checks.push(self.check_follows()?);
        }
        if self.has_maps() {
            checks.extend(self.switch(arguments.switches, &arguments.links)?);
            checks.push(self.check_open_connections("afterwards")?);
        }
        if arguments.links.has_xdp() {
            checks.push(self.check_xdp()?);
        }
        checks.push(self.clean_up()?);
        Ok(checks)
    }

    /// Checks that packets left before the stack.
    fn check_xdp(&self) -> Result<Check> {
        let sent = self.proxy.sent_before_stack(&self.world)?;
        let failures =
            if sent == 0 { vec!["no packet left before the stack".to_owned()] } else { Vec::new() };
        Ok(Check::new(format!("XDP: {sent} packets left before the stack"), failures))
    }

    /// Returns true in the ebpf mode, the only one that pins maps, whose sizes are configured.
    fn has_maps(&self) -> bool {
        self.mode == "ebpf"
    }

    fn churn(&mut self, connections: usize) -> Result<Check> {
        let Self { proxy, world, manifests, .. } = self;
        let (took, retransmits) = (Stopwatch::start(), world.retransmits()?);
        let (done, counts) = under_load(&mut self.clients, connections, ANSWER_TIMEOUT, |made| {
            kill_and_change(
                world,
                proxy,
                manifests,
                || made.load(Ordering::Relaxed) >= connections,
                connections,
            )
        })?;
        let retransmits = self.world.retransmits()? - retransmits;
        let Disruptions { restarts, changes } = done;
        self.proxy.kill()?;
        self.proxy.start(&mut self.world)?;
        let mut check = Check::of_load("churn", &counts);
        write!(
            check.name,
            "; {restarts} proxy restarts, {changes} endpoint changes, {retransmits} segments retransmitted, {:.0} s",
            took.elapsed().as_secs_f32()
        )?;
        Ok(self.with_log(check))
    }

    /// Restarts the proxy with other map sizes under load.
    fn resize(&mut self, name: &str, fields: &str) -> Result<Check> {
        let fields: Mapping = serde_yaml_ng::from_str(fields)?;
        self.proxy.configure(&self.mode, &fields)?;
        let Self { proxy, world, .. } = self;
        let ((), counts) = under_load(&mut self.clients, usize::MAX, ANSWER_TIMEOUT, |_| {
            thread::sleep(PAUSE);
            proxy.stop()?;
            proxy.start(world)?;
            thread::sleep(PAUSE);
            Ok(())
        })?;
        Ok(self.with_log(Check::of_load(name, &counts)))
    }

    /// Adds the log of this phase to a check that failed. Later phases write much more.
    fn with_log(&self, mut check: Check) -> Check {
        if !check.failures.is_empty() {
            check.failures.insert(0, format!("the end of the proxy's log:\n{}", self.proxy.log_tail(60)));
        }
        check
    }

    fn check_open_connections(&mut self, when: &str) -> Result<Check> {
        let mut ended = Vec::new();
        for client in &mut self.clients {
            ended.extend(client.ended_connections()?);
        }
        let all: usize = self.clients.iter().map(Client::open_count).sum();
        let name = format!("{when}: of {all} connections open from the start, {} have ended", ended.len());
        Ok(Check::new(name, ended))
    }

    /// Checks that all clients reach the remaining endpoint and no other, after the proxy has seen
    /// the change.
    fn check_follows(&mut self) -> Result<Check> {
        let mut failures = Vec::new();
        for last in [Host::B1, Host::A3] {
            set_endpoints(&self.manifests, &[last])?;
            let deadline = Deadline::after(FOLLOW_TIMEOUT);
            loop {
                let mut others = Vec::new();
                for client in &mut self.clients {
                    others.extend(client.answers_of_others(last)?);
                }
                if others.is_empty() {
                    break;
                }
                if deadline.passed() {
                    failures.extend(others);
                    break;
                }
                Deadline::pause();
            }
        }
        Ok(Check::new("afterwards, only the remaining endpoint answers", failures))
    }

    /// Cleans up under load. Connections may fail, because the Service is gone.
    fn clean_up(&mut self) -> Result<Check> {
        let has_maps = self.has_maps();
        let Self { proxy, world, .. } = self;
        let pinned = PinnedObjects::read(world)?;
        ensure!(pinned.is_empty() != has_maps, "the proxy runs and has pinned {pinned}");
        let shown = KernelState::read(world)?.difference_from(&self.before);
        ensure!(!shown.is_empty(), "the proxy runs, but the commands show nothing of it");
        // Without a proxy, nobody answers, and the clients wait in vain.
        under_load(&mut self.clients, usize::MAX, PAUSE, |_| {
            thread::sleep(PAUSE);
            proxy.stop()?;
            proxy.clean_up(world)?;
            thread::sleep(PAUSE);
            Ok(())
        })?;
        let mut failures = KernelState::read(&self.world)?.difference_from(&self.before);
        failures.extend(pinned.remaining());
        Ok(Check::new(format!("--cleanup under load removes {pinned}, rules and links"), failures))
    }
}

/// Runs `job` while all clients connect, until they have made `enough` connections or `job`
/// returns. They wait for each answer for `timeout`.
fn under_load<T>(
    clients: &mut [Client],
    enough: usize,
    timeout: Duration,
    job: impl FnOnce(&AtomicUsize) -> Result<T>,
) -> Result<(T, Counts)> {
    let (made, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let until = LoadCondition { timeout, made: &made, enough, done: &done };
    thread::scope(|scope| {
        let loads: Vec<_> = clients.iter_mut().map(|client| scope.spawn(|| client.load(&until))).collect();
        let result = job(&made);
        done.store(true, Ordering::Relaxed);
        let counts: Result<Vec<Counts>> = loads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        Ok((result?, Counts::sum(counts?)))
    })
}

/// Changes endpoints and restarts the proxy, killed and stopped in turn, until there are enough
/// connections.
fn kill_and_change(
    world: &World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    is_enough: impl Fn() -> bool,
    connections: usize,
) -> Result<Disruptions> {
    let limit = MIN_DURATION + Duration::from_secs(connections as u64 / MIN_RATE);
    let (deadline, mut done) = (Deadline::after(limit), Disruptions::default());
    let mut restart = Deadline::after(RESTART_EVERY);
    while !is_enough() {
        ensure!(!deadline.passed(), "clients have not made {connections} connections within {limit:?}");
        if restart.passed() {
            if done.restarts.is_multiple_of(2) {
                proxy.kill()?;
            } else {
                proxy.stop()?;
            }
            // With another constant the programs are replaced, as in an upgrade. With the same one
            // they are used again.
            proxy.set_flag("--ebpf-log", ["off", "error", "off", "off"][done.restarts % 4]);
            proxy.spawn(world)?;
            done.restarts += 1;
            restart = Deadline::after(RESTART_EVERY);
        }
        done.changes += 1;
        set_endpoints(manifests, ENDPOINT_SETS[done.changes % ENDPOINT_SETS.len()])?;
        thread::sleep(CHANGE_EVERY);
    }
    Ok(done)
}
