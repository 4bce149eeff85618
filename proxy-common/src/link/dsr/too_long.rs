//! Tells the sender of a packet that it is too long for the tunnel (RFC 1191, RFC 8201). The packet
//! becomes the ICMP error about itself, and leaves on the link on which it came in. Its source is
//! the VIP, as if the endpoint were behind a link of that size.

use super::super::{Notes, Outcome, answer};
use crate::{
    Protocol, checksum,
    layout::Counter,
    packet::{
        ETHERNET_HEADER, Frame, ICMP, ICMPV6, IpVersion, Packet, Route, RoutedPacket, TCP_CHECKSUM,
        UDP_CHECKSUM,
    },
    tables::Tables,
};

/// The bytes of a packet that the error repeats: IP header, ports, and the checksum of TCP, which
/// hardware may be meant to complete, so that the kernel does not cut before it.
const KEPT_V4: u32 = 20 + TRANSPORT;
const KEPT_V6: u32 = 40 + TRANSPORT;
const TRANSPORT: u32 = 28;

/// Tells the client that its packet is too long. The packet is lost in any case. The number of
/// errors is not limited, as the kernel does not limit its own (`icmpv4_mask_allow`,
/// `net.ipv6.icmp.ratemask`).
#[inline(never)]
pub(super) fn tell_client<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    longest: u32,
) -> Outcome {
    tables.count(Counter::TooLongForTunnel);
    if !may_be_told(packet) || !become_error(frame, packet, longest) {
        return Outcome::Drop;
    }
    answer::send_back(frame)
}

/// Returns true if the sender of a packet may get an ICMP error about it (RFC 1122, section 3.2.2;
/// RFC 4443, section 2.4). Of ICMP, only errors go through the tunnel.
#[inline(always)]
fn may_be_told(packet: &Packet) -> bool {
    packet.proto != ICMP && packet.proto != ICMPV6 && answer::may_get_answer(&packet.source)
}

/// Tells an endpoint that its packet is too long. The packet is on the link to the client. Its
/// source is still the endpoint, and the error looks as if the client, or a router, sent it.
#[inline(never)]
pub(in super::super) fn tell_endpoint<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    longest: u32,
) -> Outcome {
    tables.count(Counter::TooLongForTunnel);
    let mut route = Route::NONE;
    if frame.has_vlan_tag()
        || !find_endpoint(frame, packet, &mut route)
        || !become_error(frame, packet, longest)
    {
        return Outcome::Drop;
    }
    Notes::leave(frame, Notes::FORWARDED);
    frame.redirect_to(&route);
    Outcome::Redirect
}

/// Asks the kernel for the route to the source of a packet. A function call of its own saves stack.
#[inline(never)]
fn find_endpoint<F: Frame>(frame: &F, packet: &Packet, route: &mut Route) -> bool {
    let (version, proto) = match packet.version {
        IpVersion::V4 => (IpVersion::V4, ICMP),
        IpVersion::V6 => (IpVersion::V6, ICMPV6),
    };
    let (traffic_class, length, tuple) = (0, 0, packet.tuple([0; 2]).swapped());
    let (source, destination) = (&tuple.source, &tuple.destination);
    frame.find_route(&RoutedPacket { version, proto, traffic_class, length, source, destination }, route)
}

/// Returns false if the frame could not be changed. It may be partly changed.
#[inline(always)]
fn become_error<F: Frame>(frame: &F, packet: &Packet, longest: u32) -> bool {
    let is_plain = !F::IS_ETHERNET || packet.header() == ETHERNET_HEADER;
    let completed = sum_after_completion(frame, packet);
    is_plain && try_become_error(frame, packet, longest, completed).is_some()
}

/// Returns the sum of the bytes that the error repeats, for a packet that hardware or GRO put
/// together from several, and 0 for another one.
///
/// Its checksum is completed when it leaves (`CHECKSUM_PARTIAL`). After that, the sum from its
/// transport header on is the complement of what the field holds now. The sum of an IPv4 header is
/// zero. A function call of its own saves stack.
#[inline(never)]
fn sum_after_completion<F: Frame>(frame: &F, packet: &Packet) -> u32 {
    if frame.segment_size() == 0 || !packet.has_plain_header() {
        return 0;
    }
    let field = if packet.proto == Protocol::Tcp.number() { TCP_CHECKSUM } else { UDP_CHECKSUM };
    let field = frame.load(packet.payload() + field).map_or(0, u16::from_ne_bytes);
    let transport = !u32::from(field);
    if matches!(packet.version, IpVersion::V4) {
        return transport;
    }
    let fixed: [u8; 8] = frame.load(packet.header()).unwrap_or([0; 8]);
    let header = checksum::sum_of_pseudo_header(&packet.source, &packet.destination, 0, 0);
    checksum::add(transport, checksum::add(header, checksum::sum_of(&fixed)))
}

#[inline(always)]
fn try_become_error<F: Frame>(frame: &F, packet: &Packet, longest: u32, completed: u32) -> Option<()> {
    let [m0, m1, m2, m3] = longest.to_be_bytes();
    let (icmp, kept) = match packet.version {
        // Destination unreachable, fragmentation needed.
        IpVersion::V4 => ([3, 4, 0, 0, 0, 0, m2, m3], KEPT_V4),
        // Packet too big.
        IpVersion::V6 => ([2, 0, 0, 0, m0, m1, m2, m3], KEPT_V6),
    };
    let sum = match packet.version {
        IpVersion::V4 => cut_to::<F, KEPT_V4>(frame, packet, completed),
        IpVersion::V6 => cut_to::<F, KEPT_V6>(frame, packet, completed),
    };
    answer::write_error(frame, packet, icmp, kept, u32::try_from(sum).ok()?)?;
    answer::swap_hardware_addresses(frame)
}

/// Cuts a packet to the bytes that the error repeats, and inserts the headers of the error. Returns
/// the sum of those bytes, or -1 if that failed. A function call of its own saves stack.
#[inline(never)]
fn cut_to<F: Frame, const KEPT: u32>(frame: &F, packet: &Packet, completed: u32) -> i64 {
    let header = packet.header();
    let sum = if completed == 0 { sum(frame, header, KEPT) } else { Some(completed) };
    let Some(sum) = sum else { return -1 };
    if frame.cut(header + KEPT).is_none() || frame.insert(answer::bytes_before(packet.version)).is_none() {
        return -1;
    }
    i64::from(sum)
}

/// Returns the sum of the words of a part of a frame.
#[inline(always)]
fn sum(frame: &impl Frame, offset: u32, bytes: u32) -> Option<u32> {
    let (mut sum, mut at) = (0, 0);
    while at < bytes {
        sum += i64::from(u32::from_ne_bytes(frame.load(offset + at)?));
        at += 4;
    }
    Some(checksum::fold_words(sum))
}
