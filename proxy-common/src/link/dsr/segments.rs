//! Limits the segments of a TCP connection by what fits into the tunnel, as routers do before
//! links with a smaller MTU.

use crate::{
    checksum::Difference,
    packet::{ChecksumCoverage, Frame, IpVersion, Packet, TCP_CHECKSUM},
};

const TCP_HEADER: u32 = 20;

/// The maximum number of options that are looked at. The option for the maximum segment size is the
/// first one that common systems write.
const OPTIONS: usize = 4;

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;

/// Lowers the maximum segment size in a SYN or SYN-ACK (RFC 9293, section 3.7.1), so that packets
/// with such segments have at most `longest` bytes. Does nothing if it is low enough, or at an odd
/// offset. Longer packets then get an ICMP error.
#[inline(never)]
pub(super) fn limit<F: Frame>(frame: &F, packet: &Packet, longest: u32) {
    let headers = match packet.version {
        IpVersion::V4 => 20 + TCP_HEADER,
        IpVersion::V6 => 40 + TCP_HEADER,
    };
    if let Ok(size) = u16::try_from(longest.saturating_sub(headers)) {
        let _ = limit_to(frame, packet, size);
    }
}

/// Returns `None` if there is nothing to lower.
#[inline(always)]
fn limit_to(frame: &impl Frame, packet: &Packet, limit: u16) -> Option<()> {
    let end = packet.payload() + packet.tcp_header(frame)?;
    let mut at = packet.payload() + TCP_HEADER;
    for _ in 0..OPTIONS {
        if at + 4 > end {
            return None;
        }
        let [kind, length, high, low]: [u8; 4] = frame.load(at)?;
        at += match (kind, length) {
            (MAXIMUM_SEGMENT_SIZE, 4) => return store(frame, packet, at, ([high, low], limit)),
            (NO_OPERATION, NO_OPERATION) => 2,
            (END | NO_OPERATION, _) => return None,
            (_, length) if length < 2 || length % 2 != 0 => return None,
            (_, length) => u32::from(length),
        };
    }
    None
}

/// Writes the limit, if the size in the option is larger.
#[inline(always)]
fn store(frame: &impl Frame, packet: &Packet, option: u32, (size, limit): ([u8; 2], u16)) -> Option<()> {
    if u16::from_be_bytes(size) <= limit {
        return None;
    }
    let limit = limit.to_be_bytes();
    frame.store(option + 2, &limit)?;
    let coverage = ChecksumCoverage { pseudo_header: None, is_optional: false };
    frame.fix_checksum(packet.payload() + TCP_CHECKSUM, Difference::of_bytes(size, limit), coverage)
}
