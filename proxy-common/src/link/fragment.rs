//! Fragments: only the first fragment of a datagram has ports. The others are translated like the
//! first.

use super::{Outcome, dsr, finish};
use crate::{
    Addr,
    layout::{Direction, Flow, FragmentKey, FragmentValue},
    packet::{Fragment, Frame, Packet},
    rewrite,
    tables::Tables,
};

/// Records the translation of a first fragment. Does nothing for other packets, and callers may
/// skip the call for them. Five parameters are the limit: with more, the verifier of kernel 7.2
/// expects arguments on the stack even if the compiler dropped a parameter.
#[inline(never)]
pub(super) fn record_first<F: Frame, T: Tables>(
    tables: &T,
    packet: &Packet,
    direction: Direction,
    flow: &Flow,
    mark: u32,
) {
    if packet.fragment != Fragment::First {
        return;
    }
    let goes_through_tunnel = tables.has_tunnel() && flow.is_dsr();
    let value = FragmentValue {
        source: flow.source.addr,
        destination: if goes_through_tunnel { Addr::UNSPECIFIED_V6 } else { flow.destination.addr },
        mark,
        created_seconds: seconds(tables),
    };
    tables.set_fragment(&key::<F>(packet, direction), &value);
}

/// Records the addresses of a first fragment that the program sends on itself.
#[inline(never)]
pub(super) fn record<F: Frame, T: Tables>(
    tables: &T,
    packet: &Packet,
    direction: Direction,
    source: &Addr,
    destination: &Addr,
) {
    let (source, destination) = (*source, *destination);
    let value = FragmentValue { source, destination, mark: 0, created_seconds: seconds(tables) };
    tables.set_fragment(&key::<F>(packet, direction), &value);
}

/// Returns true for a later fragment if the first one was recorded.
#[inline(never)]
pub(super) fn is_recorded<F: Frame, T: Tables>(tables: &T, packet: &Packet, direction: Direction) -> bool {
    find::<F>(tables, packet, direction).is_some()
}

/// Returns what was recorded of the first fragment of a datagram.
#[inline(always)]
fn find<F: Frame>(tables: &impl Tables, packet: &Packet, direction: Direction) -> Option<FragmentValue> {
    let first = tables.fragment(&key::<F>(packet, direction))?;
    let is_current = seconds(tables).wrapping_sub(first.created_seconds) <= LIFETIME_SECONDS;
    is_current.then_some(first)
}

/// Removes the entry of an older datagram with the same identification. IPv4 has only 65,536
/// identifications between two hosts, and the new datagram may belong to no Service.
#[inline(never)]
pub(super) fn remove<F: Frame, T: Tables>(tables: &T, packet: &Packet, direction: Direction) {
    tables.remove_fragment(&key::<F>(packet, direction));
}

/// Translates a later fragment like the first. Without an entry it passes unchanged: it overtook
/// the first fragment, or its datagram belongs to no Service.
#[inline(never)]
pub(super) fn translate_later<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    direction: Direction,
) -> Outcome {
    let Some(first) = find::<F>(tables, packet, direction) else { return Outcome::Proceed };
    // The direction is a constant in each program, and the verifier follows one branch.
    if tables.has_tunnel() && !F::IS_TUNNELED {
        match direction {
            Direction::Original if first.destination.is_unspecified() => {
                return dsr::send(frame, tables, packet, &first.source);
            }
            Direction::Reply if first.destination != packet.destination => {
                return dsr::reply::send_later(frame, tables, packet, &first);
            }
            _ => {}
        }
    }
    if first.mark != 0 {
        frame.set_mark(frame.mark() | first.mark);
    }
    finish(tables, rewrite::later_fragment(frame, packet, first.source, first.destination))
}

/// How long hosts wait for the fragments of a datagram (RFC 8200, section 4.5; Linux 30 s for
/// IPv4).
const LIFETIME_SECONDS: u32 = 60;

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "it wraps after 136 years of uptime, as the comparison does"
)]
fn seconds(tables: &impl Tables) -> u32 {
    (tables.now_ns() / 1_000_000_000) as u32
}

/// Returns the key of a datagram. Fragments from the tunnel follow only a first fragment from
/// there: otherwise they could join a datagram of any flow.
#[inline(always)]
const fn key<F: Frame>(packet: &Packet, direction: Direction) -> FragmentKey {
    FragmentKey {
        source: packet.source,
        destination: packet.destination,
        id: packet.id,
        proto: packet.proto,
        direction: direction as u8,
        tunneled: F::IS_TUNNELED as u8,
        zero: 0,
    }
}
