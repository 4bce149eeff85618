//! Reads and writes entries of flows in place. The descriptions are those of
//! [`Tables`](proxy_common::tables::Tables).

use aya_ebpf::btf_maps::LruHashMap;
use proxy_common::{
    flow::PortUse,
    layout::{Flow, FlowKey, flow_state},
    packet::TcpFlags,
};

use super::{FLOWS, PLACEHOLDER, UNASSURED_FLOWS};

/// Returns the map for a flow in this state.
#[inline(always)]
pub fn flows_with(flow: &Flow) -> &'static LruHashMap<FlowKey, Flow, PLACEHOLDER> {
    if flow.is_assured() { &FLOWS } else { &UNASSURED_FLOWS }
}

#[inline(always)]
pub fn port_use(key: &FlowKey) -> Option<PortUse> {
    let flow = FLOWS.get_ptr(key).or_else(|| UNASSURED_FLOWS.get_ptr(key))?;
    // SAFETY: the pointer is valid until the program ends. If the kernel gave the element to
    // another flow meanwhile, a free port may count as taken, or the reverse. The insertion of
    // the entry looks again.
    unsafe { Some(PortUse { state: (*flow).state, used_ns: (*flow).used_ns }) }
}

#[inline(always)]
pub fn answered_flow(key: &FlowKey, tcp: TcpFlags, acknowledged: u32) -> Option<Flow> {
    let entry = answered_entry(key, tcp, acknowledged)?;
    // SAFETY: the pointer is valid until the program ends.
    Some(unsafe { *entry })
}

#[inline(always)]
fn answered_entry(key: &FlowKey, tcp: TcpFlags, acknowledged: u32) -> Option<*mut Flow> {
    let entry = FLOWS.get_ptr_mut(key).or_else(|| UNASSURED_FLOWS.get_ptr_mut(key))?;
    // SAFETY: the pointer is valid until the program ends. If the kernel gave the element to
    // another flow meanwhile, a reset of that flow's client may be taken for a forged one.
    unsafe {
        if tcp.has_ack() && (*entry).acknowledged != acknowledged {
            (*entry).acknowledged = acknowledged;
        }
    }
    Some(entry)
}

#[inline(always)]
pub fn observed_flow(
    key: &FlowKey,
    (tcp, acknowledged): (TcpFlags, u32),
    now_ns: u64,
    observe: impl FnOnce(&Flow) -> Option<u32>,
    flow: &mut Flow,
) -> bool {
    let Some(entry) = answered_entry(key, tcp, acknowledged) else { return false };
    // SAFETY: as in `touch_flow`.
    unsafe {
        *flow = *entry;
        let Some(observed) = observe(flow) else { return false };
        if flow.is_changed_by(observed, now_ns)
            && (*entry).source == flow.source
            && (*entry).destination == flow.destination
        {
            (*entry).state |= observed;
            (*entry).used_ns = now_ns;
        }
    }
    true
}

#[inline(always)]
pub fn set_acknowledged(key: &FlowKey, acknowledged: u32) {
    if let Some(flow) = UNASSURED_FLOWS.get_ptr_mut(key) {
        // SAFETY: as in `touch_flow`. If the kernel gave the element to another flow meanwhile,
        // that flow may stay unassured.
        unsafe { (*flow).acknowledged = acknowledged };
    }
}

#[inline(always)]
pub fn touch_flow(key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) -> bool {
    let Some(entry) = flows_with(flow).get_ptr_mut(key) else { return false };
    // SAFETY: the pointer is valid until the program ends. If two CPUs write at once, a bit may
    // be lost. The flow then lives longer than necessary. The kernel may give the element to
    // another flow at any time, without a grace period. It has other addresses then. Between
    // the comparison and the writes are a few instructions: in that time, another CPU would
    // have to evict the element and fill it. Its flow would be kept for a wrong time until its
    // next packet, but it would not be translated wrongly: the addresses are never written.
    unsafe {
        if (*entry).source == flow.source && (*entry).destination == flow.destination {
            (*entry).state = flow_state::after((*entry).state, observed);
            (*entry).used_ns = now_ns;
        }
    }
    true
}

#[inline(always)]
pub fn reuse_flow(key: &FlowKey, flow: &Flow) -> bool {
    let Some(before) = flows_with(flow).get_ptr_mut(key) else { return false };
    // SAFETY: as above. The addresses do not change.
    unsafe {
        if (*before).tuple() != flow.tuple() {
            return false;
        }
        (*before).service = flow.service;
        (*before).generation = flow.generation;
        (*before).state = flow.state;
        (*before).acknowledged = flow.acknowledged;
        (*before).used_ns = flow.used_ns;
    }
    true
}
