//! The headers that the tunnel between two addresses of IPv4 adds to a plain packet: IPv4, UDP
//! and VXLAN-GPE. The kernel's link for the tunnel writes and reads the same.

use super::{
    ETH_P_IP, ETHERNET_HEADER, Frame, PlainPacket, Segment,
    plain::{IPV4_HEADER, PAYLOAD, UDP_HEADER, UDP_LENGTH},
};
use crate::{AddrV4, Protocol, checksum::Difference, hash, layout::TUNNEL_NETWORK};

/// The bytes that the tunnel adds to a packet between addresses of IPv4.
pub const TUNNEL_HEADERS_V4: u32 = IPV4_HEADER + UDP_AND_GPE;
const UDP_AND_GPE: u32 = UDP_HEADER + 8;

/// The offset of the IPv4 header within the tunnel.
const INNER_HEADER: u32 = ETHERNET_HEADER + TUNNEL_HEADERS_V4;

/// The first word of a VXLAN-GPE header: there is an identifier of the network and a protocol,
/// which is IPv4 (draft-ietf-nvo3-vxlan-gpe, section 3).
const GPE_OF_V4: [u8; 4] = [0x0c, 0, 0, 1];
/// The second word: the identifier of the network.
const NETWORK: [u8; 4] = (TUNNEL_NETWORK << 8).to_be_bytes();

const HOPS: u8 = 64;

/// The bits of the traffic class for congestion (RFC 3168).
const ECN: u8 = 3;
/// A router on the way had congestion.
const CONGESTION: u8 = 3;
/// The transport knows about congestion.
const CAPABLE: u8 = 2;

/// The start of a frame that goes through the tunnel: Ethernet header, and the headers of the
/// tunnel. Two bytes of padding come before them, so that words of the headers are words here.
#[repr(C, align(8))]
pub struct TunnelStart([[u8; 4]; 13]);

impl TunnelStart {
    /// The bytes of the frame.
    pub const LENGTH: usize = INNER_HEADER as usize;

    /// Returns the bytes of the frame. It is never `None`.
    #[inline(always)]
    pub const fn bytes(&self) -> Option<&[u8; Self::LENGTH]> {
        self.0.as_flattened().last_chunk()
    }

    /// Returns the headers of a packet that goes from one node to another with these Ethernet
    /// addresses. `port` is that of the tunnel. The source port is one for the flow, so that
    /// switches spread flows.
    ///
    /// Routers may cut the packet on its way, so each packet has its own identification. The bits
    /// for congestion are as the kernel's tunnels write them (RFC 3168, section 9.1.1).
    #[inline(always)]
    pub fn new(
        hardware: &[u8; 12],
        [source, destination]: [AddrV4; 2],
        port: u16,
        ([id_high, id_low], packet): ([u8; 2], &PlainPacket),
    ) -> Self {
        let ecn = packet.traffic_class() & ECN;
        let class = if ecn == CONGESTION { CAPABLE } else { ecn };
        let inner = u32::from(packet.length());
        #[expect(clippy::cast_possible_truncation, reason = "a longer packet has no route")]
        let [length, datagram] =
            [inner + TUNNEL_HEADERS_V4, inner + UDP_AND_GPE].map(|bytes| (bytes as u16).to_be_bytes());
        let [source, destination] = [source, destination].map(|address| address.octets);
        let first = [0x45, class, length[0], length[1]];
        let second = [id_high, id_low, 0, 0];
        let third = [HOPS, Protocol::Udp.number(), 0, 0];
        let sum = [first, second, third, source, destination]
            .into_iter()
            .fold(Difference::default(), |sum, word| sum.and(Difference::of_words([0; 4], word)));
        let [sum_high, sum_low] = sum.apply([0xff; 2]);
        let [port_high, port_low] = port.to_be_bytes();
        let [flow_high, flow_low] = source_port(packet).to_be_bytes();
        let [type_high, type_low] = ETH_P_IP.to_be_bytes();
        let word = |at: usize| [hardware[at], hardware[at + 1], hardware[at + 2], hardware[at + 3]];
        Self([
            [0, 0, hardware[0], hardware[1]],
            word(2),
            word(6),
            [hardware[10], hardware[11], type_high, type_low],
            first,
            second,
            [HOPS, Protocol::Udp.number(), sum_high, sum_low],
            source,
            destination,
            [flow_high, flow_low, port_high, port_low],
            // The packet within has its own checksum.
            [datagram[0], datagram[1], 0, 0],
            GPE_OF_V4,
            NETWORK,
        ])
    }
}

/// Returns a dynamic port (RFC 6335, section 6) for the flow of a packet.
#[inline(always)]
fn source_port(packet: &PlainPacket) -> u16 {
    const FIRST: u16 = 0xc000;
    let [source, destination] = packet.ports();
    let hash = hash::of_address(packet.source().words(), source ^ destination);
    FIRST | (hash >> 50) as u16
}

/// A plain TCP segment within a packet of the tunnel.
#[derive(Clone, Copy)]
pub struct InnerSegment {
    /// Its headers.
    pub packet: PlainPacket,
    /// Its TCP header.
    pub segment: Segment,
}

