//! Plain packets: TCP or UDP packets of IPv4 without options that are no fragments, in Ethernet
//! frames without VLAN tags among their bytes. Most packets are plain.

use super::{
    ETH_P_IP, ETHERNET_HEADER, Frame, IpVersion, TcpFlags, Tuple,
    tcp::{TCP_ACKNOWLEDGEMENT, TCP_SEQUENCE},
};
use crate::{
    Addr, AddrV4, Protocol,
    checksum::Difference,
    layout::{DirectKeyV4, Direction, Endpoint, Flow, FlowKey},
    protocol::ChecksumField,
};

/// The bytes of an IPv4 header without options.
pub(super) const IPV4_HEADER: u32 = 20;
/// The offset of the TCP or UDP header of a plain packet.
pub(super) const PAYLOAD: u32 = ETHERNET_HEADER + IPV4_HEADER;
/// The offset in a UDP header of its length, which the checksum follows.
pub(super) const UDP_LENGTH: u32 = 4;
/// The bytes of a UDP header.
pub(super) const UDP_HEADER: u32 = 8;

/// The IPv4 header and the ports of a plain packet, as little-endian words.
#[derive(Clone, Copy)]
pub struct PlainPacket([u32; 6]);

/// What the first bytes of a frame become: Ethernet header, IPv4 header and ports. Two bytes of
/// padding come before them, so that words of the IPv4 header are words here.
#[repr(C, align(8))]
pub struct FrameStart([[u8; 8]; 5]);

impl FrameStart {
    /// The bytes of the frame.
    pub const LENGTH: usize = PAYLOAD as usize + 4;

    /// Returns the bytes of the frame. It is never `None`.
    #[inline(always)]
    pub const fn bytes(&self) -> Option<&[u8; Self::LENGTH]> {
        self.0.as_flattened().last_chunk()
    }
}

/// Source and destination of a plain packet. Ports are in host byte order.
#[derive(Clone, Copy)]
pub struct PlainEnds {
    /// The addresses.
    pub addresses: [AddrV4; 2],
    /// The ports.
    pub ports: [u16; 2],
}

impl PlainEnds {
    /// Returns the ends of packets of a flow of IPv4 after translation.
    #[inline(always)]
    pub const fn of(flow: &Flow) -> Self {
        let Flow { source, destination, .. } = flow;
        Self {
            addresses: [AddrV4::last_of(&source.addr), AddrV4::last_of(&destination.addr)],
            ports: [source.port, destination.port],
        }
    }

    /// Returns the ports as in a packet.
    #[inline(always)]
    const fn port_bytes(&self) -> [u8; 4] {
        let [source, destination] = self.ports;
        (source.swap_bytes() as u32 | (destination.swap_bytes() as u32) << 16).to_le_bytes()
    }
}

/// The fields of a TCP or UDP header that the direct path needs. UDP has neither flags nor
/// acknowledgements.
#[derive(Clone, Copy)]
pub struct Segment {
    /// The flags.
    pub flags: TcpFlags,
    /// The acknowledgement number.
    pub acknowledged: u32,
    /// The checksum field.
    pub checksum: [u8; 2],
    /// The bytes of the header.
    header: u32,
}

impl PlainPacket {
    /// The offset of the checksum of the IPv4 header. Addresses and ports follow it.
    pub const CHECKSUM: u32 = ETHERNET_HEADER + 10;
    /// No packet: neither TCP nor UDP.
    pub const NONE: Self = Self([0; 6]);

    /// Returns true if the packet of a frame with an IP header at this offset may be plain.
    #[inline(always)]
    pub fn is_at(header: u32, version: IpVersion) -> bool {
        header == ETHERNET_HEADER && matches!(version, IpVersion::V4)
    }

    /// Reads the headers, where [`Self::is_at`] is true. Returns `None` if the packet is not plain
    /// or truncated.
    #[inline(always)]
    pub fn read(frame: &impl Frame) -> Option<Self> {
        Self::read_at(frame, ETHERNET_HEADER)
    }

    /// Does the same with a packet whose IPv4 header has this offset: that within a packet of the
    /// tunnel, too.
    #[inline(always)]
    pub(super) fn read_at(frame: &impl Frame, header: u32) -> Option<Self> {
        let packet = Self::load(frame, header)?;
        let [first, ..] = packet.bytes(0);
        let [_, _, fragment, offset] = packet.bytes(1);
        let is_fragment = u16::from_be_bytes([fragment, offset]) & 0x3fff != 0;
        let is_plain = first == 0x45 && !is_fragment && Protocol::of_packet(packet.proto()).is_some();
        is_plain.then_some(packet)
    }

