//! Finds the destinations whose packets a trace follows through netfilter.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Bound,
};

use super::filter::TraceFilter;
use crate::{
    kernel::packet_trace::Destination,
    model::{Frontend, FrontendKind, IpFamily, ServicePortKey},
    sync::{Inspected, Inspector, NoAnswer},
};

/// How many service ports one reading of the loop covers.
const PORTS_AT_ONCE: usize = 512;

/// Returns the destinations that lead to the Services of a filter.
pub(super) async fn of(inspector: &Inspector, filter: &TraceFilter) -> Result<Vec<Destination>, NoAnswer> {
    let (mut destinations, mut last) = (Vec::new(), None);
    loop {
        let (filter, after) = (filter.clone(), last.take());
        let read = move |inspected: &Inspected<'_>| part(inspected, &filter, after);
        let (found, next) = inspector.read(read).await?;
        destinations.extend(found);
        match next {
            Some(key) => last = Some(key),
            None => break,
        }
    }
    destinations.sort_unstable();
    destinations.dedup();
    Ok(destinations)
}

/// Returns the destinations of some service ports behind a key, and the last key if there are more.
fn part(
    inspected: &Inspected<'_>,
    filter: &TraceFilter,
    after: Option<ServicePortKey>,
) -> (Vec<Destination>, Option<ServicePortKey>) {
    let snapshot = inspected.model.snapshot();
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let ports: Vec<_> = snapshot.ports.range((from, Bound::Unbounded)).take(PORTS_AT_ONCE).collect();
    let last = ports.last().filter(|_| ports.len() == PORTS_AT_ONCE).map(|(key, _)| (*key).clone());
    let wanted = ports.iter().filter(|(key, _)| filter.matches_service(Some(&key.name.to_string())));
    // Rules refuse connections to other ports of cluster IPs, which belong to no Service.
    let has_other_ports = filter.matches_service(None);
    let found = wanted.flat_map(|(key, port)| {
        let addresses = |Frontend { kind, address, port, .. }: &Frontend| -> Vec<Destination> {
            let is_whole = has_other_ports && *kind == FrontendKind::ClusterIp;
            let at = |address: &IpAddr| {
                if is_whole {
                    return Destination::Address(*address);
                }
                Destination::Port(SocketAddr::new(*address, port.get()), key.name.protocol)
            };
            let node_port_addresses = || {
                let addresses = snapshot.node.node_port_addresses.iter();
                addresses.filter(|address| IpFamily::of(**address) == key.family).map(at).collect()
            };
            address.as_ref().map_or_else(node_port_addresses, |address| vec![at(address)])
        };
        port.frontends.iter().flat_map(addresses).collect::<Vec<_>>()
    });
    (found.collect(), last)
}