impl InnerSegment {
    /// Reads the segment within `outer`, a UDP packet for the port of the tunnel. Returns `None`
    /// in these cases: the headers differ from those of [`TunnelStart`]; one of the packets is
    /// truncated; the inner packet is longer than the outer one; a router has marked the outer
    /// packet for congestion.
    #[inline(always)]
    pub fn read(frame: &impl Frame, outer: &PlainPacket) -> Option<Self> {
        let [[length_high, length_low, checksum @ ..], gpe, network] =
            frame.load_words(PAYLOAD + UDP_LENGTH)?;
        let datagram = u32::from(u16::from_be_bytes([length_high, length_low]));
        let is_of_tunnel = checksum == [0; 2]
            && gpe == GPE_OF_V4
            && network == NETWORK
            && outer.traffic_class() & ECN != CONGESTION;
        if !is_of_tunnel {
            return None;
        }
        let packet = PlainPacket::read_at(frame, INNER_HEADER)?;
        let length = u32::from(packet.length());
        let is_whole = length + UDP_AND_GPE <= datagram
            && datagram + IPV4_HEADER <= outer.length().into()
            && length + INNER_HEADER <= frame.length();
        if !packet.is_tcp() || !is_whole {
            return None;
        }
        let segment = packet.segment_at(frame, INNER_HEADER + IPV4_HEADER)?;
        Some(Self { packet, segment })
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Addresses, InputFrame, MemoryFrame, TestPacket, generate, has_correct_checksums};

    const NODES: [AddrV4; 2] = [AddrV4 { octets: [192, 0, 2, 1] }, AddrV4 { octets: [192, 0, 2, 2] }];
    const PORT: u16 = 4_790;

    /// Returns the frame in which a packet goes through the tunnel.
    fn in_tunnel(packet: &TestPacket) -> Vec<u8> {
        let frame = MemoryFrame::<false>::new(&InputFrame::new(packet.to_frame()));
        let plain = PlainPacket::read(&frame).expect("a plain packet");
        let start = TunnelStart::new(&[7; 12], NODES, PORT, ([1, 2], &plain));
        [start.bytes().expect("all bytes"), &packet.to_ip_packet()[..]].concat()
    }

    fn read(frame: Vec<u8>) -> Option<InnerSegment> {
        let frame = MemoryFrame::<false>::new(&InputFrame::new(frame));
        InnerSegment::read(&frame, &PlainPacket::read(&frame)?)
    }

    proptest! {
        #[test]
        fn headers_of_the_tunnel_are_valid(packet in generate::transport(Addresses::BOTH[0])) {
            let frame = in_tunnel(&packet);
            prop_assert_eq!(has_correct_checksums(&frame), Some(true));
            let sliced = SlicedPacket::from_ethernet(&frame).expect("a packet");
            let Some(NetSlice::Ipv4(ip)) = sliced.net else { panic!("no IPv4") };
            let header = ip.header();
            prop_assert_eq!([header.source(), header.destination()], NODES.map(|node| node.octets));
            prop_assert_eq!(usize::from(header.total_len()), frame.len() - 14);
            prop_assert_eq!((header.dont_fragment(), header.ttl(), header.dcp().value()), (false, HOPS, 0));
            let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
            prop_assert_eq!((udp.destination_port(), udp.checksum()), (PORT, 0));
            prop_assert_eq!(usize::from(udp.length()), frame.len() - 34);
            let gpe = [&GPE_OF_V4[..], &NETWORK[..], &packet.to_ip_packet()[..]].concat();
            prop_assert_eq!(udp.payload(), gpe);
        }

        #[test]
        fn segment_is_read_as_it_was_sent(packet in generate::transport(Addresses::BOTH[0])) {
            let original = MemoryFrame::<false>::new(&InputFrame::new(packet.to_frame()));
            let plain = PlainPacket::read(&original).expect("a plain packet");
            let inner = read(in_tunnel(&packet));
            prop_assert_eq!(inner.is_some(), plain.is_tcp());
            let Some(inner) = inner else { return Ok(()) };
            prop_assert_eq!(inner.packet.direct_key(), plain.direct_key());
            let read = |segment: Segment| (segment.flags, segment.acknowledged, segment.checksum);
            prop_assert_eq!(Some(read(inner.segment)), plain.segment(&original).map(read));
        }

        #[test]
        fn truncated_packet_is_not_read(packet in generate::transport(Addresses::BOTH[0]), missing in 1..60usize) {
            let mut frame = in_tunnel(&packet);
            frame.truncate(frame.len() - missing);
            prop_assert!(read(frame).is_none());
        }

        #[test]
        fn congestion_is_told_as_by_the_kernels_tunnels(packet in generate::transport(Addresses::BOTH[0])) {
            for (inner, outer) in [(0, 0), (1, 1), (2, 2), (3, 2)] {
                let frame = in_tunnel(&TestPacket { traffic_class: 0xb8 | inner, ..packet.clone() });
                prop_assert_eq!(frame[15], outer);
            }
        }

        /// The kernel takes them out of the tunnel, or drops them.
        #[test]
        fn packet_with_another_header_is_not_read(
            packet in generate::transport(Addresses::BOTH[0]), at in 38..50usize, bits in 1..=255u8,
        ) {
            let mut frame = in_tunnel(&packet);
            frame[at] ^= bits;
            prop_assert!(read(frame).is_none());
        }

        #[test]
        fn congestion_on_the_way_is_left_to_the_kernel(packet in generate::transport(Addresses::BOTH[0])) {
            let mut frame = in_tunnel(&packet);
            prop_assert!(frame[15] <= CAPABLE);
            frame[15] = CONGESTION;
            prop_assert!(read(frame).is_none());
        }
    }
}
