//! Lookup of the Service of a destination, and choice of one of its endpoints.

use crate::{
    Addr, Protocol,
    layout::{AffinityKey, AffinityValue, Endpoint, EndpointKey, List, MemberKey, ServiceKey, ServiceValue},
    prefilter::PrefilterItem,
    select::Slots,
    tables::Tables,
};

/// Returns the two items that an address and port can have in the prefilter as a VIP: as an address
/// of a Service, and as a node port.
#[inline(always)]
pub const fn items_of_vip(addr: &Addr, port: u16) -> [PrefilterItem; 2] {
    [PrefilterItem::of_service(addr, port), PrefilterItem::of_node_port(addr, port)]
}

/// Returns true if an address and port may be a VIP. The prefilter excludes most.
#[inline(always)]
pub fn may_be_vip(tables: &impl Tables, addr: &Addr, port: u16) -> bool {
    tables.prefilter_may_contain_any(items_of_vip(addr, port))
}

/// Returns true if an address and port may be an endpoint, or may have been one.
#[inline(always)]
pub fn may_be_endpoint(tables: &impl Tables, addr: &Addr, port: u16) -> bool {
    tables.prefilter_may_contain(PrefilterItem::of_endpoint(addr, port))
}

/// Finds the Service of a destination. `on_node` returns true if the client shares the loopback of
/// the node. It is called only for loopback addresses.
#[inline(always)]
pub fn find(
    tables: &impl Tables,
    destination: &Endpoint,
    protocol: Protocol,
    on_node: impl FnOnce() -> bool,
) -> Option<ServiceValue> {
    if let Some(service) = find_by_address(tables, destination, protocol) {
        return Some(service);
    }
    find_node_port(tables, destination, protocol, on_node)
}

/// Finds the Service of a packet's destination after [`may_be_vip`] returned true. The prefilter
/// saves one of two lookups for most packets to node ports.
#[inline(always)]
pub fn find_on_link(
    tables: &impl Tables,
    destination: &Endpoint,
    protocol: Protocol,
) -> Option<ServiceValue> {
    if tables.prefilter_may_contain(PrefilterItem::of_service(&destination.addr, destination.port))
        && let Some(service) = find_by_address(tables, destination, protocol)
    {
        return Some(service);
    }
    find_node_port(tables, destination, protocol, || false)
}

/// Finds the Service of a packet that came through the tunnel from another node. To a node port, it
/// has an address of that node.
#[inline(always)]
pub fn find_tunneled(
    tables: &impl Tables,
    destination: &Endpoint,
    protocol: Protocol,
) -> Option<ServiceValue> {
    let key = ServiceKey::new(destination.addr, destination.port, protocol).tunneled();
    match tables.service(&key) {
        None => tables.service(&ServiceKey { addr: destination.addr.any(), ..key }),
        service => service,
    }
}

/// Finds the Service with this address and port. Node ports are not found.
#[inline(always)]
pub fn find_by_address(
    tables: &impl Tables,
    destination: &Endpoint,
    protocol: Protocol,
) -> Option<ServiceValue> {
    let Endpoint { addr, port, .. } = *destination;
    if addr.is_unspecified() { None } else { tables.service(&ServiceKey::new(addr, port, protocol)) }
}

#[inline(always)]
fn find_node_port(
    tables: &impl Tables,
    destination: &Endpoint,
    protocol: Protocol,
    on_node: impl FnOnce() -> bool,
) -> Option<ServiceValue> {
    let service = tables.service(&ServiceKey::new(destination.addr.any(), destination.port, protocol))?;
    let node_address = destination.addr.node_address();
    if node_address.is_loopback() && !on_node() {
        return None;
    }
    tables.is_node_address(&node_address).then_some(service)
}

impl AffinityKey {
    /// Returns the key of a socket. All sockets of a network namespace, of a pod or the node, count
    /// as one client.
    #[inline(always)]
    pub const fn of_sockets(netns: u64, service: u32) -> Self {
        Self { addr: Addr::UNSPECIFIED_V6, netns, service, zero: 0 }
    }

    /// Returns the key of a packet. All packets from an address count as one client.
    #[inline(always)]
    pub const fn of_packets(source: Addr, service: u32) -> Self {
        Self { addr: source, netns: 0, service, zero: 0 }
    }
}

/// Chooses an endpoint for a new connection: the last one of the client if the Service has
/// affinity, otherwise that of `slot`. Calls `client` only if the Service has affinity. Returns
/// `None` if the chosen slot was removed after the Service was read.
#[inline(always)]
pub fn choose_endpoint(
    tables: &impl Tables,
    service: &ServiceValue,
    slots: Slots,
    client: impl FnOnce() -> AffinityKey,
    slot: impl FnOnce() -> u32,
) -> Option<Endpoint> {
    let new_endpoint = || {
        let key = EndpointKey { service: service.service, list: slots.list, slot: slot() };
        tables.endpoint(&key)
    };
    if service.affinity_seconds == 0 {
        return new_endpoint();
    }
    let key = client();
    let now = tables.now_ns();
    let endpoint = match tables.affinity(&key) {
        Some(last)
            if last.is_fresh(now, service.affinity_seconds)
                && is_in_list(tables, service.service, slots.list, last.endpoint) =>
        {
            last.endpoint
        }
        _ => new_endpoint()?,
    };
    tables.set_affinity(&key, &AffinityValue { endpoint, zero: 0, used_ns: now });
    Some(endpoint)
}

/// Returns true if an endpoint is serving, so that a UDP flow to it goes on.
#[inline(always)]
pub fn is_serving(tables: &impl Tables, service: u32, endpoint: Endpoint) -> bool {
    is_in_list(tables, service, List::Serving.number(), endpoint)
}

#[inline(always)]
fn is_in_list(tables: &impl Tables, service: u32, list: u32, endpoint: Endpoint) -> bool {
    tables.is_member(&MemberKey { service, list, endpoint })
}
