//! Finds the service port of a destination.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
};

use super::{
    Location, Question, Situation, Verdict,
    client::Whereabouts,
    hook::{Seen, passed_to_backstop},
};
use crate::{
    mode::Mode,
    model::{IpFamily, Model, Owner, Protocol, ServicePortKey},
};

/// No service port has the destination.
#[derive(Debug)]
pub(super) struct Miss {
    pub(super) verdict: Verdict,
    pub(super) reason: String,
    /// What decides, if it is not what sees the packet first.
    pub(super) seen: Option<Seen>,
}

impl Miss {
    fn pass(reason: String) -> Self {
        Self { verdict: Verdict::Pass, reason, seen: None }
    }
}

/// Finds the service port.
pub(super) fn find<'a>(
    situation: Situation<'a>,
    client: &Whereabouts,
    seen: &Seen,
    question: &Question,
) -> Result<Owner<'a>, Miss> {
    let Question { destination, protocol, .. } = *question;
    let named = destination.ip().to_canonical();
    let (address, family) = (reached_by(named), IpFamily::of(named));
    let Some(port) = NonZeroU16::new(destination.port()) else {
        return Err(Miss::pass("no Service has port 0".to_owned()));
    };
    let model = situation.model;
    if address.is_loopback() && client.location != Location::Node {
        let what = if named.is_loopback() { "a loopback address of" } else { "an address that stands for" };
        return Err(Miss::pass(format!("{what} the client itself")));
    }
    if let Some(owner) = model.owner(Some(address), port, protocol, family) {
        return Ok(owner);
    }
    if let Some(reason) = health_check(model, address, port, protocol) {
        return Err(Miss::pass(reason));
    }
    let Some(node_port) = model.owner(None, port, protocol, family) else {
        return Err(not_a_service(situation, seen, address, port));
    };
    match not_served_on(situation, seen, address, port) {
        None => Ok(node_port),
        Some(reason) => {
            let name = &node_port.key.name;
            let reason = format!("port {port} is a node port of {name}, but {reason}");
            Err(filtered(situation, seen, address, &reason).unwrap_or_else(|| Miss::pass(reason)))
        }
    }
}

/// Returns the address that a connection to an address reaches: a loopback address, if it is the
/// unspecified one.
fn reached_by(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        other => other,
    }
}

/// Returns why an address does not serve node ports.
fn not_served_on(situation: Situation<'_>, seen: &Seen, address: IpAddr, port: NonZeroU16) -> Option<String> {
    let model = situation.model;
    let node = &model.snapshot().node;
    let without_loopback = match seen.rules {
        Some(mode @ (Mode::Nftables | Mode::Ipvs)) if address.is_loopback() => Some(mode),
        Some(mode @ Mode::Iptables) if address.is_loopback() && address.is_ipv6() => Some(mode),
        _ => None,
    };
    if let Some(mode) = without_loopback {
        return Some(format!("the {mode} mode serves no node ports on this loopback address"));
    }
    let stands_for = match address {
        IpAddr::V4(v4) if v4.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_loopback() => Ipv6Addr::LOCALHOST.into(),
        other => other,
    };
    if node.node_port_addresses.contains(&stands_for) {
        return None;
    }
    if address.is_loopback() || node.local_addresses.contains(&address) {
        let reason = "the address is none of this node's addresses that serve node ports (nodePortAddresses)";
        return Some(reason.to_owned());
    }
    let ports = model.ports_at(address);
    if !ports.is_empty() {
        return Some(format!("the address is one of Services, and has only the ports {}", listed(&ports)));
    }
    let known = proxied(model, address).or_else(|| endpoint(model, address, port));
    Some(known.unwrap_or_else(|| {
        "the address is none of this node's; if it is one of another node, that node serves the port"
            .to_owned()
    }))
}

/// Says what a destination is that no service port has.
fn not_a_service(situation: Situation<'_>, seen: &Seen, address: IpAddr, port: NonZeroU16) -> Miss {
    let model = situation.model;
    let ports = model.ports_at(address);
    let reason = if ports.is_empty() {
        let known = proxied(model, address).or_else(|| endpoint(model, address, port));
        known.unwrap_or_else(|| "no Service has this address and port".to_owned())
    } else {
        format!("the address has only the ports {}", listed(&ports))
    };
    filtered(situation, seen, address, &reason).unwrap_or_else(|| Miss::pass(reason))
}

/// Returns what the nftables rules do with a packet to a cluster IP that nothing translated. In the
/// ebpf mode these rules may be those of the backstop.
fn filtered(situation: Situation<'_>, seen: &Seen, address: IpAddr, reason: &str) -> Option<Miss> {
    let (who, next) = match (seen.rules?, situation.backstop) {
        (Mode::Nftables, Some(_)) => ("backstop", None),
        (Mode::Nftables, None) => ("mode", None),
        (Mode::Ebpf, Some(mode @ Mode::Nftables)) => ("backstop", Some(passed_to_backstop(mode, seen))),
        _ => return None,
    };
    let model = situation.model;
    let is_in_range = || model.snapshot().node.service_cidrs.iter().any(|range| range.contains(&address));
    let (verdict, reason) = if model.is_cluster_ip(address) {
        (Verdict::Refuse, format!("{reason}; the nftables {who} refuses other ports of cluster IPs"))
    } else if is_in_range() {
        let reason = format!("no Service has this address of a ServiceCIDR; the nftables {who} drops it");
        (Verdict::Drop, reason)
    } else {
        return None;
    };
    Some(Miss { verdict, reason, seen: next })
}

fn listed(ports: &[(NonZeroU16, &ServicePortKey)]) -> String {
    let text = |(port, key): &(NonZeroU16, &ServicePortKey)| {
        format!("{port}/{} ({})", key.name.protocol.name(), key.name)
    };
    ports.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn proxied(model: &Model, address: IpAddr) -> Option<String> {
    let service = model.service_with_proxy_ip(address)?;
    Some(format!(
        "the address is the load-balancer IP of {service} with ipMode Proxy: its packets go to the load balancer"
    ))
}

fn endpoint(model: &Model, address: IpAddr, port: NonZeroU16) -> Option<String> {
    let (key, endpoint) = model.endpoint_at(address, port)?;
    let name = &key.name;
    Some(if endpoint.port() == port.get() {
        format!("it is an endpoint of {name} itself")
    } else {
        format!("the address is that of the endpoint {endpoint} of {name}, not of a Service")
    })
}

fn health_check(model: &Model, address: IpAddr, port: NonZeroU16, protocol: Protocol) -> Option<String> {
    let (node, family) = (&model.snapshot().node, IpFamily::of(address));
    let is_own = node.local_addresses.contains(&address) || address.is_loopback();
    let listens = node.every_node_port_address.contains(&family) && is_own
        || node.node_port_addresses.contains(&address);
    let service = model.service_with_health_check(port, family).filter(|_| protocol == Protocol::Tcp)?;
    listens.then(|| format!("it is the health check node port of {service}: shunt itself answers there"))
}
