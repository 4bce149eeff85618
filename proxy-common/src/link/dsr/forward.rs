//! Packets from the tunnel that the program sends on without the stack.
//!
//! The node that the client reached sends on what the endpoint's node sent back through the tunnel.
//! The kernel would drop a packet whose source is an address of this node, and a node port has such
//! an address. So the program asks for the route. Netfilter sees neither this packet nor that of
//! the client.
//!
//! The endpoint's node sends on the packets of whole flows ([`direct::is_whole`]).

use super::{longest_to, segments};
use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, FlowKey, flags},
    link::{Notes, Outcome, count_drop, direct, fragment, icmp_error},
    packet::{Fragment, Frame, Packet, Route, RoutedPacket, TcpFlags, Tuple},
    service,
    tables::Tables,
};

/// Sends a reply on to its client.
#[inline(never)]
pub(super) fn forward<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) -> Outcome {
    limit_segments(frame, tables, packet);
    let outcome = send_on(frame, tables, packet, false);
    if matches!(outcome, Outcome::Redirect) {
        tables.count(Counter::ReplyForwarded);
        Notes::leave(frame, Notes::FORWARDED);
    }
    outcome
}

/// Handles a packet of a whole flow, which is translated. `packet` is read again.
#[inline(never)]
pub(super) fn deliver<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet) -> Outcome {
    let is_plain = packet.read(frame).is_some()
        && packet.has_plain_header()
        && matches!(packet.fragment, Fragment::Whole)
        && frame.mark() == 0;
    if is_plain { send_on(frame, tables, packet, true) } else { Outcome::Proceed }
}

/// Sends a packet out on the link to which the kernel would forward it, or only if that is a link
/// of the direct path. [`Outcome::Proceed`] sends it through the stack. A reply never goes to a
/// pod: the packets of pods do not go through the tunnel.
#[inline(never)]
fn send_on<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, only_direct: bool) -> Outcome {
    let mut route = Route::NONE;
    if packet.hops <= 1 {
        return Outcome::Proceed;
    }
    let fits = find_route(frame, packet, length_of(frame, packet), &mut route);
    if only_direct {
        if !fits || !tables.is_direct_link(route.link) {
            return Outcome::Proceed;
        }
    } else if (fits || find_route(frame, packet, 1, &mut route)) && tables.is_local_link(route.link) {
        return count_drop(tables, Counter::TunnelRefused);
    }
    if fits { direct::leave_by(frame, tables, packet, packet.hops, &route) } else { Outcome::Proceed }
}

/// Returns true for a packet of a Service with direct server return to its client, and for an ICMP
/// error about a packet of the client.
#[inline(never)]
pub(super) fn is_reply<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) -> bool {
    if packet.fragment == Fragment::Later {
        return fragment::is_recorded::<F, _>(tables, packet, Direction::Reply);
    }
    let (Some(protocol), Some(ports)) = (Protocol::of_packet(packet.proto), packet.ports()) else {
        return is_error(frame, tables, packet);
    };
    let is_reply = is_of_service(tables, protocol, &packet.tuple(ports));
    if is_reply && packet.fragment == Fragment::First {
        fragment::record::<F, _>(tables, packet, Direction::Reply, &packet.source, &packet.destination);
    }
    is_reply
}

/// A function call of its own saves stack.
#[inline(never)]
fn is_error<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) -> bool {
    let mut inner = Packet::at(packet.payload() + 8, packet.version);
    if !icmp_error::is_about(frame, packet, &mut inner) || inner.source != packet.destination {
        return false;
    }
    let (Some(protocol), Some(ports)) = (Protocol::of_packet(inner.proto), inner.ports()) else {
        return false;
    };
    is_of_service(tables, protocol, &inner.tuple(ports).swapped())
}

/// Returns true for the addresses of packets from a VIP to a client. The Service may be gone since
/// the connection began, or the entry of the connection may be lost. A packet to another VIP is
/// that of a client: as a reply, two nodes would send it to each other until its hop limit ends.
#[inline(never)]
fn is_of_service<T: Tables>(tables: &T, protocol: Protocol, reply: &Tuple) -> bool {
    let vip = &reply.source;
    if !service::may_be_vip(tables, &vip.addr, vip.port)
        || service::find_by_address(tables, &reply.destination, protocol).is_some()
    {
        return false;
    }
    let key = FlowKey::new(Direction::Original, protocol, reply.swapped());
    tables.flow(&key).is_some_and(|flow| flow.is_dsr())
        || may_be_client(tables, &reply.destination.addr) && {
            let service = service::find_on_link(tables, vip, protocol);
            service.is_some_and(|service| service.flags & flags::DSR != 0)
        }
}

/// Returns true if packets of an address may have gone through the tunnel. Those of pods and nodes
/// do not.
#[inline(always)]
fn may_be_client(tables: &impl Tables, address: &Addr) -> bool {
    !tables.is_local_source(*address) && !tables.is_node_address(address) && !tables.is_of_dsr_node(address)
}

/// Limits the segments of the client by what fits into the tunnel to the endpoint's node.
#[inline(always)]
fn limit_segments<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) {
    let is_connection = packet.proto == Protocol::Tcp.number() && packet.fragment != Fragment::Later;
    if is_connection
        && packet.tcp_flags(frame, Protocol::Tcp).is_some_and(TcpFlags::is_syn_ack)
        && let Some(node) = frame.tunnel_source()
    {
        segments::limit(frame, packet, longest_to(tables, &node));
    }
}

/// Returns the bytes of a packet, or of the longest one after segmentation. A packet that is too
/// long for any route counts as one of the greatest length.
#[inline(always)]
fn length_of(frame: &impl Frame, packet: &Packet) -> u16 {
    let is_connection = packet.proto == Protocol::Tcp.number();
    let length = direct::longest(frame, packet, is_connection).unwrap_or(u32::MAX);
    length.try_into().unwrap_or(u16::MAX)
}

/// Asks the kernel for the route of a packet with this length. Returns false if there is none, or
/// if the packet is too long for it. A function call of its own saves stack.
#[inline(never)]
fn find_route<F: Frame>(frame: &F, packet: &Packet, length: u16, route: &mut Route) -> bool {
    let Packet { version, proto, traffic_class, .. } = *packet;
    let ports = if packet.fragment == Fragment::Later { None } else { packet.ports() };
    let tuple = packet.tuple(ports.unwrap_or([0; 2]));
    let (source, destination) = (&tuple.source, &tuple.destination);
    frame.find_route(&RoutedPacket { version, proto, traffic_class, length, source, destination }, route)
}
