//! What happens to the proxy and to its Service while clients dial.

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
    Check, ChurnTest,
    leftovers::{KernelState, PinnedObjects},
    load::{Client, Counts, StopCondition},
    set_endpoints,
};

/// The endpoints in turn. Some of each stay in the next; one that leaves goes on answering.
pub(crate) const SERVED: [&[Host]; 6] = [
    &[Host::A3, Host::B1],
    &[Host::B1, Host::B2],
    &[Host::B2],
    &[Host::B2, Host::A3],
    &[Host::A3],
    &[Host::A3, Host::B1, Host::B2],
];
const CHANGE_EVERY: Duration = Duration::from_millis(100);
const RESTART_EVERY: Duration = Duration::from_secs(2);
/// How many connections a second there are at least, or something hangs.
const SLOWEST: u64 = 50;
const AT_LEAST: Duration = Duration::from_mins(1);
/// Before and after a change of map sizes, and around the removal.
const MEANWHILE: Duration = Duration::from_secs(1);
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(10);
/// Other sizes of maps that flows and Services live in.
const SIZES: &str = "shunt: {ebpf: {mapSizes: {flows: 400000, services: 4000, endpoints: 9000, affinity: 3000, fragments: 1000, udpFlows: 2000}}}";

/// What was done while connections were made.
#[derive(Default)]
struct Disruptions {
    restarts: usize,
    changes: usize,
}

impl ChurnTest {
    /// Everything, one after the other, and what came of it.
    pub(crate) fn all_phases(&mut self, connections: usize) -> Result<Vec<Check>> {
        self.proxy.start(&mut self.world)?;
        self.clients.iter_mut().try_for_each(Client::hold)?;
        let mut checks = vec![self.churn(connections)?, self.held("after that")?, self.follows()?];
        if self.has_maps() {
            checks.push(self.resize("other map sizes", SIZES)?);
            checks.push(self.held("after that")?);
            checks.push(self.resize("the first map sizes again", "{}")?);
            checks.push(self.held("after that")?);
            checks.push(self.follows()?);
        }
        checks.push(self.clean_up()?);
        Ok(checks)
    }

    /// Only the eBPF mode pins maps, whose sizes are configured.
    fn has_maps(&self) -> bool {
        self.mode == "ebpf"
    }

    fn churn(&mut self, connections: usize) -> Result<Check> {
        let Self { proxy, world, manifests, .. } = self;
        let (took, again) = (Stopwatch::start(), world.retransmits()?);
        let (done, counts) = under_load(&mut self.clients, connections, |made| {
            kill_and_change(
                world,
                proxy,
                manifests,
                || made.load(Ordering::Relaxed) >= connections,
                connections,
            )
        })?;
        let again = self.world.retransmits()? - again;
        let Disruptions { restarts, changes } = done;
        self.proxy.kill()?;
        self.proxy.start(&mut self.world)?;
        let mut check = Check::of_load("churn", &counts);
        write!(
            check.name,
            "; {restarts} proxy restarts, {changes} endpoint changes, {again} segments sent again, {:.0} s",
            took.elapsed().as_secs_f32()
        )?;
        Ok(check)
    }

    /// The proxy ends and starts with other sizes, under load.
    fn resize(&mut self, name: &str, fields: &str) -> Result<Check> {
        let fields: Mapping = serde_yaml_ng::from_str(fields)?;
        self.proxy.configure(&self.mode, &fields)?;
        let Self { proxy, world, .. } = self;
        let ((), counts) = under_load(&mut self.clients, usize::MAX, |_| {
            thread::sleep(MEANWHILE);
            proxy.stop()?;
            proxy.start(world)?;
            thread::sleep(MEANWHILE);
            Ok(())
        })?;
        Ok(Check::of_load(name, &counts))
    }

    fn held(&mut self, when: &str) -> Result<Check> {
        let mut ended = Vec::new();
        for client in &mut self.clients {
            ended.extend(client.ended()?);
        }
        let all: usize = self.clients.iter().map(Client::held_count).sum();
        let name = format!("{when}: of {all} connections open from the start, {} have ended", ended.len());
        Ok(Check::new(name, ended))
    }

    /// Whether all reach the endpoint that is left, and no other, once the proxy has seen the change.
    fn follows(&mut self) -> Result<Check> {
        let mut wrong = Vec::new();
        for last in [Host::B1, Host::A3] {
            set_endpoints(&self.manifests, &[last])?;
            let deadline = Deadline::after(FOLLOW_TIMEOUT);
            loop {
                let mut others = Vec::new();
                for client in &mut self.clients {
                    others.extend(client.others_than(last)?);
                }
                if others.is_empty() {
                    break;
                }
                if deadline.passed() {
                    wrong.extend(others);
                    break;
                }
                Deadline::pause();
            }
        }
        Ok(Check::new("then the one endpoint that is left is the only one reached", wrong))
    }

    /// Under load, whose connections may fail as there is no Service any more.
    fn clean_up(&mut self) -> Result<Check> {
        let has_maps = self.has_maps();
        let Self { proxy, world, .. } = self;
        let pinned = PinnedObjects::read(world)?;
        ensure!(pinned.is_empty() != has_maps, "the proxy runs, and what it has pinned: {pinned}");
        let there = KernelState::read(world)?.beyond(&self.before);
        ensure!(!there.is_empty(), "the proxy runs, and nothing in the kernel shows it");
        under_load(&mut self.clients, usize::MAX, |_| {
            thread::sleep(MEANWHILE);
            proxy.stop()?;
            proxy.clean_up(world)?;
            thread::sleep(MEANWHILE);
            Ok(())
        })?;
        let mut wrong = KernelState::read(&self.world)?.beyond(&self.before);
        wrong.extend(pinned.still_there());
        Ok(Check::new(format!("--cleanup under load leaves nothing of {pinned}, rules and links"), wrong))
    }
}

/// Does something while all clients dial, `enough` times in all or until it is done.
fn under_load<T>(
    clients: &mut [Client],
    enough: usize,
    job: impl FnOnce(&AtomicUsize) -> Result<T>,
) -> Result<(T, Counts)> {
    let (made, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let until = StopCondition { made: &made, enough, done: &done };
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

/// Changes endpoints and restarts the proxy, killed and asked to end in turn, until there are enough connections.
fn kill_and_change(
    world: &World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    is_enough: impl Fn() -> bool,
    connections: usize,
) -> Result<Disruptions> {
    let limit = AT_LEAST + Duration::from_secs(connections as u64 / SLOWEST);
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
            proxy.spawn(world)?;
            done.restarts += 1;
            restart = Deadline::after(RESTART_EVERY);
        }
        done.changes += 1;
        set_endpoints(manifests, SERVED[done.changes % SERVED.len()])?;
        thread::sleep(CHANGE_EVERY);
    }
    Ok(done)
}
