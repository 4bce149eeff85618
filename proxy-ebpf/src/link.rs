//! The link programs, for packets whose sockets no socket program saw. The decisions are in
//! `proxy_common::link`.
#![forbid(unsafe_code)]

use proxy_common::link::{self, Outcome};

use crate::{
    ctx::{Layer, Skb},
    maps::{self, EntryPoint, Kernel},
};

/// `TC_ACT_UNSPEC`, `TCX_NEXT`: the packet passes to the other programs on the link.
const NEXT: i32 = -1;
/// `TC_ACT_SHOT`, `TCX_DROP`.
const DROP: i32 = 2;

/// `TC_ACT_REDIRECT`, `TCX_REDIRECT`: the packet leaves on the link that the frame names.
const REDIRECT: i32 = 7;

/// Handles a packet that comes in on a link.
#[inline(always)]
pub fn ingress<L: Layer, P: EntryPoint>(skb: &Skb<L>) -> i32 {
    // A packet that a bridge forwards, or that is for another host, is not translated here.
    if !skb.is_for_this_host(maps::bridge_of) {
        return NEXT;
    }
    match skb.ip() {
        Some((header, version)) => code(link::ingress(skb, &Kernel::<P>::NEW, header, version)),
        None => NEXT,
    }
}

/// Handles a packet that leaves on a link.
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
        Outcome::Proceed | Outcome::Forward => NEXT,
        Outcome::Drop => DROP,
        Outcome::Redirect => REDIRECT,
    }
}
