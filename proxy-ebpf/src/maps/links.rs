//! What links and addresses are.

use proxy_common::{Addr, layout::VlanKey};

use super::{BRIDGE_PORTS, DSR_NODES, VLANS, copy};

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
