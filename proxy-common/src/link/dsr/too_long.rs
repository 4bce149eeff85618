//! Tells the sender of a packet that it is too long for the tunnel (RFC 1191, RFC 8201). The packet
//! becomes the ICMP error about itself, and leaves on the link on which it came in. Its source is
//! the VIP, as if the endpoint were behind a link of that size.

use super::super::{Notes, Outcome};
use crate::{
    Protocol, checksum,
    layout::Counter,
    packet::{ETHERNET_HEADER, Frame, ICMP, ICMPV6, IpVersion, Packet, Route, RoutedPacket},
    tables::Tables,
};

/// The bytes of a packet that the error repeats: IP header, ports, and the checksum of TCP, which
/// hardware may be meant to complete, so that the kernel does not cut before it.
const KEPT_V4: u32 = 20 + TRANSPORT;
const KEPT_V6: u32 = 40 + TRANSPORT;
const TRANSPORT: u32 = 28;

/// The offsets of the checksums in the transport headers.
const TCP_CHECKSUM: u32 = 16;
const UDP_CHECKSUM: u32 = 6;

/// The bytes before them: IP header and ICMP header.
const ERROR_HEADERS_V4: u32 = 20 + 8;
const ERROR_HEADERS_V6: u32 = 40 + 8;

const HOPS: u8 = 64;

/// Tells the client that its packet is too long. The packet is lost in any case.
#[inline(never)]
pub(super) fn tell_client<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    longest: u32,
) -> Outcome {
    tables.count(Counter::TooLongForTunnel);
    if !become_error(frame, packet, longest) {
        return Outcome::Drop;
    }
    Notes::leave(frame, Notes::FORWARDED);
    frame.redirect(frame.link());
    Outcome::Redirect
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
    match packet.version {
        IpVersion::V4 => become_error_v4(frame, packet, longest, completed)?,
        IpVersion::V6 => become_error_v6(frame, packet, longest, completed)?,
    }
    if !F::IS_ETHERNET {
        return Some(());
    }
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5]: [u8; 12] = frame.load(0)?;
    frame.store(0, &[s0, s1, s2, s3, s4, s5, d0, d1, d2, d3, d4, d5])
}

/// Destination unreachable, fragmentation needed.
#[inline(never)]
fn become_error_v4<F: Frame>(frame: &F, packet: &Packet, longest: u32, completed: u32) -> Option<()> {
    let header = packet.header();
    let kept = if completed == 0 { sum(frame, header, KEPT_V4)? } else { completed };
    frame.cut(header + KEPT_V4)?;
    frame.insert(ERROR_HEADERS_V4)?;
    let [_, _, high, low] = longest.to_be_bytes();
    let icmp = [3, 4, 0, 0, 0, 0, high, low];
    let [a, b] = checksum::of_message(&icmp, kept);
    let [s, d] = [&packet.destination, &packet.source].map(|addr| addr.words()[3].to_ne_bytes());
    let [_, _, l0, l1] = (ERROR_HEADERS_V4 + KEPT_V4).to_be_bytes();
    let ip = |[x, y]: [u8; 2]| {
        [0x45, 0, l0, l1, 0, 0, 0x40, 0, HOPS, ICMP, x, y, s[0], s[1], s[2], s[3], d[0], d[1], d[2], d[3]]
    };
    frame.store(header, &ip(checksum::of_message(&ip([0; 2]), 0)))?;
    frame.store(header + 20, &[icmp[0], icmp[1], a, b, 0, 0, high, low])
}

/// Packet too big.
#[inline(never)]
fn become_error_v6<F: Frame>(frame: &F, packet: &Packet, longest: u32, completed: u32) -> Option<()> {
    const LENGTH: u32 = 8 + KEPT_V6;
    let header = packet.header();
    let kept = if completed == 0 { sum(frame, header, KEPT_V6)? } else { completed };
    frame.cut(header + KEPT_V6)?;
    frame.insert(ERROR_HEADERS_V6)?;
    let [m0, m1, m2, m3] = longest.to_be_bytes();
    let icmp = [2, 0, 0, 0, m0, m1, m2, m3];
    let before = checksum::sum_of_pseudo_header(&packet.destination, &packet.source, ICMPV6, LENGTH);
    let [a, b] = checksum::of_message(&icmp, checksum::add(kept, before));
    let [_, _, l0, l1] = LENGTH.to_be_bytes();
    frame.store(header, &[0x60, 0, 0, 0, l0, l1, ICMPV6, HOPS])?;
    frame.store(header + 8, &packet.destination.octets)?;
    frame.store(header + 24, &packet.source.octets)?;
    frame.store(header + 40, &[icmp[0], icmp[1], a, b, m0, m1, m2, m3])
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
