//! Refuses packets as netfilter's target REJECT does, on a node where no rule of netfilter is
//! needed otherwise: a TCP segment gets a reset, and a datagram gets an ICMP error (RFC 9293,
//! section 3.10.7.1; RFC 1122, section 3.2.2.1; RFC 4443, section 3.1).
//!
//! The packet becomes the answer, and leaves on the link on which it came in, to the Ethernet
//! address that sent it.

use super::{Outcome, answer};
use crate::{
    Protocol,
    checksum::{self, Difference},
    packet::{
        ChecksumCoverage, ETHERNET_HEADER, Frame, IpVersion, Packet, TCP_CHECKSUM, TcpFlags, UDP_CHECKSUM,
    },
    tables::Tables,
};

const TCP_HEADER: u32 = 20;
const UDP_HEADER: u32 = 8;

/// Answers a packet that is refused. One that cannot be answered is dropped: a packet with IP
/// options or extension headers, a reset, or one from an address that cannot get an answer.
#[inline(never)]
pub(super) fn answer<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) -> Outcome {
    // A link without Ethernet headers may need a route to send. The tag is of a VLAN for which this
    // node has no programs.
    if !F::IS_ETHERNET || frame.has_vlan_tag() {
        return Outcome::Proceed;
    }
    let is_plain = packet.has_plain_header() && packet.header() == ETHERNET_HEADER;
    if !is_plain || !answer::may_get_answer(&packet.source) {
        return Outcome::Drop;
    }
    let is_answered = if packet.proto == Protocol::Tcp.number() {
        become_reset(frame, packet)
    } else if tables.may_send_error() {
        become_error(frame, packet)
    } else {
        None
    };
    if is_answered.is_none() || answer::swap_hardware_addresses(frame).is_none() {
        return Outcome::Drop;
    }
    answer::send_back(frame)
}

/// Makes a TCP segment the reset that a host without such a connection sends.
#[inline(never)]
fn become_reset<F: Frame>(frame: &F, packet: &Packet) -> Option<()> {
    const RST: u8 = 1 << 2;
    const RST_ACK: u8 = RST | 1 << 4;
    let at = packet.payload();
    let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, words, flags, ..]: [u8; 20] = frame.load(at)?;
    let tcp = TcpFlags(flags);
    if tcp.has_rst() {
        return None;
    }
    let headers = at - packet.header() + u32::from(words >> 4) * 4;
    let payload = packet.length(frame)?.wrapping_sub(headers);
    let is_completed = clear_checksum(frame, at + TCP_CHECKSUM)?;
    frame.cut(at + TCP_HEADER)?;
    let next = u32::from_be_bytes([q0, q1, q2, q3]).wrapping_add(payload + tcp.sequence_length());
    let [n0, n1, n2, n3] = next.to_be_bytes();
    let segment = if tcp.has_ack() {
        [d0, d1, s0, s1, a0, a1, a2, a3, 0, 0, 0, 0, 0x50, RST, 0, 0, 0, 0, 0, 0]
    } else {
        [d0, d1, s0, s1, 0, 0, 0, 0, n0, n1, n2, n3, 0x50, RST_ACK, 0, 0, 0, 0, 0, 0]
    };
    let proto = Protocol::Tcp.number();
    let before = checksum::sum_of_pseudo_header(&packet.destination, &packet.source, proto, TCP_HEADER);
    let complete = checksum::of_message(&segment, before);
    let field = if is_completed { checksum::fold(before).to_ne_bytes() } else { complete };
    frame.store(at, &segment)?;
    frame.store(at + TCP_CHECKSUM, &field)?;
    answer::write_header(frame, packet, proto, TCP_HEADER)
}

/// Makes a datagram the ICMP error that its port is unreachable. The error repeats the headers,
/// without the checksum of the datagram.
#[inline(never)]
fn become_error<F: Frame>(frame: &F, packet: &Packet) -> Option<()> {
    let at = packet.payload();
    let is_completed = clear_checksum(frame, at + UDP_CHECKSUM)?;
    let sum = sum_of_headers(frame, packet, is_completed)?;
    frame.cut(at + UDP_HEADER)?;
    frame.insert(answer::bytes_before(packet.version))?;
    let icmp = match packet.version {
        IpVersion::V4 => [3, 3, 0, 0, 0, 0, 0, 0],
        IpVersion::V6 => [1, 4, 0, 0, 0, 0, 0, 0],
    };
    let repeated = answer::header_length(packet.version) + UDP_HEADER;
    answer::write_error(frame, packet, icmp, repeated, sum)
}

/// Returns the sum of the headers of a datagram as they leave. The sum of an IPv4 header is zero.
/// If the checksum of the datagram is completed later, the sum of its header is zero too.
#[inline(always)]
fn sum_of_headers(frame: &impl Frame, packet: &Packet, is_completed: bool) -> Option<u32> {
    let transport: [u8; 6] = frame.load(packet.payload())?;
    let transport = if is_completed { 0 } else { checksum::sum_of(&transport) };
    if matches!(packet.version, IpVersion::V4) {
        return Some(transport);
    }
    let fixed: [u8; 8] = frame.load(packet.header())?;
    let addresses = checksum::sum_of_pseudo_header(&packet.source, &packet.destination, 0, 0);
    Some(checksum::add(transport, checksum::add(addresses, checksum::sum_of(&fixed))))
}

/// Sets the checksum field to zero. Returns true if the kernel or hardware is to complete it when
/// the packet leaves (`CHECKSUM_PARTIAL`): only then, a changed payload does not change the field.
#[inline(never)]
fn clear_checksum<F: Frame>(frame: &F, at: u32) -> Option<bool> {
    const CHANGED: Difference = Difference::of_bytes([0, 0], [0, 1]);
    const PAYLOAD: ChecksumCoverage = ChecksumCoverage { pseudo_header: None, is_optional: false };
    const ZERO: [u8; 2] = [0; 2];
    frame.store(at, &ZERO)?;
    frame.fix_checksum(at, CHANGED, PAYLOAD)?;
    let is_completed = frame.load(at)? == ZERO;
    frame.store(at, &ZERO)?;
    Some(is_completed)
}
