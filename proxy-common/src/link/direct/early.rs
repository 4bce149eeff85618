//! The direct path before the stack (XDP): what the program on a link's hook for packets that come
//! in would do with a packet of a known flow, done before the kernel makes an `sk_buff` of it.
//!
//! The program only uses entries that the link programs learned. Whatever is not as the last packet
//! of the flow goes on to them, unchanged. So a flow moves between XDP, the link programs and the
//! stack at any packet.

use super::{count, is_like, is_on, is_plain, rewrite_learned};
use crate::{
    Protocol,
    checksum::is_sum_of_pseudo_header,
    layout::{Counter, DirectKey, DirectPath, ProgramError, XdpLinkValue},
    link::{Outcome, count_drop, may_be_endpoint, may_be_vip},
    packet::{Frame, IpVersion, Packet},
    tables::Tables,
};

/// Handles a packet that comes in on a link, before the stack.
#[inline(always)]
pub fn early<F: Frame>(frame: &F, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    let mut packet = Packet::at(header, version);
    if !is_on(tables) {
        return Outcome::Proceed;
    }
    let Some(link) = own_link(frame, tables) else { return Outcome::Proceed };
    if packet.read(frame).is_none() {
        return Outcome::Proceed;
    }
    pass_on(frame, tables, &packet, &link).unwrap_or(Outcome::Proceed)
}

/// Returns what is known of the link, if the frame is for its hardware address. The kernel does not
/// say so before the stack.
#[inline(always)]
fn own_link(frame: &impl Frame, tables: &impl Tables) -> Option<XdpLinkValue> {
    let link = tables.xdp_link(frame.link())?;
    (frame.load(0)? == link.address).then_some(link)
}

/// Returns `None` if the packet goes on to the stack, unchanged.
#[inline(always)]
fn pass_on<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    link: &XdpLinkValue,
) -> Option<Outcome> {
    let protocol = Protocol::of_packet(packet.proto)?;
    let ports = packet.ports()?;
    let may_match = || {
        may_be_vip(tables, &packet.destination, ports[1]) || may_be_endpoint(tables, &packet.source, ports[0])
    };
    if !is_plain(frame, packet) || !may_match() {
        return None;
    }
    let (tcp, acknowledged) = packet.tcp_answer(frame, protocol)?;
    if protocol.is_connection_oriented() && !tcp.is_plain() {
        return None;
    }
    let key = DirectKey::new(protocol, packet.tuple(ports));
    let flow = tables.direct_flow(&key, tcp, acknowledged)?;
    let hops = is_like(frame, tables, packet, protocol, &flow.path)?;
    if !may_leave(frame, tables, &flow.path) || may_be_completed(frame, packet, protocol)? {
        return None;
    }
    if rewrite_learned(frame, packet, protocol, &flow, hops).is_none() {
        tables.count_error(ProgramError::NotRewritten);
        return Some(count_drop(tables, Counter::NotRewritten));
    }
    count(frame, tables, packet, &flow.path);
    tables.count(Counter::SentBeforeStack);
    if flow.path.out_link == frame.link() && link.redirects_to_itself == 0 {
        return Some(Outcome::Transmit);
    }
    frame.redirect(flow.path.out_link);
    Some(Outcome::Redirect)
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
fn may_be_completed(frame: &impl Frame, packet: &Packet, protocol: Protocol) -> Option<bool> {
    let field = frame.load(packet.payload() + protocol.checksum_field()?.offset)?;
    let headers = packet.payload() - packet.header();
    let length = packet.length(frame)?.wrapping_sub(headers);
    Some(is_sum_of_pseudo_header(field, &packet.source, &packet.destination, packet.proto, length))
}
