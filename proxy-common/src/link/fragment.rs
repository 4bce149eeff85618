//! Fragments: only a datagram's first has ports; the others follow it.

use super::{Outcome, rewritten};
use crate::{
    layout::{Direction, Flow, FragmentKey, FragmentValue},
    packet::{Fragment, Frame, Packet},
    rewrite,
    tables::Tables,
};

/// Remembers what becomes of a first fragment; of other packets nothing, for which callers need not ask. Five parameters: of a
/// function with more, the verifier of kernel 7.2 awaits them on the stack, though the compiler may have dropped one.
#[inline(never)]
pub(super) fn note<T: Tables>(tables: &T, packet: &Packet, direction: Direction, flow: &Flow, mark: u32) {
    let Fragment::First { id } = packet.fragment else { return };
    let value = FragmentValue {
        source: flow.source.addr,
        destination: flow.destination.addr,
        mark,
        noted_seconds: seconds(tables),
    };
    tables.set_fragment(&key(packet, direction, id), &value);
}

/// Forgets an older datagram that had the same identification: there are only 65,536 of them in IPv4, for all that a host sends
/// to another, and the datagram at hand may be nobody's.
#[inline(never)]
pub(super) fn forget<T: Tables>(tables: &T, packet: &Packet, direction: Direction, id: u32) {
    tables.remove_fragment(&key(packet, direction, id));
}

/// Does with a later fragment what was done with the first. Where that was never seen, the fragment is left alone: of those
/// that overtake it, as of those whose datagram is nobody's here, nothing is known.
#[inline(never)]
pub(super) fn follow<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    direction: Direction,
    id: u32,
) -> Outcome {
    let Some(first) = tables.fragment(&key(packet, direction, id)) else { return Outcome::Proceed };
    if seconds(tables).wrapping_sub(first.noted_seconds) > LIFETIME_SECONDS {
        return Outcome::Proceed;
    }
    if first.mark != 0 {
        frame.set_mark(frame.mark() | first.mark);
    }
    rewritten(tables, rewrite::later_fragment(frame, packet, first.source, first.destination))
}

/// How long a datagram is waited for: as long as hosts wait for its fragments (RFC 8200, section 4.5; Linux 30 s for IPv4).
const LIFETIME_SECONDS: u32 = 60;

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "it wraps after 136 years of uptime, as the comparison does"
)]
fn seconds(tables: &impl Tables) -> u32 {
    (tables.now_ns() / 1_000_000_000) as u32
}

#[inline(always)]
const fn key(packet: &Packet, direction: Direction, id: u32) -> FragmentKey {
    FragmentKey {
        source: packet.source,
        destination: packet.destination,
        id,
        proto: packet.proto,
        direction: direction as u8,
        zero: 0,
    }
}
