//! Trace events of the eBPF programs in the daemon's log.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    agent::protocol::{Dial, Protocol, Try},
    deadline::{Deadline, patient},
    small_cluster::{CLUSTER_IP, NODE_PORT},
    world::Host,
};

use super::bed::{Bed, Setting};

const SOON: Duration = Duration::from_secs(30);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

pub(crate) fn connections_are_logged_where_tracing_is_on(setting: &Setting) -> Result<()> {
    let mut bed = Bed::started(setting, &setting.mode, "{shunt: {ebpf: {log: debug}}}")?;
    bed.wait_until_served(&[Host::A1, Host::A2], SOON)?;
    expect_event(&bed, "shunt_connect4", "translated", &format!(" vip={CLUSTER_IP} endpoint=10.244.1."))?;
    wait_for_node_port(&mut bed, |one| matches!(one, Try::Answered(_)))?;
    expect_event(&bed, "shunt_in_eth", "translated", &format!(" vip={NODE_PORT} endpoint=10.244.1."))?;
    ensure!(has_event(&bed, "shunt_in_eth", "translated", " source=192.168.57."), "{}", bed.proxy.log());
    bed.serve(&[])?;
    wait_for_node_port(&mut bed, |one| matches!(one, Try::Failed(_)))?;
    expect_event(&bed, "shunt_in_eth", "refused", &format!(" vip={NODE_PORT} "))?;
    bed.end()
}

/// Dials the Service's port of the node until that ends so.
fn wait_for_node_port(bed: &mut Bed, is_wanted: impl Fn(&Try) -> bool) -> Result<()> {
    let mut last = None;
    let mut look = || match dial_node_port(bed) {
        Ok(one) => {
            let found = is_wanted(&one).then_some(Ok(()));
            last = Some(one);
            found
        }
        Err(error) => Some(Err(error)),
    };
    let found = Deadline::after(SOON).poll(&mut look);
    found.with_context(|| format!("the node port goes on with {last:?}"))?
}

/// Dials the Service's port of the node from outside the cluster, once.
fn dial_node_port(bed: &mut Bed) -> Result<Try> {
    let dial = Dial { timeout: patient(ANSWERED_WITHIN), ..Dial::new(NODE_PORT.parse()?, Protocol::Tcp, 1) };
    let mut tries = bed.world.agent(Host::Client)?.dial(dial)?;
    ensure!(tries.len() == 1, "{tries:?}");
    Ok(tries.remove(0))
}

/// Waits until a line of this event is in the log.
fn expect_event(bed: &Bed, program: &str, verdict: &str, rest: &str) -> Result<()> {
    let found = Deadline::after(SOON).poll(|| has_event(bed, program, verdict, rest).then_some(()));
    ensure!(found.is_some(), "no event {verdict} of {program} with {rest:?}:\n{}", bed.proxy.log());
    Ok(())
}

fn has_event(bed: &Bed, program: &str, verdict: &str, rest: &str) -> bool {
    let words = format!(" program=\"{program}\" verdict=\"{verdict}\" protocol=\"TCP\"");
    bed.proxy.log().lines().any(|line| line.contains(&words) && line.contains(rest))
}
