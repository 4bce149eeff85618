//! Whether a frame's checksums are right, by another's arithmetic.

use etherparse::{
    Icmpv4Slice, Ipv4Slice, LaxNetSlice, LaxSlicedPacket, NetSlice, SlicedPacket, TcpSlice, TransportSlice,
    UdpSlice,
};

/// Whether all checksums of a frame are right; none of one that is no whole TCP, UDP or ICMP packet.
pub fn checksums_are_right(frame: &[u8]) -> Option<bool> {
    let sliced = SlicedPacket::from_ethernet(frame).ok()?;
    if sliced.is_ip_payload_fragmented() {
        return None;
    }
    match (sliced.net?, sliced.transport?) {
        (NetSlice::Ipv4(ip), transport) => {
            let header = is_v4_header_right(&ip);
            let (from, to) = (ip.header().source(), ip.header().destination());
            let carried = match transport {
                TransportSlice::Tcp(tcp) => tcp.calc_checksum_ipv4(from, to) == Ok(tcp.checksum()),
                TransportSlice::Udp(udp) => is_udp_right(&udp, |udp| {
                    udp.to_header().calc_checksum_ipv4_raw(from, to, udp.payload()).ok()
                }),
                TransportSlice::Icmpv4(icmp) => is_icmp_right(&icmp),
                _ => return None,
            };
            Some(header && carried)
        }
        (NetSlice::Ipv6(ip), transport) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            Some(match transport {
                TransportSlice::Tcp(tcp) => is_tcp_right(&tcp, from, to),
                TransportSlice::Udp(udp) => is_udp_right(&udp, |udp| {
                    udp.to_header().calc_checksum_ipv6_raw(from, to, udp.payload()).ok()
                }),
                TransportSlice::Icmpv6(icmp) => icmp.is_checksum_valid(from, to),
                _ => return None,
            })
        }
        _ => None,
    }
}

fn is_v4_header_right(ip: &Ipv4Slice<'_>) -> bool {
    let header = ip.header().to_header();
    header.header_checksum == header.calc_header_checksum()
}

fn is_tcp_right(tcp: &TcpSlice<'_>, from: [u8; 16], to: [u8; 16]) -> bool {
    tcp.calc_checksum_ipv6(from, to) == Ok(tcp.checksum())
}

fn is_udp_right(udp: &UdpSlice<'_>, right: impl FnOnce(&UdpSlice<'_>) -> Option<u16>) -> bool {
    udp.checksum() == 0 || right(udp) == Some(udp.checksum())
}

/// Also the checksum of the IPv4 header that an error tells of.
fn is_icmp_right(icmp: &Icmpv4Slice<'_>) -> bool {
    let header = icmp.header();
    let told = LaxSlicedPacket::from_ip(icmp.payload()).ok().and_then(|told| told.net);
    let is_told_right = match told {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header().to_header();
            header.header_checksum == header.calc_header_checksum()
        }
        _ => true,
    };
    is_told_right && header.checksum == header.icmp_type.calc_checksum(icmp.payload())
}
