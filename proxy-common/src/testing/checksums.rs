//! Checks the checksums of a frame with code that the programs do not use.

use etherparse::{
    Icmpv4Slice, Ipv4Slice, LaxNetSlice, LaxSlicedPacket, NetSlice, SlicedPacket, TcpSlice, TransportSlice,
    UdpSlice,
};

/// Returns true if all checksums of a frame are correct. Returns `None` unless it is a whole TCP,
/// UDP or ICMP packet.
pub fn has_correct_checksums(frame: &[u8]) -> Option<bool> {
    let sliced = SlicedPacket::from_ethernet(frame).ok()?;
    if sliced.is_ip_payload_fragmented() {
        return None;
    }
    match (sliced.net?, sliced.transport?) {
        (NetSlice::Ipv4(ip), transport) => {
            let header = is_v4_header_correct(&ip);
            let (from, to) = (ip.header().source(), ip.header().destination());
            let transport = match transport {
                TransportSlice::Tcp(tcp) => tcp.calc_checksum_ipv4(from, to) == Ok(tcp.checksum()),
                TransportSlice::Udp(udp) => is_udp_correct(&udp, |udp| {
                    udp.to_header().calc_checksum_ipv4_raw(from, to, udp.payload()).ok()
                }),
                TransportSlice::Icmpv4(icmp) => is_icmp_correct(&icmp),
                _ => return None,
            };
            Some(header && transport)
        }
        (NetSlice::Ipv6(ip), transport) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            Some(match transport {
                TransportSlice::Tcp(tcp) => is_tcp_correct(&tcp, from, to),
                TransportSlice::Udp(udp) => is_udp_correct(&udp, |udp| {
                    udp.to_header().calc_checksum_ipv6_raw(from, to, udp.payload()).ok()
                }),
                TransportSlice::Icmpv6(icmp) => icmp.is_checksum_valid(from, to),
                _ => return None,
            })
        }
        _ => None,
    }
}

fn is_v4_header_correct(ip: &Ipv4Slice<'_>) -> bool {
    let header = ip.header().to_header();
    header.header_checksum == header.calc_header_checksum()
}

fn is_tcp_correct(tcp: &TcpSlice<'_>, from: [u8; 16], to: [u8; 16]) -> bool {
    tcp.calc_checksum_ipv6(from, to) == Ok(tcp.checksum())
}

fn is_udp_correct(udp: &UdpSlice<'_>, correct: impl FnOnce(&UdpSlice<'_>) -> Option<u16>) -> bool {
    udp.checksum() == 0 || correct(udp) == Some(udp.checksum())
}

/// Also checks the IPv4 header of the inner packet of an error.
fn is_icmp_correct(icmp: &Icmpv4Slice<'_>) -> bool {
    let header = icmp.header();
    let inner = LaxSlicedPacket::from_ip(icmp.payload()).ok().and_then(|inner| inner.net);
    let is_told_right = match inner {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header().to_header();
            header.header_checksum == header.calc_header_checksum()
        }
        _ => true,
    };
    is_told_right && header.checksum == header.icmp_type.calc_checksum(icmp.payload())
}