    /// Reads the headers of a packet that was read as plain before. Returns `None` if the kernel
    /// cannot read them.
    #[inline(always)]
    pub fn read_again(frame: &impl Frame) -> Option<Self> {
        Self::load(frame, ETHERNET_HEADER)
    }

    #[inline(always)]
    fn load(frame: &impl Frame, header: u32) -> Option<Self> {
        Some(Self(frame.load_words(header)?.map(u32::from_le_bytes)))
    }

    #[inline(always)]
    pub(super) const fn bytes(&self, word: usize) -> [u8; 4] {
        self.0[word].to_le_bytes()
    }

    #[inline(always)]
    const fn proto(&self) -> u8 {
        let [_, proto, ..] = self.bytes(2);
        proto
    }

    /// Returns true for UDP, false for TCP and for [`Self::NONE`].
    #[inline(always)]
    pub const fn is_udp(&self) -> bool {
        self.proto() == Protocol::Udp.number()
    }

    /// Returns true for TCP, false for UDP.
    #[inline(always)]
    pub const fn is_tcp(&self) -> bool {
        self.proto() == Protocol::Tcp.number()
    }

    /// Returns the protocol.
    #[inline(always)]
    pub const fn protocol(&self) -> Protocol {
        if self.is_tcp() { Protocol::Tcp } else { Protocol::Udp }
    }

    /// Returns the hop limit.
    #[inline(always)]
    pub const fn hops(&self) -> u8 {
        let [hops, ..] = self.bytes(2);
        hops
    }

    /// Returns the traffic class.
    #[inline(always)]
    pub const fn traffic_class(&self) -> u8 {
        let [_, class, ..] = self.bytes(0);
        class
    }

    /// Returns the source.
    #[inline(always)]
    pub const fn source(&self) -> Addr {
        Addr::from_v4(self.bytes(3))
    }

    /// Returns the destination.
    #[inline(always)]
    pub const fn destination(&self) -> Addr {
        Addr::from_v4(self.bytes(4))
    }

