//! Packets with the fields that tests set, and their bytes with correct checksums.

use std::{
    boxed::Box,
    net::{IpAddr, SocketAddr},
    ops::Range,
    vec,
    vec::Vec,
};

use etherparse::{
    Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options,
    Ipv6FragmentHeader, Ipv6Header, TcpHeader, UdpHeader,
};

use crate::packet::TcpFlags;

/// A packet, or a fragment of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestPacket {
    /// The source. The port is unused if the payload has no ports.
    pub from: SocketAddr,
    /// The destination.
    pub to: SocketAddr,
    /// The payload of the IP packet.
    pub payload: Payload,
    /// The destination of the Ethernet header. The address of lo is all zeros.
    pub to_mac: [u8; 6],
    /// The source of the Ethernet header.
    pub from_mac: [u8; 6],
    /// The hop limit.
    pub hops: u8,
    /// The traffic class, with ECN.
    pub traffic_class: u8,
    /// The ethertypes of the VLAN tags in the frame.
    pub vlan_tags: Vec<u16>,
    /// The IPv4 options, a multiple of 4 bytes.
    pub options: Vec<u8>,
    /// The IPv6 extension headers before the fragment header.
    pub extensions: Vec<Extension>,
    /// The fragment to send. `None` sends the whole packet.
    pub fragment: Option<FragmentRange>,
    /// The TCP sequence number.
    pub sequence: u32,
    /// The TCP acknowledgement number.
    pub acknowledgement: u32,
    /// The TCP window.
    pub window: u16,
    /// Replaces the correct transport checksum.
    pub checksum: Option<[u8; 2]>,
}

/// The payload of an IP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A TCP segment.
    Tcp {
        /// The flags.
        flags: TcpFlags,
        /// The data.
        data: Vec<u8>,
    },
    /// A UDP datagram.
    Udp {
        /// The data.
        data: Vec<u8>,
    },
    /// An ICMP message.
    Icmp {
        /// Type and code.
        kind: [u8; 2],
        /// The inner packet.
        inner: Box<TestPacket>,
        /// The number of bytes of the inner packet.
        length: usize,
    },
    /// Another payload.
    Other {
        /// The IP protocol number.
        protocol: u8,
        /// The payload.
        bytes: Vec<u8>,
    },
}

/// An IPv6 extension header without content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The IPv6 next header number.
    pub kind: u8,
    /// The length, a multiple of 8 bytes.
    pub length: u8,
}

/// A fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FragmentRange {
    /// The identification of the datagram.
    pub id: u32,
    /// The bytes of the payload. The start is a multiple of 8, and so is the end unless it is at or
    /// beyond the end of the payload.
    pub bytes: Range<usize>,
}

impl TcpFlags {
    /// The first segment of a client.
    pub const SYN_ALONE: Self = Self(2);
    /// The first segment of a server.
    pub const SYN_ACK: Self = Self(0x12);
    /// Most other segments.
    pub const ACK_ALONE: Self = Self(0x10);
    /// The last segment of a side.
    pub const FIN_ACK: Self = Self(0x11);
    /// A reset.
    pub const RST_ALONE: Self = Self(4);
}

const AUTHENTICATION: u8 = 51;
const FRAGMENT: u8 = 44;
const HOPS: u8 = 61;

impl TestPacket {
    /// Returns a packet with this payload.
    pub const fn new(from: SocketAddr, to: SocketAddr, payload: Payload) -> Self {
        Self {
            from,
            to,
            payload,
            to_mac: [0; 6],
            from_mac: [2, 0, 0, 0, 0, 1],
            hops: HOPS,
            traffic_class: 0,
            vlan_tags: Vec::new(),
            options: Vec::new(),
            extensions: Vec::new(),
            fragment: None,
            sequence: 7,
            acknowledgement: 7,
            window: 65_535,
            checksum: None,
        }
    }

    /// Returns a TCP segment with some data.
    pub fn tcp(flags: TcpFlags, from: SocketAddr, to: SocketAddr) -> Self {
        Self::new(from, to, Payload::Tcp { flags, data: b"segment".to_vec() })
    }

    /// Returns a UDP datagram with some data.
    pub fn udp(from: SocketAddr, to: SocketAddr) -> Self {
        Self::new(from, to, Payload::Udp { data: b"datagram!".to_vec() })
    }

    /// Returns an ICMP error with a whole inner packet.
    pub fn icmp_error(kind: [u8; 2], from: IpAddr, to: IpAddr, inner: Self) -> Self {
        let payload = Payload::Icmp { kind, inner: Box::new(inner), length: usize::MAX };
        Self::new(SocketAddr::new(from, 0), SocketAddr::new(to, 0), payload)
    }

