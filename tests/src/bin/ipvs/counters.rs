//! Checks the counts of Services that metrics show.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use proxy_userspace::{
    dataplane::{ServiceCount, ipvs::IpvsSettings},
    model::Protocol,
};
use shunt_tests::{
    agent::protocol::{ConnectRequest, Protocol as Transport},
    deadline::Deadline,
    world::Host,
};

use crate::{
    answering_host,
    node::{Mode, Node, cluster_ip, endpoints, of_ports, service},
};

const CONNECTIONS: usize = 3;
const COUNT_TIMEOUT: Duration = Duration::from_secs(30);

fn connect(node: &mut Node, number: u16) -> Result<()> {
    let to = SocketAddr::new(cluster_ip(number), 80);
    for _ in 0..CONNECTIONS {
        answering_host(&node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Tcp, 1))?)?;
    }
    Ok(())
}

/// The connections by service port.
type Counts = Vec<(String, u64)>;

fn counts(mode: &mut Mode, node: &Node) -> Result<Counts> {
    let mut counts = mode.counts(node)?;
    counts.retain(|count| count.counts.bytes_to_endpoints > 100 && count.counts.bytes_to_clients > 100);
    let name = |count: &ServiceCount| {
        count.port.as_ref().map_or("other".into(), |port| port.name.service.to_string())
    };
    Ok(counts.iter().map(|count| (name(count), count.counts.connections)).collect())
}

/// Waits for these counts. The kernel updates its counters every two seconds.
fn wait_for(wanted: &[(&str, usize)], mode: &mut Mode, node: &Node) -> Result<()> {
    let wanted: Counts =
        wanted.iter().map(|(name, connections)| ((*name).to_owned(), *connections as u64)).collect();
    let mut last = Ok(Counts::new());
    let check = || {
        last = counts(mode, node);
        last.as_ref().is_ok_and(|seen| *seen == wanted).then_some(())
    };
    let found = Deadline::after(COUNT_TIMEOUT).poll(check);
    found.with_context(|| format!("the counts are {last:?}, not {wanted:?}"))
}

pub(super) fn of_services(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings { counted_services: 1, ..IpvsSettings::default() })?;
    let web =
        |number: u16| service(&format!("s{number}"), cluster_ip(number), Protocol::Tcp, &endpoints(&[1]));
    mode.sync(node, &of_ports([web(0)]))?;
    mode.sync(node, &of_ports([web(0), web(1)]))?;
    ensure!(counts(&mut mode, node)?.is_empty(), "{:?}", counts(&mut mode, node)?);
    connect(node, 0)?;
    connect(node, 1)?;
    wait_for(&[("default/s0", CONNECTIONS), ("other", CONNECTIONS)], &mut mode, node)?;
    // A full sync and a new endpoint do not reset the counts.
    let grown = service("s0", cluster_ip(0), Protocol::Tcp, &endpoints(&[1, 2]));
    mode.sync(node, &of_ports([grown, web(1)]))?;
    connect(node, 0)?;
    wait_for(&[("default/s0", 2 * CONNECTIONS), ("other", CONNECTIONS)], &mut mode, node)?;
    mode.clean_up(node)?;
    let mut without_counts = node.mode(IpvsSettings { counted_services: 0, ..IpvsSettings::default() })?;
    without_counts.sync(node, &of_ports([web(0)]))?;
    connect(node, 0)?;
    ensure!(without_counts.counts(node)?.is_empty(), "counting is disabled");
    without_counts.clean_up(node)
}
