//! Packets as tests speak of them, and as bytes of a frame, with right checksums throughout.

use std::{
    boxed::Box,
    net::{IpAddr, SocketAddr},
    ops::Range,
    vec,
    vec::Vec,
};

use etherparse::{
    Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options,
    Ipv6FragmentHeader, Ipv6Header, LaxSlicedPacket, NetSlice, SlicedPacket, TcpHeader, TransportSlice,
    UdpHeader,
};

use crate::packet::TcpFlags;

/// A packet, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Source; the port is that of what it carries, if that has ports.
    pub from: SocketAddr,
    /// Destination.
    pub to: SocketAddr,
    /// What it carries.
    pub carries: Carries,
    /// The Ethernet address it is for; that of lo is all zeros.
    pub to_mac: [u8; 6],
    /// Ethertypes of the VLAN tags in the frame.
    pub tags: Vec<u16>,
    /// IPv4 options, a multiple of 4 bytes.
    pub options: Vec<u8>,
    /// IPv6 extension headers before the fragment header.
    pub extensions: Vec<Extension>,
    /// What of it is sent; all of it, if none.
    pub part: Option<Part>,
    /// The transport checksum in place of the right one.
    pub checksum: Option<[u8; 2]>,
}

/// What a packet carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carries {
    /// A TCP segment.
    Tcp {
        /// Its flags.
        flags: TcpFlags,
        /// Its data.
        data: Vec<u8>,
    },
    /// A UDP datagram.
    Udp {
        /// Its data.
        data: Vec<u8>,
    },
    /// An ICMP message.
    Icmp {
        /// Type and code.
        kind: [u8; 2],
        /// The packet it tells of.
        told: Box<Sent>,
        /// So many bytes of it.
        length: usize,
    },
    /// Something else.
    Other {
        /// IP protocol number.
        proto: u8,
        /// What it is.
        bytes: Vec<u8>,
    },
}

/// An IPv6 extension header without content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Which.
    pub kind: u8,
    /// Its length, a multiple of 8 bytes.
    pub length: u8,
}

/// A fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Identification of the datagram.
    pub id: u32,
    /// Bytes of what it carries; but for the last one a multiple of 8. Beyond its end: all that is left.
    pub bytes: Range<usize>,
}

impl TcpFlags {
    /// A client's first segment.
    pub const SYN_ALONE: Self = Self(2);
    /// A server's first segment.
    pub const SYN_ACK: Self = Self(0x12);
    /// Most segments.
    pub const ACK_ALONE: Self = Self(0x10);
    /// A side's last segment.
    pub const FIN_ACK: Self = Self(0x11);
    /// The end.
    pub const RST_ALONE: Self = Self(4);
}

const AUTHENTICATION: u8 = 51;
const FRAGMENT: u8 = 44;
const HOPS: u8 = 61;

impl Sent {
    /// A packet.
    pub const fn new(from: SocketAddr, to: SocketAddr, carries: Carries) -> Self {
        Self {
            from,
            to,
            carries,
            to_mac: [0; 6],
            tags: Vec::new(),
            options: Vec::new(),
            extensions: Vec::new(),
            part: None,
            checksum: None,
        }
    }

    /// A TCP segment with a little data.
    pub fn tcp(flags: TcpFlags, from: SocketAddr, to: SocketAddr) -> Self {
        Self::new(from, to, Carries::Tcp { flags, data: b"segment".to_vec() })
    }

    /// A UDP datagram with a little data.
    pub fn udp(from: SocketAddr, to: SocketAddr) -> Self {
        Self::new(from, to, Carries::Udp { data: b"datagram!".to_vec() })
    }

    /// An ICMP error with all of a packet in it.
    pub fn error(kind: [u8; 2], from: IpAddr, to: IpAddr, told: Self) -> Self {
        let carries = Carries::Icmp { kind, told: Box::new(told), length: usize::MAX };
        Self::new(SocketAddr::new(from, 0), SocketAddr::new(to, 0), carries)
    }

    /// The same from elsewhere.
    #[must_use]
    pub fn from(self, from: SocketAddr) -> Self {
        Self { from, ..self }
    }

    /// The same to elsewhere.
    #[must_use]
    pub fn to(self, to: SocketAddr) -> Self {
        Self { to, ..self }
    }

    /// The same the other way.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    /// The part of it with these bytes of what it carries.
    #[must_use]
    pub fn part(self, id: u32, bytes: Range<usize>) -> Self {
        Self { part: Some(Part { id, bytes }), ..self }
    }

    /// The TCP segment with other flags.
    #[must_use]
    pub fn flags(mut self, new: TcpFlags) -> Self {
        if let Carries::Tcp { flags, .. } = &mut self.carries {
            *flags = new;
        }
        self
    }

    /// IP protocol number of what it carries.
    pub fn proto(&self) -> u8 {
        match (&self.carries, self.from) {
            (Carries::Tcp { .. }, _) => 6,
            (Carries::Udp { .. }, _) => 17,
            (Carries::Icmp { .. }, SocketAddr::V4(_)) => 1,
            (Carries::Icmp { .. }, SocketAddr::V6(_)) => 58,
            (Carries::Other { proto, .. }, _) => *proto,
        }
    }

    /// As a frame.
    pub fn bytes(&self) -> Vec<u8> {
        let ethertype = if self.from.is_ipv4() { 0x0800u16 } else { 0x86dd };
        let mut frame = [&self.to_mac[..], &[2, 0, 0, 0, 0, 1]].concat();
        for tag in &self.tags {
            frame.extend(tag.to_be_bytes());
            frame.extend(100u16.to_be_bytes());
        }
        frame.extend(ethertype.to_be_bytes());
        frame.extend(self.packet());
        frame
    }

