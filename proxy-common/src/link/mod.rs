//! What becomes of packets on links: translated as they come in, before netfilter sees them, and back as they leave, after it.
//!
//! Either way the kernel's own connection tracking sees one consistent flow, between client and endpoint.

mod error;
mod fragment;
mod original;
mod reply;

use crate::{
    Protocol,
    layout::{Counter, Direction, Flow, FlowKey, ProgramError, Tally},
    packet::{Fragment, Frame, ICMP, ICMPV6, IpVersion, Packet},
    tables::Tables,
};

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes on, to other programs on the link too.
    Proceed,
    /// It ends here.
    Drop,
}

/// A packet for this node comes in on a link.
#[inline(always)]
pub fn ingress(frame: &impl Frame, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    pass(frame, tables, header, version, Direction::Original)
}

/// A packet leaves on a link.
#[inline(always)]
pub fn egress(frame: &impl Frame, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    forget_marks(frame, tables);
    pass(frame, tables, header, version, Direction::Reply)
}

/// A packet passes where those of a direction are translated; the direction is known where this is built.
#[inline(always)]
fn pass(
    frame: &impl Frame,
    tables: &impl Tables,
    header: u32,
    version: IpVersion,
    direction: Direction,
) -> Outcome {
    let mut packet = Packet::at(header, version);
    if packet.read(frame).is_none() {
        return Outcome::Proceed;
    }
    let Some(protocol) = Protocol::of_packet(packet.proto) else {
        return match (packet.version, packet.proto, direction) {
            (IpVersion::V4, ICMP, Direction::Original) | (IpVersion::V6, ICMPV6, Direction::Original) => {
                error::about_reply(frame, tables, &packet)
            }
            (IpVersion::V4, ICMP, Direction::Reply) | (IpVersion::V6, ICMPV6, Direction::Reply) => {
                error::about_original(frame, tables, &packet)
            }
            _ => Outcome::Proceed,
        };
    };
    match packet.fragment {
        Fragment::Whole => {}
        Fragment::First { id } => fragment::forget(tables, &packet, direction, id),
        Fragment::Later { id } => return fragment::follow(frame, tables, &packet, direction, id),
    }
    let Some(ports) = packet.ports(frame) else { return Outcome::Proceed };
    match direction {
        Direction::Original if original::may_concern(tables, &packet, ports) => {
            original::transport(frame, tables, &packet, protocol, ports)
        }
        Direction::Reply if reply::may_concern(tables, &packet, protocol, ports) => {
            reply::transport(frame, tables, &packet, protocol, ports)
        }
        Direction::Original | Direction::Reply => Outcome::Proceed,
    }
}

/// Lets a packet go on that may be for a Service, or an answer, and is cut short. A call of its own, for its stack.
#[inline(never)]
fn malformed<T: Tables>(tables: &T) -> Outcome {
    tables.failed(ProgramError::Malformed);
    Outcome::Proceed
}

/// What a packet asked of netfilter is done when it leaves. The packets of a tunnel, which inherit its mark, must not ask
/// again.
#[inline(always)]
fn forget_marks(frame: &impl Frame, tables: &impl Tables) {
    let mark = frame.mark();
    if mark != 0
        && let Some(node) = tables.node()
        && mark & (node.masquerade_mark | node.reject_mark) != 0
    {
        frame.set_mark(mark & !(node.masquerade_mark | node.reject_mark));
    }
}

/// Whether a TCP connection that nothing is known of may be one that is about to be: while a map of flows of another size takes the
/// place of the old one. Its segment is dropped, and sent again a moment later.
#[inline(always)]
fn is_settling(tables: &impl Tables, now_ns: u64) -> bool {
    tables.node().is_some_and(|node| now_ns < node.settling_until_ns)
}

/// Lets a packet go on as it was rewritten. One that could not be, and may be half changed, ends here.
#[inline(always)]
fn rewritten(tables: &impl Tables, done: Option<()>) -> Outcome {
    if done.is_some() {
        return Outcome::Proceed;
    }
    tables.failed(ProgramError::NotRewritten);
    dropped(tables, Counter::NotRewritten)
}

/// The same, and counts it for the Service whose flow it is of.
#[inline(always)]
fn delivered(tables: &impl Tables, key: &FlowKey, flow: &Flow, tally: Tally, done: Option<()>) -> Outcome {
    tables.tally(flow.service, if done.is_some() { tally } else { Tally::Drop });
    if done.is_none() {
        tables.trace(Counter::NotRewritten, key, flow);
    }
    rewritten(tables, done)
}

/// The bytes of an IP packet.
#[inline(always)]
fn bytes(frame: &impl Frame, packet: &Packet) -> u32 {
    frame.length().wrapping_sub(packet.header)
}

#[inline(always)]
fn dropped(tables: &impl Tables, why: Counter) -> Outcome {
    tables.count(why);
    Outcome::Drop
}

#[cfg(test)]
mod tests;
