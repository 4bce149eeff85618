//! The link programs, for packets whose sockets no socket program saw. The decisions are in
//! `proxy_common::link`.
#![forbid(unsafe_code)]

use proxy_common::link::{self, Outcome};

use crate::{
    ctx::{DROP, Layer, NEXT, REDIRECT, Skb, Xdp},
    maps::{self, EntryPoint, Kernel},
};

/// Handles a packet that comes in on a link.
#[inline(always)]
pub fn ingress<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    // A packet that a bridge forwards, or that is for another host, is not translated here.
    if !skb.is_for_this_host(maps::bridge_of) {
        return NEXT;
    }
    // The program on the link of the VLAN translates it, and the direct path knows it by that link.
    if skb.is_of_vlan(maps::is_vlan) {
        return NEXT;
    }
    maps::begin_capture(skb);
    let Some((header, version)) = skb.ip() else { return NEXT };
    let code = code(link::ingress(skb, &Kernel::<P>::NEW, header, version));
    maps::end_capture::<L, P>(skb, code);
    code
}

/// Handles a packet that comes through the tunnel from another node.
#[inline(always)]
pub fn tunneled<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    maps::begin_capture(skb);
    let Some((header, version)) = skb.ip() else { return DROP };
    let code = code(link::tunneled(skb, &Kernel::<P>::NEW, header, version));
    maps::end_capture::<L, P>(skb, code);
    code
}

/// Handles a packet that leaves on a link.
#[inline(always)]
pub fn egress<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    if link::leaves_at_once(skb) {
        return NEXT;
    }
    maps::begin_capture(skb);
    let Some((header, version)) = skb.ip() else { return NEXT };
    let code = code(link::egress(skb, &Kernel::<P>::NEW, header, version));
    maps::end_capture::<L, P>(skb, code);
    code
}

/// Handles a frame that comes in on a link, before the stack. While packets are captured, all go on
/// to the program that captures them.
#[inline(always)]
pub fn early<P: EntryPoint>(frame: &Xdp) -> u32 {
    let outcome = match frame.ip() {
        Some((header, version)) if !maps::captures_packets() => {
            link::direct::early(frame, &Kernel::<P>::NEW, header, version)
        }
        _ => Outcome::Proceed,
    };
    Xdp::code(outcome)
}

#[inline(always)]
const fn code(outcome: Outcome) -> i32 {
    match outcome {
        Outcome::Proceed | Outcome::Forward | Outcome::Refuse => NEXT,
        Outcome::Drop => DROP,
        Outcome::Redirect | Outcome::Transmit => REDIRECT,
    }
}
