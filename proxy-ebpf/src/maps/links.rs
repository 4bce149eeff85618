//! What links and addresses are.

use proxy_common::{
    Addr,
    layout::{DirectWatch, KnownRoute, VlanKey},
    packet::{Route, RoutedPacket},
};

use super::{BRIDGE_PORTS, DIRECT_WATCH, DSR_NODES, ROUTES, VLANS, copy};

/// Returns what an address is to a node with the tunnel ([`DsrAddress`]), or 0. A function call of
/// its own: LLVM would leave parts of an `Option` undefined where two calls are combined, and the
/// verifier does not permit that.
#[inline(never)]
pub(super) fn dsr_address(address: &Addr) -> u32 {
    copy!(DSR_NODES, address).map_or(0, u32::from)
}

/// Returns the hardware address of the bridge, if a link is a port of one.
#[inline(always)]
pub fn bridge_of(link: u32) -> Option<[u8; 6]> {
    BRIDGE_PORTS.get_ptr(&link).map(|address| {
        // SAFETY: the pointer is valid until the program ends. If userspace writes it at the same
        // time, one packet may be taken for one of another host.
        unsafe { (*address).bytes }
    })
}

/// Returns true if the link of a VLAN has programs of its own.
#[inline(always)]
pub fn is_vlan(vlan: &VlanKey) -> bool {
    VLANS.get_ptr(vlan).is_some()
}

#[inline(always)]
pub(super) fn known_route(packet: &RoutedPacket<'_>, (link, now_ns): (u32, u64), route: &mut Route) -> bool {
    let watch = DIRECT_WATCH.get(0).copied().unwrap_or(DirectWatch::NONE);
    let ports = watch.port_mask(now_ns);
    let Some(known) = ROUTES.get_ptr(KnownRoute::place_of(packet, ports)) else { return false };
    // SAFETY: the pointer is valid until the program ends. The value is that of this CPU. No other
    // link program runs there meanwhile, because they run with bottom halves disabled. With
    // PREEMPT_RT from kernel 6.18 on, another one can: it may mix two routes, for half a second.
    let known = unsafe { &*known };
    known.give(route);
    known.is_usable(packet, link, now_ns, (ports, watch.since_ns))
}

#[inline(always)]
pub(super) fn remember_route(
    packet: &RoutedPacket<'_>,
    (link, now_ns): (u32, u64),
    route: &Route,
    to_peer: bool,
) {
    let watch = DIRECT_WATCH.get(0).copied().unwrap_or(DirectWatch::NONE);
    if let Some(known) = ROUTES.get_ptr_mut(KnownRoute::place_of(packet, watch.port_mask(now_ns))) {
        // SAFETY: as above.
        unsafe { (*known).set(packet, link, route, (to_peer, now_ns)) };
    }
}
