//! What IPVS counts of Services, as metrics tell it.

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
    answered,
    node::{Mode, Node, cluster_ip, endpoints, of_ports, service},
};

const DIALS: usize = 3;
const COUNTED_WITHIN: Duration = Duration::from_secs(30);

fn dial(node: &mut Node, number: u16) -> Result<()> {
    let to = SocketAddr::new(cluster_ip(number), 80);
    for _ in 0..DIALS {
        answered(&node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Tcp, 1))?)?;
    }
    Ok(())
}

/// Service ports with their connections, of which bytes went both ways.
type Counts = Vec<(String, u64)>;

fn counts(mode: &mut Mode, node: &Node) -> Result<Counts> {
    let mut counts = mode.counts(node)?;
    counts.retain(|count| count.bytes_to_endpoints > 100 && count.bytes_to_clients > 100);
    let name = |count: &ServiceCount| {
        count.port.as_ref().map_or("other".into(), |port| port.name.service.to_string())
    };
    Ok(counts.iter().map(|count| (name(count), count.connections)).collect())
}

/// The kernel sums its counts up every two seconds.
fn wait_for(wanted: &[(&str, usize)], mode: &mut Mode, node: &Node) -> Result<()> {
    let wanted: Counts = wanted.iter().map(|(name, dials)| ((*name).to_owned(), *dials as u64)).collect();
    let mut last = Ok(Counts::new());
    let look = || {
        last = counts(mode, node);
        last.as_ref().is_ok_and(|seen| *seen == wanted).then_some(())
    };
    let found = Deadline::after(COUNTED_WITHIN).poll(look);
    found.with_context(|| format!("{last:?} and not {wanted:?}"))
}

pub(super) fn of_services(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings { counted_services: 1, ..IpvsSettings::default() })?;
    let web =
        |number: u16| service(&format!("s{number}"), cluster_ip(number), Protocol::Tcp, &endpoints(&[1]));
    mode.sync(node, &of_ports([web(0)]))?;
    mode.sync(node, &of_ports([web(0), web(1)]))?;
    ensure!(counts(&mut mode, node)?.is_empty(), "{:?}", counts(&mut mode, node)?);
    dial(node, 0)?;
    dial(node, 1)?;
    wait_for(&[("default/s0", DIALS), ("other", DIALS)], &mut mode, node)?;
    // A look at everything, and another endpoint, forget nothing.
    let grown = service("s0", cluster_ip(0), Protocol::Tcp, &endpoints(&[1, 2]));
    mode.sync(node, &of_ports([grown, web(1)]))?;
    dial(node, 0)?;
    wait_for(&[("default/s0", 2 * DIALS), ("other", DIALS)], &mut mode, node)?;
    mode.clean_up(node)?;
    let mut silent = node.mode(IpvsSettings { counted_services: 0, ..IpvsSettings::default() })?;
    silent.sync(node, &of_ports([web(0)]))?;
    dial(node, 0)?;
    ensure!(silent.counts(node)?.is_empty(), "it counts nothing");
    silent.clean_up(node)
}
