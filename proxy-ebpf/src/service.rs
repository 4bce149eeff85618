//! From a dialled destination to a Service, and from a Service to one of its endpoints.
#![forbid(unsafe_code)]

use proxy_common::{
    Addr, Proto,
    layout::{AffinityKey, AffinityValue, Endpoint, EndpointKey, List, MemberKey, ServiceKey, ServiceValue},
    select::Slots,
};

use crate::{ctx, maps};

/// Finds the Service of a destination that a socket dials. `in_node` tells whether the socket is in the node's network
/// namespace, where loopback is the node's own; it is asked only where that matters.
#[inline(always)]
pub fn find(dialled: &Endpoint, proto: Proto, in_node: impl FnOnce() -> bool) -> Option<ServiceValue> {
    let Endpoint { addr, port, .. } = *dialled;
    if !addr.is_unspecified()
        && let Some(service) = maps::service(&ServiceKey::new(addr, port, proto))
    {
        return Some(service);
    }
    let service = maps::service(&ServiceKey::new(addr.any(), port, proto))?;
    let node_address = addr.node_address();
    if node_address.is_loopback() && !in_node() {
        return None;
    }
    maps::is_node_address(&node_address).then_some(service)
}

/// Chooses an endpoint for a new connection of the client whose sockets live in network namespace `netns`.
#[inline(always)]
pub fn choose(service: &ServiceValue, slots: Slots, netns: impl FnOnce() -> u64) -> Option<Endpoint> {
    if service.affinity_seconds == 0 {
        return random(service, slots);
    }
    let client =
        AffinityKey { addr: Addr::UNSPECIFIED_V6, netns: netns(), service: service.service, zero: 0 };
    let now = ctx::now_ns();
    let endpoint = match maps::affinity(&client) {
        Some(last)
            if last.is_fresh(now, service.affinity_seconds) && is_in(service, slots.list, last.endpoint) =>
        {
            last.endpoint
        }
        _ => random(service, slots)?,
    };
    maps::set_affinity(&client, &AffinityValue { endpoint, zero: 0, used_ns: now });
    Some(endpoint)
}

/// Whether a UDP flow to an endpoint may go on: the endpoint still serves.
#[inline(always)]
pub fn still_serves(service: &ServiceValue, endpoint: Endpoint) -> bool {
    is_in(service, List::Serving.number(), endpoint)
}

#[inline(always)]
fn is_in(service: &ServiceValue, list: u32, endpoint: Endpoint) -> bool {
    maps::is_member(&MemberKey { service: service.service, list, endpoint })
}

#[inline(always)]
fn random(service: &ServiceValue, slots: Slots) -> Option<Endpoint> {
    maps::endpoint(&EndpointKey {
        service: service.service,
        generation: service.generation,
        slot: slots.pick(ctx::random()),
        list: slots.list,
    })
}
