//! The hooks of links: what no socket hook saw. What becomes of each packet is decided in `proxy_common::link`.
#![forbid(unsafe_code)]

use proxy_common::link::{self, Outcome};

use crate::{
    ctx::{Layer, Skb},
    maps::{self, EntryPoint, Kernel},
};

/// `TC_ACT_UNSPEC`, `TCX_NEXT`: other programs on the link see the packet too.
const NEXT: i32 = -1;
/// `TC_ACT_SHOT`, `TCX_DROP`.
const DROP: i32 = 2;

/// A packet comes in on a link.
#[inline(always)]
pub fn ingress<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    // What a bridge passes on, or another host is meant to have, is not this node's to translate.
    if !skb.is_for_this_host(maps::bridge_of) {
        return NEXT;
    }
    match skb.ip() {
        Some((header, version)) => code(link::ingress(skb, &Kernel::<P>::NEW, header, version)),
        None => NEXT,
    }
}

/// A packet leaves on a link.
#[inline(always)]
pub fn egress<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    match skb.ip() {
        Some((header, version)) => code(link::egress(skb, &Kernel::<P>::NEW, header, version)),
        None => NEXT,
    }
}

#[inline(always)]
const fn code(outcome: Outcome) -> i32 {
    match outcome {
        Outcome::Proceed => NEXT,
        Outcome::Drop => DROP,
    }
}
