//! The direct path before the stack (XDP): what the program on a link's hook for packets that come
//! in would do with a packet of a known flow, done before the kernel makes an `sk_buff` of it.
//!
//! The program only uses entries that the link programs learned. Whatever is not as the last packet
//! of the flow goes on to them, unchanged. So a flow moves between XDP, the link programs and the
//! stack at any packet.

use core::hint::black_box;

use super::{
    count, is_bare, is_on, may_follow,
    plain::{may_count, may_follow_plain, rewrite_plain},
    rewrite_learned,
};
use crate::{
    Addr, Protocol,
    checksum::is_sum_of_pseudo_header,
    layout::{Counter, DirectKey, DirectPath, XdpLinkValue},
    link::{Outcome, comes_from_endpoint, goes_to_vip, not_rewritten, plain},
    packet::{ETHERNET_HEADER, Frame, IpVersion, Packet, PlainPacket},
    tables::Tables,
};

/// Handles a packet that comes in on a link, before the stack.
#[inline(always)]
pub fn early<F: Frame>(frame: &F, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    if !is_on(tables) {
        return Outcome::Proceed;
    }
    let Some(link) = own_link(frame, tables) else { return Outcome::Proceed };
    let outcome = if PlainPacket::is_at(header, version) {
        pass_on_plain(frame, tables, link)
    } else {
        pass_on(frame, tables, &mut Packet::at(header, version), link)
    };
    outcome.unwrap_or(Outcome::Proceed)
}

/// Returns what is known of the link, if the frame is for its hardware address. The kernel does not
/// say so before the stack.
#[inline(always)]
fn own_link(frame: &impl Frame, tables: &impl Tables) -> Option<XdpLinkValue> {
    let link = tables.xdp_link(frame.link())?;
    (frame.load(0)? == link.address).then_some(link)
}

/// Handles a packet that may be plain. Returns `None` if it goes on to the stack, unchanged. A
/// function call of its own saves stack.
#[inline(never)]
fn pass_on_plain<F: Frame, T: Tables>(frame: &F, tables: &T, link: XdpLinkValue) -> Option<Outcome> {
    let packet = PlainPacket::read(frame)?;
    if !plain::may_be_of_service(tables, &packet) {
        return None;
    }
    let segment = packet.segment(frame)?;
    if packet.is_tcp() && !segment.flags.is_of_open_connection() {
        return None;
    }
    let (node, key) = (tables.node()?, packet.direct_key());
    if !may_count(tables, &node, &key) {
        return None;
    }
    let flow = tables.direct_flow_v4(&key, segment.flags, segment.acknowledged)?;
    let (ends, length) = ([&packet.source(), &packet.destination()], packet.payload_length());
    if !may_follow_plain(frame, tables, &node, &packet, &segment, &flow.path)
        || !may_leave(frame, tables, &flow.path)
        || may_be_completed(segment.checksum, ends, (packet.protocol(), length))
    {
        return None;
    }
    let rewritten = rewrite_plain(frame, &packet, &flow);
    Some(send(frame, tables, ETHERNET_HEADER, (&flow.path, link), rewritten))
}

/// Handles a packet that is not plain. Returns `None` if it goes on to the stack, unchanged, as all
/// packets of IPv4 do. A function call of its own saves stack.
#[inline(never)]
fn pass_on<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &mut Packet,
    link: XdpLinkValue,
) -> Option<Outcome> {
    packet.read(frame)?;
    let protocol = Protocol::of_packet(packet.proto)?;
    let ports = packet.ports()?;
    let may_match = || goes_to_vip(tables, packet) || comes_from_endpoint(tables, packet);
    if !is_bare(frame, packet) || !may_match() {
        return None;
    }
    let (tcp, acknowledged) = packet.tcp_answer(frame, protocol)?;
    if protocol.is_connection_oriented() && !tcp.is_of_open_connection() {
        return None;
    }
    let key = DirectKey::new(protocol, packet.tuple(ports));
    let flow = tables.direct_flow(&key, tcp, acknowledged)?;
    // Without the black box, LLVM computes with the bytes also on the path where they were not
    // loaded, and the verifier refuses the program. `pass_on_plain` does not need it: its words
    // were loaded for other fields too.
    let checksum = black_box(frame.load(packet.checksum_field(protocol)?.offset)?);
    let length = packet.length(frame)?.wrapping_sub(packet.payload() - packet.header());
    if !may_follow(frame, tables, packet, protocol, &flow.path)
        || !may_leave(frame, tables, &flow.path)
        || may_be_completed(checksum, [&packet.source, &packet.destination], (protocol, length))
    {
        return None;
    }
    let rewritten = rewrite_learned(frame, packet, protocol, &flow);
    Some(send(frame, tables, packet.header(), (&flow.path, link), rewritten))
}

/// Sends a rewritten packet out. `header` is the offset of the IP header.
#[inline(always)]
fn send(
    frame: &impl Frame,
    tables: &impl Tables,
    header: u32,
    (path, link): (&DirectPath, XdpLinkValue),
    rewritten: Option<()>,
) -> Outcome {
    if rewritten.is_none() {
        return not_rewritten(tables);
    }
    count(frame, tables, header, path);
    tables.count(Counter::SentBeforeStack);
    if path.out_link == frame.link() && link.redirects_to_itself == 0 {
        return Outcome::Transmit;
    }
    frame.redirect(path.out_link);
    Outcome::Redirect
}

/// Returns true if the packet may leave without the hooks of its link and without a qdisc, which
/// could look at the priority.
#[inline(always)]
fn may_leave(frame: &impl Frame, tables: &impl Tables, path: &DirectPath) -> bool {
    let takes_frames = || tables.xdp_link(path.out_link).is_some_and(|link| link.takes_frames != 0);
    path.priority == 0 && (path.out_link == frame.link() || takes_frames())
}

/// Returns true if hardware may be meant to complete the checksum (`CHECKSUM_PARTIAL`), as with
/// packets of another network namespace or of a virtual machine on the same host. The field then
/// holds the sum of the pseudo header. By chance, one of 65,535 complete checksums is the same.
#[inline(always)]
const fn may_be_completed(
    checksum: [u8; 2],
    [source, destination]: [&Addr; 2],
    (protocol, length): (Protocol, u32),
) -> bool {
    is_sum_of_pseudo_header(checksum, source, destination, protocol.number(), length)
}
