//! Makes a packet an answer to its sender, which leaves on the link on which the packet came in.

use super::{Notes, Outcome};
use crate::{
    Addr, checksum,
    packet::{Frame, ICMP, ICMPV6, IpVersion, Packet},
};

/// The bytes of the header of an ICMP error.
pub(super) const ICMP_HEADER: u32 = 8;

const HEADER_V4: u32 = 20;
const HEADER_V6: u32 = 40;
const HOPS: u8 = 64;

/// Returns false for a multicast address, loopback, and addresses of no host (RFC 1122,
/// section 3.2.2; RFC 4443, section 2.4).
#[inline(always)]
pub(super) fn may_get_answer(source: &Addr) -> bool {
    let [first, _, _, last] = source.words();
    if source.is_v4() {
        let [class, ..] = last.to_ne_bytes();
        let is_multicast = class & 0xf0 == 0xe0;
        class != 0 && class != 127 && !is_multicast && last != u32::MAX
    } else {
        let [class, ..] = first.to_ne_bytes();
        class != 0xff && !source.is_loopback() && !source.is_unspecified()
    }
}

/// Returns the bytes that an ICMP error has before those that it repeats, with its IP header.
#[inline(always)]
pub(super) const fn bytes_before(version: IpVersion) -> u32 {
    header_length(version) + ICMP_HEADER
}

/// Returns the bytes of an IP header without options or extensions.
#[inline(always)]
pub(super) const fn header_length(version: IpVersion) -> u32 {
    match version {
        IpVersion::V4 => HEADER_V4,
        IpVersion::V6 => HEADER_V6,
    }
}

/// Writes the IP header of an answer over the header of `packet`, from its destination to its
/// source. `length` is that of the payload. Returns `None` if the frame is shorter.
#[inline(never)]
pub(super) fn write_header<F: Frame>(frame: &F, packet: &Packet, proto: u8, length: u32) -> Option<()> {
    let at = packet.header();
    let (source, destination) = (&packet.destination, &packet.source);
    match packet.version {
        IpVersion::V4 => {
            let [s, d] = [source, destination].map(|addr| addr.words()[3].to_ne_bytes());
            let [_, _, l0, l1] = (HEADER_V4 + length).to_be_bytes();
            let ip = |[x, y]: [u8; 2]| {
                [
                    0x45, 0, l0, l1, 0, 0, 0x40, 0, HOPS, proto, x, y, s[0], s[1], s[2], s[3], d[0], d[1],
                    d[2], d[3],
                ]
            };
            frame.store(at, &ip(checksum::of_message(&ip([0; 2]), 0)))
        }
        IpVersion::V6 => {
            let [_, _, l0, l1] = length.to_be_bytes();
            frame.store(at, &[0x60, 0, 0, 0, l0, l1, proto, HOPS])?;
            frame.store(at + 8, &source.octets)?;
            frame.store(at + 24, &destination.octets)
        }
    }
}

/// Writes the headers of an ICMP error, after room for them was inserted. `icmp` is the header of
/// ICMP without its checksum. `repeated` is the number of bytes that the error repeats, and `sum`
/// the sum of their words. Returns `None` if the frame is shorter.
#[inline(always)]
pub(super) fn write_error<F: Frame>(
    frame: &F,
    packet: &Packet,
    icmp: [u8; 8],
    repeated: u32,
    sum: u32,
) -> Option<()> {
    let length = ICMP_HEADER + repeated;
    let (proto, before) = match packet.version {
        IpVersion::V4 => (ICMP, sum),
        IpVersion::V6 => {
            let (from, to) = (&packet.destination, &packet.source);
            let before = checksum::sum_of_pseudo_header(from, to, ICMPV6, length);
            (ICMPV6, checksum::add(sum, before))
        }
    };
    let [kind, code, _, _, r0, r1, r2, r3] = icmp;
    let [s0, s1] = checksum::of_message(&icmp, before);
    write_header(frame, packet, proto, length)?;
    frame.store(packet.header() + header_length(packet.version), &[kind, code, s0, s1, r0, r1, r2, r3])
}

/// Swaps the Ethernet addresses of a frame. Returns `None` if it is shorter.
#[inline(always)]
pub(super) fn swap_hardware_addresses<F: Frame>(frame: &F) -> Option<()> {
    if !F::IS_ETHERNET {
        return Some(());
    }
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5]: [u8; 12] = frame.load(0)?;
    frame.store(0, &[s0, s1, s2, s3, s4, s5, d0, d1, d2, d3, d4, d5])
}

/// Sends the frame back on its link. The program on that link passes it as it leaves.
#[inline(always)]
pub(super) fn send_back(frame: &impl Frame) -> Outcome {
    Notes::leave(frame, Notes::FORWARDED);
    frame.redirect(frame.link());
    Outcome::Redirect
}
