//! Objects that the kernel rejects: they are left out, and all others are served.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Result, bail, ensure};
use proxy_userspace::{
    dataplane::ipvs::{IpvsError, IpvsSettings},
    model::{Protocol, ResolvedEndpoint, Snapshot},
};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol as Transport},
    world::Host,
};

use crate::node::{Mode, Node, cluster_ip, endpoints, of_ports, service, with_external_ip};

/// Syncs. Returns the number of service ports that are left out, and the error.
fn left_out(mode: &mut Mode, node: &Node, snapshot: &Snapshot) -> Result<(usize, String)> {
    match mode.try_sync(node, snapshot)? {
        Err(error @ IpvsError::LeftOut { count, .. }) => Ok((count, error.to_string())),
        other => bail!("{other:?}"),
    }
}

fn is_answered(node: &mut Node, number: u16) -> Result<bool> {
    let to = SocketAddr::new(cluster_ip(number), 80);
    let attempts = node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Tcp, 1))?;
    Ok(matches!(attempts[..], [Attempt::Answered(_)]))
}

pub(super) fn one_of_many(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    let web = |name, number| service(name, cluster_ip(number), Protocol::Tcp, &endpoints(&[1]));
    // Multicast addresses: the first one as an endpoint, the second one on a link.
    let multicast = ResolvedEndpoint { address: "239.1.1.1:8080".parse()?, is_local: false };
    let (key, mut group) = web("group", 1);
    Arc::make_mut(&mut group).cluster_endpoints.push(multicast);
    let outside =
        with_external_ip(service("outside", "fd96::2".parse()?, Protocol::Tcp, &[]), "ff05::1".parse()?);
    let wrong = of_ports([web("web", 0), (key, group), outside, web("last", 3)]);
    let (count, message) = left_out(&mut mode, node, &wrong)?;
    ensure!(count == 2 && message.contains("default/group"), "{message}");
    for number in [0, 1, 3] {
        ensure!(is_answered(node, number)?, "Service {number} is not served: {message}");
    }
    // A full sync tries nothing again and still fails.
    let (count, _) = left_out(&mut mode, node, &wrong)?;
    ensure!(count == 2);
    // The parts that were added before the rejection are removed.
    let servers = node.run("cat /proc/net/ip_vs")?;
    ensure!(!servers.contains("[ff05:"), "{servers}");
    let requests = mode.requests();
    let (count, _) = left_out(&mut mode, node, &wrong)?;
    ensure!(
        count == 2 && mode.requests().iptables == requests.iptables,
        "{:?}, {requests:?}",
        mode.requests()
    );
    let right = of_ports([web("web", 0), web("group", 1), web("last", 3)]);
    mode.sync(node, &right)?;
    mode.clean_up(node)
}

pub(super) fn full_set(node: &mut Node) -> Result<()> {
    node.run("ipset create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 64 maxelem 3")?;
    let mut mode = node.mode(IpvsSettings::default())?;
    let web =
        |number: u16| service(&format!("s{number}"), cluster_ip(number), Protocol::Tcp, &endpoints(&[1]));
    let five = of_ports([0, 1, 2, 3, 4].map(web));
    let (count, message) = left_out(&mut mode, node, &five)?;
    ensure!(count == 2 && message.contains("KUBE-CLUSTER-IP") || message.contains("full"), "{message}");
    let mut served = Vec::new();
    for number in 0..5 {
        if is_answered(node, number)? {
            served.push(number);
        }
    }
    ensure!(served.len() == 3, "{served:?} are served: {message}");
    // When others are removed, there is room for the rest.
    let fewer: Vec<u16> = (0..5).filter(|number| !served[..2].contains(number)).collect();
    let few = of_ports(fewer.iter().map(|number| web(*number)));
    for _ in 0..3 {
        if mode.try_sync(node, &few)?.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    for number in fewer {
        ensure!(is_answered(node, number)?, "Service {number} is not served");
    }
    mode.clean_up(node)
}
