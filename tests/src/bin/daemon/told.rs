//! What programs tell of single connections, in the daemon's log.

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

pub(crate) fn single_connections_are_told_of_where_that_is_asked_for(setting: &Setting) -> Result<()> {
    let mut bed = Bed::started(setting, &setting.mode, "{shunt: {ebpf: {log: debug}}}")?;
    bed.wait_until_served(&[Host::A1, Host::A2], SOON)?;
    told(&bed, "shunt_connect4", "translated", &format!(" dialled={CLUSTER_IP} endpoint=10.244.1."))?;
    wait_for_node_port(&mut bed, |one| matches!(one, Try::Answered(_)))?;
    told(&bed, "shunt_in_eth", "translated", &format!(" dialled={NODE_PORT} endpoint=10.244.1."))?;
    ensure!(is_told(&bed, "shunt_in_eth", "translated", " source=192.168.57."), "{}", bed.proxy.log());
    bed.serve(&[])?;
    wait_for_node_port(&mut bed, |one| matches!(one, Try::Failed(_)))?;
    told(&bed, "shunt_in_eth", "refused", &format!(" dialled={NODE_PORT} "))?;
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

/// Waits until a program tells this.
fn told(bed: &Bed, program: &str, verdict: &str, rest: &str) -> Result<()> {
    let found = Deadline::after(SOON).poll(|| is_told(bed, program, verdict, rest).then_some(()));
    ensure!(found.is_some(), "{program} tells of nothing {verdict} with {rest:?}:\n{}", bed.proxy.log());
    Ok(())
}

fn is_told(bed: &Bed, program: &str, verdict: &str, rest: &str) -> bool {
    let words = format!(" program=\"{program}\" verdict=\"{verdict}\" protocol=\"TCP\"");
    bed.proxy.log().lines().any(|line| line.contains(&words) && line.contains(rest))
}