    /// Returns the packet with another source.
    #[must_use]
    pub fn from(self, from: SocketAddr) -> Self {
        Self { from, ..self }
    }

    /// Returns the packet with another destination.
    #[must_use]
    pub fn to(self, to: SocketAddr) -> Self {
        Self { to, ..self }
    }

    /// Returns the packet with source and destination swapped.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    /// Returns the fragment with these bytes of the payload.
    #[must_use]
    pub fn fragment(self, id: u32, bytes: Range<usize>) -> Self {
        Self { fragment: Some(FragmentRange { id, bytes }), ..self }
    }

    /// Returns the packet with another TCP sequence number. Without this, sequence and
    /// acknowledgement numbers of all packets are the same.
    #[must_use]
    pub fn sequence(self, sequence: u32) -> Self {
        Self { sequence, ..self }
    }

    /// Returns the packet with another TCP acknowledgement number.
    #[must_use]
    pub fn acknowledgement(self, acknowledgement: u32) -> Self {
        Self { acknowledgement, ..self }
    }

    /// Returns the packet with other TCP flags.
    #[must_use]
    pub fn flags(mut self, new: TcpFlags) -> Self {
        if let Payload::Tcp { flags, .. } = &mut self.payload {
            *flags = new;
        }
        self
    }

    /// Returns the packet as the kernel leaves it to hardware that completes the checksum: the
    /// field holds the sum of the pseudo header.
    #[must_use]
    pub fn with_sum_of_pseudo_header(self) -> Self {
        let addresses = [self.from.ip(), self.to.ip()].map(|address| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        });
        let words = addresses.concat();
        let words = words.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let length = u32::try_from(self.payload_bytes().len()).expect("short");
        let sum = words.sum::<u32>() + u32::from(self.protocol()) + length;
        let folded = u16::try_from(sum % 0xffff).expect("a remainder");
        Self { checksum: Some(folded.to_be_bytes()), ..self }
    }

    /// Returns the IP protocol number of the payload.
    pub fn protocol(&self) -> u8 {
        match (&self.payload, self.from) {
            (Payload::Tcp { .. }, _) => 6,
            (Payload::Udp { .. }, _) => 17,
            (Payload::Icmp { .. }, SocketAddr::V4(_)) => 1,
            (Payload::Icmp { .. }, SocketAddr::V6(_)) => 58,
            (Payload::Other { protocol, .. }, _) => *protocol,
        }
    }

    /// Returns the frame.
    pub fn to_frame(&self) -> Vec<u8> {
        let ethertype = if self.from.is_ipv4() { 0x0800u16 } else { 0x86dd };
        let mut frame = [self.to_mac, self.from_mac].concat();
        for tag in &self.vlan_tags {
            frame.extend(tag.to_be_bytes());
            frame.extend(100u16.to_be_bytes());
        }
        frame.extend(ethertype.to_be_bytes());
        frame.extend(self.to_ip_packet());
        frame
    }

    /// Returns the IP packet.
    pub fn to_ip_packet(&self) -> Vec<u8> {
        let payload = self.payload_bytes();
        let range = self.fragment.as_ref().map_or(0..payload.len(), |part| part.bytes.clone());
        let part = &payload[range.start.min(payload.len())..range.end.min(payload.len())];
        let is_last = range.end >= payload.len();
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut header = self.v4_header(from.octets(), to.octets(), part.len());
                header.more_fragments = !is_last;
                header.fragment_offset = offset(range.start);
                header.header_checksum = header.calc_header_checksum();
                [&header.to_bytes(), part].concat()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let extensions = self.extension_headers(range.start, is_last);
                let header = Ipv6Header {
                    payload_length: u16::try_from(extensions.len() + part.len()).expect("short"),
                    next_header: IpNumber(self.next_header(0)),
                    hop_limit: self.hops,
                    traffic_class: self.traffic_class,
                    source: from.octets(),
                    destination: to.octets(),
                    ..Ipv6Header::default()
                };
                [&header.to_bytes()[..], &extensions, part].concat()
            }
            families => panic!("{families:?} are not of one family"),
        }
    }

    fn v4_header(&self, from: [u8; 4], to: [u8; 4], length: usize) -> Ipv4Header {
        let length = u16::try_from(length).expect("short");
        let mut header =
            Ipv4Header::new(length, self.hops, IpNumber(self.protocol()), from, to).expect("short enough");
        header.dscp = (self.traffic_class >> 2).try_into().expect("six bits");
        header.ecn = (self.traffic_class & 3).try_into().expect("two bits");
        header.options = Ipv4Options::try_from(&self.options[..]).expect("a multiple of 4");
        header.total_len += u16::from(header.options.len_u8());
        if let Some(part) = &self.fragment {
            header.identification = u16::try_from(part.id).expect("IPv4 has 16 bits");
            header.dont_fragment = false;
        }
        header
    }

    /// Returns the next header number of the extension header before the one with this index.
    fn next_header(&self, number: usize) -> u8 {
        match (self.extensions.get(number), &self.fragment) {
            (Some(extension), _) => extension.kind,
            (None, Some(_)) if number == self.extensions.len() => FRAGMENT,
            _ => self.protocol(),
        }
    }

    fn extension_headers(&self, start: usize, is_last: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, Extension { kind, length }) in self.extensions.iter().enumerate() {
            let units = if *kind == AUTHENTICATION { length / 4 - 2 } else { length / 8 - 1 };
            let mut header = vec![0; usize::from(*length)];
            header[..2].copy_from_slice(&[self.next_header(number + 1), units]);
            bytes.extend(header);
        }
        if let Some(part) = &self.fragment {
            let next = IpNumber(self.protocol());
            let header = Ipv6FragmentHeader::new(next, offset(start), !is_last, part.id);
            bytes.extend(header.to_bytes());
        }
        bytes
    }

    /// Returns the whole payload.
    pub fn payload_bytes(&self) -> Vec<u8> {
        match &self.payload {
            Payload::Tcp { flags, data } => self.tcp_segment(*flags, data),
            Payload::Udp { data } => self.udp_datagram(data),
            Payload::Icmp { kind, inner, length } => {
                let inner = inner.to_ip_packet();
                self.icmp_message(*kind, &inner[..inner.len().min(*length)])
            }
            Payload::Other { bytes, .. } => bytes.clone(),
        }
    }

    fn tcp_segment(&self, TcpFlags(flags): TcpFlags, data: &[u8]) -> Vec<u8> {
        let mut header = TcpHeader::new(self.from.port(), self.to.port(), self.sequence, self.window);
        header.acknowledgment_number = self.acknowledgement;
        [header.fin, header.syn, header.rst, header.psh, header.ack] =
            [0, 1, 2, 3, 4].map(|bit| flags & (1 << bit) != 0);
        header.checksum = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                header.calc_checksum_ipv4_raw(from.octets(), to.octets(), data)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                header.calc_checksum_ipv6_raw(from.octets(), to.octets(), data)
            }
            families => panic!("{families:?} are not of one family"),
        }
        .expect("short");
        header.checksum = self.checksum.map_or(header.checksum, u16::from_be_bytes);
        [&header.to_bytes(), data].concat()
    }

    fn udp_datagram(&self, data: &[u8]) -> Vec<u8> {
        let (from, to) = (self.from.port(), self.to.port());
        let mut header = UdpHeader {
            source_port: from,
            destination_port: to,
            length: u16::try_from(8 + data.len()).expect("short"),
            checksum: 0,
        };
        header.checksum = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                header.calc_checksum_ipv4_raw(from.octets(), to.octets(), data)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                header.calc_checksum_ipv6_raw(from.octets(), to.octets(), data)
            }
            families => panic!("{families:?} are not of one family"),
        }
        .expect("short");
        header.checksum = self.checksum.map_or(header.checksum, u16::from_be_bytes);
        [&header.to_bytes(), data].concat()
    }

    /// The four bytes before the inner packet are the MTU of a router, unless the error is about a
    /// port.
    fn icmp_message(&self, [type_u8, code_u8]: [u8; 2], inner: &[u8]) -> Vec<u8> {
        let is_of_port = matches!([type_u8, code_u8], [3, 3] | [1, 4]);
        let bytes5to8 = if is_of_port { [0; 4] } else { [0, 0, 5, 0x14] };
        let header = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(_), _) => {
                let kind = Icmpv4Type::Unknown { type_u8, code_u8, bytes5to8 };
                Icmpv4Header::with_checksum(kind, inner).to_bytes().to_vec()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let kind = Icmpv6Type::Unknown { type_u8, code_u8, bytes5to8 };
                let header = Icmpv6Header::with_checksum(kind, from.octets(), to.octets(), inner);
                header.expect("short").to_bytes().to_vec()
            }
            families => panic!("{families:?} are not of one family"),
        };
        [&header, inner].concat()
    }
}

fn offset(bytes: usize) -> IpFragOffset {
    assert!(bytes.is_multiple_of(8), "fragments begin at multiples of 8 bytes");
    IpFragOffset::try_new(u16::try_from(bytes / 8).expect("short")).expect("short")
}
