//! Finds the service port of a destination.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
};

use super::{Location, Question, Situation, Verdict, client::Whereabouts, hook::Seen};
use crate::{
    mode::Mode,
    model::{IpFamily, Model, Owner},
};

/// No service port has the destination.
#[derive(Debug)]
pub(super) struct Miss {
    pub(super) verdict: Verdict,
    pub(super) reason: String,
}

/// Finds the service port.
pub(super) fn find<'a>(
    situation: Situation<'a>,
    client: &Whereabouts,
    seen: &Seen,
    question: &Question,
) -> Result<Owner<'a>, Miss> {
    let Question { destination, protocol, .. } = *question;
    let (address, family) = (destination.ip().to_canonical(), IpFamily::of(destination.ip().to_canonical()));
    let pass = |reason: String| Miss { verdict: Verdict::Pass, reason };
    let Some(port) = NonZeroU16::new(destination.port()) else {
        return Err(pass("no Service has port 0".to_owned()));
    };
    let model = situation.model;
    let is_loopback = address.is_loopback();
    if is_loopback && client.location != Location::Node {
        return Err(pass("a loopback address of the client itself".to_owned()));
    }
    if let Some(owner) = model.owner(Some(address), port, protocol, family) {
        return Ok(owner);
    }
    let Some(node_port) = model.owner(None, port, protocol, family) else {
        return Err(not_a_service(model, seen, address));
    };
    match not_served_on(situation, seen, address) {
        None => Ok(node_port),
        Some(reason) => {
            let name = &node_port.key.name;
            Err(pass(format!("port {port} is a node port of {name}, but {reason}")))
        }
    }
}

/// Returns why an address does not serve node ports.
fn not_served_on(situation: Situation<'_>, seen: &Seen, address: IpAddr) -> Option<String> {
    let node = &situation.model.snapshot().node;
    let stands_for = match address {
        IpAddr::V4(v4) if v4.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(v6) if v6.is_loopback() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        other => other,
    };
    if !node.node_port_addresses.contains(&stands_for) {
        return Some(
            "the address is none of this node's addresses that serve node ports (nodePortAddresses)"
                .to_owned(),
        );
    }
    let without_loopback = match seen.rules {
        Some(mode @ (Mode::Nftables | Mode::Ipvs)) if address.is_loopback() => Some(mode),
        Some(mode @ Mode::Iptables) if address.is_loopback() && address.is_ipv6() => Some(mode),
        _ => None,
    };
    without_loopback.map(|mode| format!("the {mode} mode serves no node ports on this loopback address"))
}

/// Says what a destination is that no service port has.
fn not_a_service(model: &Model, seen: &Seen, address: IpAddr) -> Miss {
    let ports = model.ports_at(address);
    let is_nftables = seen.rules == Some(Mode::Nftables);
    if ports.is_empty() {
        let ranges = &model.snapshot().node.service_cidrs;
        return if is_nftables && ranges.iter().any(|range| range.contains(&address)) {
            let reason = "no Service has this address of a ServiceCIDR; the nftables mode drops it";
            Miss { verdict: Verdict::Drop, reason: reason.to_owned() }
        } else {
            Miss { verdict: Verdict::Pass, reason: "no Service has this address and port".to_owned() }
        };
    }
    let others: Vec<_> = ports
        .iter()
        .map(|(port, key)| format!("{port}/{} ({})", key.name.protocol.name(), key.name))
        .collect();
    let (verdict, why) = if is_nftables {
        (Verdict::Refuse, "; the nftables mode refuses other ports of cluster IPs")
    } else {
        (Verdict::Pass, "")
    };
    Miss { verdict, reason: format!("the address has only the ports {}{why}", others.join(", ")) }
}