    /// Returns source and destination port, in host byte order.
    #[inline(always)]
    pub const fn ports(&self) -> [u16; 2] {
        let [a, b, c, d] = self.bytes(5);
        [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
    }

    /// Returns the key of the packet on the direct path.
    #[inline(always)]
    pub const fn direct_key(&self) -> DirectKeyV4 {
        let [source_port, destination_port] = self.ports();
        DirectKeyV4 {
            source: AddrV4 { octets: self.bytes(3) },
            destination: AddrV4 { octets: self.bytes(4) },
            source_port,
            destination_port,
            proto: self.proto(),
            zero: [0; 3],
        }
    }

    /// Returns the key of the packet's flow in this direction.
    #[inline(always)]
    pub const fn flow_key(&self, direction: Direction) -> FlowKey {
        let [source, destination] = self.ports();
        let source = Endpoint::new(self.source(), source);
        let destination = Endpoint::new(self.destination(), destination);
        FlowKey::new(direction, self.protocol(), Tuple { source, destination })
    }

    /// Reads the TCP or UDP header. Returns `None` if the header without options is truncated: then
    /// there may be no checksum to rewrite. The general code reads a TCP header of 18 bytes too.
    #[inline(always)]
    pub fn segment(&self, frame: &impl Frame) -> Option<Segment> {
        self.segment_at(frame, PAYLOAD)
    }

    /// Does the same with a header at this offset.
    #[inline(always)]
    pub(super) fn segment_at(&self, frame: &impl Frame, payload: u32) -> Option<Segment> {
        if !self.is_tcp() {
            let [[_, _, a, b]] = frame.load_words(payload + UDP_LENGTH)?;
            let flags = TcpFlags(0);
            return Some(Segment { flags, acknowledged: 0, checksum: [a, b], header: UDP_HEADER });
        }
        let [acknowledged, [words, flags, ..], [a, b, ..]] =
            frame.load_words(payload + TCP_ACKNOWLEDGEMENT)?;
        Some(Segment {
            flags: TcpFlags(flags),
            acknowledged: u32::from_be_bytes(acknowledged),
            checksum: [a, b],
            header: u32::from(words >> 4) * 4,
        })
    }

    /// Returns the sequence number of a TCP segment.
    #[inline(always)]
    pub fn tcp_sequence(frame: &impl Frame) -> Option<u32> {
        frame.load(PAYLOAD + TCP_SEQUENCE).map(u32::from_be_bytes)
    }

    /// Returns the bytes of the packet, or of its longest segment if the kernel will cut it.
    #[inline(always)]
    pub fn longest(&self, frame: &impl Frame, segment: &Segment) -> u32 {
        let size = frame.segment_size();
        if size == 0 { self.length().into() } else { IPV4_HEADER + segment.header + size }
    }

    /// Does the same for a packet whose TCP or UDP header was read before. Returns more than any
    /// route permits if the kernel cannot read it.
    #[inline(always)]
    pub fn longest_segment(&self, frame: &impl Frame) -> u32 {
        if frame.segment_size() == 0 {
            return self.length().into();
        }
        self.segment(frame).map_or(u32::MAX, |segment| self.longest(frame, &segment))
    }

    /// Returns the bytes of the TCP or UDP header and its payload, as the IPv4 header names them.
    #[inline(always)]
    pub fn payload_length(&self) -> u32 {
        u32::from(self.length()).wrapping_sub(IPV4_HEADER)
    }

    /// Returns the bytes of the packet, as the IPv4 header names them.
    #[inline(always)]
    pub const fn length(&self) -> u16 {
        let [_, _, a, b] = self.bytes(0);
        u16::from_be_bytes([a, b])
    }

    /// Returns offset and kind of the checksum of the TCP or UDP header.
    #[inline(always)]
    pub const fn checksum_field(&self) -> Option<ChecksumField> {
        match self.protocol().checksum_field() {
            Some(field) => Some(ChecksumField { offset: PAYLOAD + field.offset, ..field }),
            None => None,
        }
    }

    /// Returns the differences that these addresses and ports make to a checksum.
    #[inline(always)]
    pub fn differences(&self, ends: &PlainEnds) -> [Difference; 2] {
        let addresses = Difference::of_words(self.bytes(3), ends.addresses[0].octets)
            .and(Difference::of_words(self.bytes(4), ends.addresses[1].octets));
        let ports = Difference::of_words(self.bytes(5), ends.port_bytes());
        [addresses, ports]
    }

    /// Returns what follows the offset [`Self::CHECKSUM`] with these addresses and ports: the
    /// checksum of the IPv4 header, addresses and ports. `addresses` is the difference that the
    /// addresses make.
    #[inline(always)]
    pub fn ends(&self, ends: &PlainEnds, addresses: Difference) -> [u8; 14] {
        let [_, _, a, b] = self.bytes(2);
        let [source, destination] =
            ends.addresses.map(|address| u128::from(u32::from_le_bytes(address.octets)));
        // Built in registers, because BPF would otherwise write byte by byte.
        let bytes = u128::from(u16::from_le_bytes(addresses.apply([a, b])))
            | source << 16
            | destination << 48
            | u128::from(u32::from_le_bytes(ends.port_bytes())) << 80;
        let [bytes @ .., _, _] = bytes.to_le_bytes();
        bytes
    }

    /// Returns the start of the frame in which the packet leaves: with these Ethernet addresses,
    /// addresses and ports, and one hop less. `addresses` is the difference that the addresses make.
    #[inline(always)]
    pub fn start(&self, hardware: &[u8; 12], ends: &PlainEnds, addresses: Difference) -> FrameStart {
        let [hops, proto, a, b] = self.bytes(2);
        let [a, b] = addresses.and(Difference::of_hop(hops, proto)).apply([a, b]);
        let third = u32::from_le_bytes([hops.wrapping_sub(1), proto, a, b]);
        let pair = |first: u32, second: u32| u64::from(first) | u64::from(second) << 32;
        let [source, destination] = ends.addresses.map(|address| u32::from_le_bytes(address.octets));
        let part = |at: usize| {
            let bytes = [hardware[at], hardware[at + 1], hardware[at + 2], hardware[at + 3]];
            u64::from(u32::from_le_bytes(bytes))
        };
        let words = [
            part(0) << 16 | part(4) << 48,
            part(4) >> 16 | part(8) << 16 | u64::from(ETH_P_IP.swap_bytes()) << 48,
            pair(self.0[0], self.0[1]),
            pair(third, source),
            pair(destination, u32::from_le_bytes(ends.port_bytes())),
        ];
        FrameStart(words.map(u64::to_le_bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;
    use crate::{
        layout::DirectKey,
        packet::Packet,
        rewrite,
        testing::{Addresses, InputFrame, MemoryFrame, TestPacket, generate},
    };

    fn v4(addr: Addr) -> AddrV4 {
        AddrV4::last_of(&addr)
    }

    proptest! {
        #[test]
        fn general_reader_agrees_on_what_is_plain_and_on_its_fields(
            input in select(&Addresses::BOTH[..]).prop_flat_map(generate::input),
        ) {
            let frame = MemoryFrame::<false>::new(&input);
            let Some((header, version)) = frame.ip() else { return Ok(()) };
            let mut packet = Packet::at(header, version);
            let is_plain = packet.read(&frame).is_some() && packet.is_plain();
            let plain = if PlainPacket::is_at(header, version) { PlainPacket::read(&frame) } else { None };
            prop_assert_eq!(plain.is_some(), is_plain);
            let Some(plain) = plain else { return Ok(()) };
            let Packet { source, destination, hops, traffic_class, proto, .. } = packet;
            prop_assert_eq!((plain.source(), plain.destination()), (source, destination));
            prop_assert_eq!((plain.hops(), plain.traffic_class(), plain.proto()), (hops, traffic_class, proto));
            prop_assert_eq!(plain.ports(), packet.ports_or_zeros());
            prop_assert_eq!(plain.checksum_field(), packet.checksum_field(plain.protocol()));
            let headers = packet.payload() - packet.header();
            let length = packet.length(&frame).map(|length| length.wrapping_sub(headers));
            prop_assert_eq!(Some(plain.payload_length()), length);
        }

        #[test]
        fn general_reader_agrees_on_the_header_of_tcp_or_udp(
            packet in generate::transport(Addresses::BOTH[0]), missing in 0..20usize,
        ) {
            let mut bytes = packet.to_frame();
            bytes.truncate(bytes.len() - missing);
            let frame = MemoryFrame::<false>::new(&InputFrame::new(bytes));
            let Some(plain) = PlainPacket::read(&frame) else { return Ok(()) };
            let header = if plain.is_tcp() { 20 } else { 8 };
            let is_whole = frame.length() >= PAYLOAD + header;
            let segment = plain.segment(&frame);
            prop_assert_eq!(segment.is_some(), is_whole);
            let Some(segment) = segment else { return Ok(()) };
            let mut general = Packet::at(ETHERNET_HEADER, IpVersion::V4);
            general.read(&frame).expect("a plain packet");
            let answer = (segment.flags, segment.acknowledged);
            prop_assert_eq!(general.tcp_answer(&frame, plain.protocol()), Some(answer));
            let checksum = plain.checksum_field().and_then(|field| frame.load(field.offset));
            prop_assert_eq!(Some(segment.checksum), checksum);
            let key = DirectKey::new(plain.protocol(), general.tuple(general.ports_or_zeros()));
            prop_assert_eq!(Some(plain.direct_key()), key.v4());
            prop_assert_eq!(Some(plain.longest(&frame, &segment)), general.length(&frame));
        }

        #[test]
        fn rewritten_packet_is_the_one_with_other_ends_one_hop_later(
            before in generate::transport(Addresses::BOTH[0]),
            after in generate::transport(Addresses::BOTH[0]),
            hardware: [u8; 12],
        ) {
            let [from, to] = [after.from, after.to].map(Endpoint::from);
            let ends = PlainEnds {
                addresses: [v4(from.addr), v4(to.addr)],
                ports: [from.port, to.port],
            };
            let frame = MemoryFrame::<false>::new(&InputFrame::new(before.to_frame()));
            let plain = PlainPacket::read(&frame).expect("a plain packet");
            rewrite::plain(&frame, &plain, &hardware, &ends, plain.differences(&ends)).expect("memory");
            let [to_mac, from_mac] = [0, 6].map(|at| *hardware[at..].first_chunk().expect("6 bytes"));
            let hops = before.hops - 1;
            let expected = TestPacket { from: after.from, to: after.to, to_mac, from_mac, hops, ..before };
            prop_assert_eq!(frame.into_bytes(), expected.to_frame());
        }
    }
}