    /// As an IP packet.
    pub fn packet(&self) -> Vec<u8> {
        let carried = self.carried();
        let range = self.part.as_ref().map_or(0..carried.len(), |part| part.bytes.clone());
        let part = &carried[range.start.min(carried.len())..range.end.min(carried.len())];
        let is_last = range.end >= carried.len();
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
                    hop_limit: HOPS,
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
            Ipv4Header::new(length, HOPS, IpNumber(self.proto()), from, to).expect("short enough");
        header.options = Ipv4Options::try_from(&self.options[..]).expect("a multiple of 4");
        header.total_len += u16::from(header.options.len_u8());
        if let Some(part) = &self.part {
            header.identification = u16::try_from(part.id).expect("IPv4 has 16 bits");
            header.dont_fragment = false;
        }
        header
    }

    /// What the extension header of a number, or what is before it, names as the next one.
    fn next_header(&self, number: usize) -> u8 {
        match (self.extensions.get(number), &self.part) {
            (Some(extension), _) => extension.kind,
            (None, Some(_)) if number == self.extensions.len() => FRAGMENT,
            _ => self.proto(),
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
        if let Some(part) = &self.part {
            let next = IpNumber(self.proto());
            let header = Ipv6FragmentHeader::new(next, offset(start), !is_last, part.id);
            bytes.extend(header.to_bytes());
        }
        bytes
    }

    /// What it carries, all of it.
    pub fn carried(&self) -> Vec<u8> {
        match &self.carries {
            Carries::Tcp { flags, data } => self.tcp_segment(*flags, data),
            Carries::Udp { data } => self.udp_datagram(data),
            Carries::Icmp { kind, told, length } => {
                let told = told.packet();
                self.icmp_message(*kind, &told[..told.len().min(*length)])
            }
            Carries::Other { bytes, .. } => bytes.clone(),
        }
    }

    fn tcp_segment(&self, TcpFlags(flags): TcpFlags, data: &[u8]) -> Vec<u8> {
        let mut header = TcpHeader::new(self.from.port(), self.to.port(), 7, 65_535);
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

    /// The four bytes before the packet that is told of are some router's MTU.
    fn icmp_message(&self, [type_u8, code_u8]: [u8; 2], told: &[u8]) -> Vec<u8> {
        let bytes5to8 = [0, 0, 5, 0x14];
        let header = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(_), _) => {
                let kind = Icmpv4Type::Unknown { type_u8, code_u8, bytes5to8 };
                Icmpv4Header::with_checksum(kind, told).to_bytes().to_vec()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let kind = Icmpv6Type::Unknown { type_u8, code_u8, bytes5to8 };
                let header = Icmpv6Header::with_checksum(kind, from.octets(), to.octets(), told);
                header.expect("short").to_bytes().to_vec()
            }
            families => panic!("{families:?} are not of one family"),
        };
        [&header, told].concat()
    }
}

fn offset(bytes: usize) -> IpFragOffset {
    assert!(bytes.is_multiple_of(8), "fragments begin at multiples of 8 bytes");
    IpFragOffset::try_new(u16::try_from(bytes / 8).expect("short")).expect("short")
}

/// Checks the checksums of a frame, as far as it is whole and well-formed; says whether it is.
#[track_caller]
pub fn assert_checksums(frame: &[u8]) -> bool {
    let Ok(sliced) = SlicedPacket::from_ethernet(frame) else { return false };
    if let Some(NetSlice::Ipv4(v4)) = &sliced.net {
        let header = v4.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum(), "of the IPv4 header");
    }
    if sliced.is_ip_payload_fragmented() {
        return false;
    }
    let (Some(net), Some(transport)) = (&sliced.net, &sliced.transport) else { return false };
    match (net, transport) {
        (NetSlice::Ipv4(ip), TransportSlice::Tcp(tcp)) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            assert_eq!(Ok(tcp.checksum()), tcp.calc_checksum_ipv4(from, to), "of TCP");
        }
        (NetSlice::Ipv6(ip), TransportSlice::Tcp(tcp)) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            assert_eq!(Ok(tcp.checksum()), tcp.calc_checksum_ipv6(from, to), "of TCP");
        }
        (NetSlice::Ipv4(ip), TransportSlice::Udp(udp)) if udp.checksum() != 0 => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            let right = udp.to_header().calc_checksum_ipv4_raw(from, to, udp.payload());
            assert_eq!(Ok(udp.checksum()), right, "of UDP");
        }
        (NetSlice::Ipv6(ip), TransportSlice::Udp(udp)) if udp.checksum() != 0 => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            let right = udp.to_header().calc_checksum_ipv6_raw(from, to, udp.payload());
            assert_eq!(Ok(udp.checksum()), right, "of UDP");
        }
        (NetSlice::Ipv4(_), TransportSlice::Icmpv4(icmp)) => {
            let header = icmp.header();
            assert_eq!(header.checksum, header.icmp_type.calc_checksum(icmp.payload()), "of ICMP");
            assert_told(icmp.payload());
        }
        (NetSlice::Ipv6(ip), TransportSlice::Icmpv6(icmp)) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            assert!(icmp.is_checksum_valid(from, to), "of ICMPv6");
        }
        _ => return false,
    }
    true
}

/// The IPv4 header that an ICMP message tells of has a right checksum.
#[track_caller]
fn assert_told(told: &[u8]) {
    if let Ok(sliced) = LaxSlicedPacket::from_ip(told)
        && let Some(etherparse::LaxNetSlice::Ipv4(v4)) = &sliced.net
    {
        let header = v4.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum(), "of the header told of");
    }
}
