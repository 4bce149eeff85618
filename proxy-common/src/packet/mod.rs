//! Reads the headers of a packet: addresses, ports, TCP flags, and whether it is a fragment.

mod frame;
mod plain;
mod tcp;
mod tunnel;

use crate::{Addr, Protocol, layout::Endpoint, protocol::ChecksumField};

pub use self::{
    frame::{ChecksumCoverage, Frame, Route, RoutedPacket},
    plain::{FrameStart, PlainEnds, PlainPacket, Segment},
    tcp::TcpFlags,
    tunnel::{InnerSegment, TUNNEL_HEADERS_V4, TunnelStart},
};

/// The version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The part of its datagram that an IP packet holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The whole datagram.
    Whole,
    /// The first fragment, which has the ports.
    First,
    /// A later fragment.
    Later,
}

/// The headers of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The version of IP.
    pub version: IpVersion,
    /// The offsets of the IP header and of the payload. Narrow, because stack is scarce.
    header: u16,
    payload: u16,
    /// The IP protocol number of the payload.
    pub proto: u8,
    /// The checksum field of an IPv4 header.
    pub checksum: [u8; 2],
    /// The part of the datagram.
    pub fragment: Fragment,
    /// The identification of the datagram of a fragment.
    pub id: u32,
    /// The source.
    pub source: Addr,
    /// The destination.
    pub destination: Addr,
    /// The first four bytes of the payload, if there are so many: source and destination port.
    ports: [u8; 4],
    shape: Shape,
    /// The traffic class, with the bits for congestion.
    pub traffic_class: u8,
    /// The hop limit.
    pub hops: u8,
}

/// What is known of a packet when its headers are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// It has no ports, or its headers are not read yet.
    Portless,
    /// It is a [`PlainPacket`].
    Plain,
    /// It is another packet.
    Other,
}

/// Source and destination with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// The source.
    pub source: Endpoint,
    /// The destination.
    pub destination: Endpoint,
}

impl Tuple {
    /// Returns the tuple of the opposite direction.
    #[inline(always)]
    pub const fn swapped(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// The bits of a traffic class that routes, rules and queues look at: all but those of explicit
/// congestion notification (ECN, RFC 3168), which differ between the packets of a connection.
pub const DSCP: u8 = 0xfc;

/// The bytes of an Ethernet header.
pub const ETHERNET_HEADER: u32 = 14;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;
const VLAN_TAG: u32 = 4;
/// The maximum number of VLAN tags that are skipped.
const VLAN_TAGS: usize = 2;

/// Returns offset and version of the IP header after VLAN tags, if there is one. `ethertype` is the
/// type of what begins at `offset`.
#[inline(always)]
pub fn ip_header(frame: &impl Frame, mut ethertype: u16, mut offset: u32) -> Option<(u32, IpVersion)> {
    for _ in 0..VLAN_TAGS {
        if !matches!(ethertype, ETH_P_8021Q | ETH_P_8021AD) {
            break;
        }
        ethertype = u16::from_be_bytes(frame.load(offset + 2)?);
        offset += VLAN_TAG;
    }
    match ethertype {
        ETH_P_IP => Some((offset, IpVersion::V4)),
        ETH_P_IPV6 => Some((offset, IpVersion::V6)),
        _ => None,
    }
}

/// The mask of an offset, which is larger than any header. With it, the verifier of kernel 5.10
/// knows the limit of an offset.
const OFFSETS: u16 = 0x3fff;

/// The maximum number of IPv6 extension headers that are skipped.
const EXTENSION_HEADERS: usize = 6;

impl Packet {
    /// Returns a packet whose headers are not read yet.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the header follows two VLAN tags at most")]
    pub const fn at(header: u32, version: IpVersion) -> Self {
        let header = header as u16;
        Self {
            version,
            header,
            payload: header,
            proto: 0,
            checksum: [0; 2],
            fragment: Fragment::Whole,
            id: 0,
            source: Addr::UNSPECIFIED_V6,
            destination: Addr::UNSPECIFIED_V6,
            ports: [0; 4],
            shape: Shape::Portless,
            traffic_class: 0,
            hops: 0,
        }
    }

    /// Reads the headers. Returns `None` if they are truncated or invalid. It works in place,
    /// because the verifier requires that every byte of a returned value is written, even for
    /// `None`.
    #[inline(never)]
    pub fn read<F: Frame>(&mut self, frame: &F) -> Option<()> {
        match self.version {
            IpVersion::V4 => self.read_v4(frame)?,
            IpVersion::V6 => self.read_v6(frame)?,
        }
        if let Some(ports) = frame.load(self.payload()) {
            let is_plain = self.header() == ETHERNET_HEADER
                && self.is_v4_without_options()
                && matches!(self.fragment, Fragment::Whole)
                && Protocol::of_packet(self.proto).is_some();
            (self.ports, self.shape) = (ports, if is_plain { Shape::Plain } else { Shape::Other });
        }
        Some(())
    }

    #[inline(always)]
    fn read_v4(&mut self, frame: &impl Frame) -> Option<()> {
        let ip: [u8; 20] = frame.load(self.header())?;
        let length = u16::from(ip[0] & 0x0f) * 4;
        if ip[0] >> 4 != 4 || length < 20 {
            return None;
        }
        let fragment = u16::from_be_bytes([ip[6], ip[7]]);
        self.payload = self.header + length;
        self.traffic_class = ip[1];
        self.hops = ip[8];
        self.proto = ip[9];
        self.checksum = [ip[10], ip[11]];
        self.fragment = Fragment::at(fragment & 0x1fff != 0, fragment & 0x2000 != 0);
        self.id = u32::from(u16::from_be_bytes([ip[4], ip[5]]));
        self.source = Addr::from_v4([ip[12], ip[13], ip[14], ip[15]]);
        self.destination = Addr::from_v4([ip[16], ip[17], ip[18], ip[19]]);
        Some(())
    }

    #[inline(always)]
    fn read_v6(&mut self, frame: &impl Frame) -> Option<()> {
        let fixed: [u8; 8] = frame.load(self.header())?;
        if fixed[0] >> 4 != 6 {
            return None;
        }
        self.payload = self.header + 40;
        self.traffic_class = fixed[0] << 4 | fixed[1] >> 4;
        self.proto = fixed[6];
        self.hops = fixed[7];
        self.source = Addr { octets: frame.load(self.header() + 8)? };
        self.destination = Addr { octets: frame.load(self.header() + 24)? };
        // IPv4-mapped addresses are invalid on a link (RFC 4942, section 2.2), and the maps would
        // take them for IPv4.
        if self.source.is_v4() || self.destination.is_v4() {
            return None;
        }
        self.skip_extensions(frame)
    }

    /// Skips to the payload (RFC 8200, section 4). Data follows the fragment header of a later
    /// fragment.
    #[inline(always)]
    fn skip_extensions(&mut self, frame: &impl Frame) -> Option<()> {
        for _ in 0..EXTENSION_HEADERS {
            if !self.is_at_extension() {
                return Some(());
            }
            self.payload += self.extension_length(frame)?;
            if matches!(self.fragment, Fragment::Later) {
                return Some(());
            }
        }
        if self.is_at_extension() { None } else { Some(()) }
    }

    #[inline(always)]
    const fn is_at_extension(&self) -> bool {
        matches!(self.proto, HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | FRAGMENT | AUTHENTICATION)
    }

    /// Reads one extension header, and returns its length in bytes.
    #[inline(always)]
    fn extension_length(&mut self, frame: &impl Frame) -> Option<u16> {
        let extension: [u8; 8] = frame.load(self.payload())?;
        let kind = self.proto;
        self.proto = extension[0];
        let units = u16::from(extension[1]);
        Some(match kind {
            FRAGMENT => {
                let fragment = u16::from_be_bytes([extension[2], extension[3]]);
                self.fragment = Fragment::at(fragment & 0xfff8 != 0, fragment & 1 != 0);
                self.id = u32::from_be_bytes([extension[4], extension[5], extension[6], extension[7]]);
                8
            }
            // In units of 4 bytes, without the first two units (RFC 4302).
            AUTHENTICATION => (units + 2) * 4,
            _ => (units + 1) * 8,
        })
    }

    /// Returns the offset of the IP header.
    #[inline(always)]
    pub const fn header(&self) -> u32 {
        (self.header & OFFSETS) as u32
    }

    /// Returns true if the frame has another destination address or other ports than when the
    /// headers were read.
    #[inline(always)]
    pub fn has_other_destination(&self, frame: &impl Frame) -> bool {
        let address = match self.version {
            IpVersion::V4 => frame.load(self.header() + 16).map(Addr::from_v4),
            IpVersion::V6 => frame.load(self.header() + 24).map(|octets| Addr { octets }),
        };
        let has_other_ports = || self.has_ports() && frame.load(self.payload()) != Some(self.ports);
        address.is_some_and(|address| address != self.destination) || has_other_ports()
    }

    /// Returns the offset of the payload, after options and extension headers.
    #[inline(always)]
    pub const fn payload(&self) -> u32 {
        (self.payload & OFFSETS) as u32
    }

    /// Returns true if the packet has ports.
    #[inline(always)]
    pub const fn has_ports(&self) -> bool {
        !matches!(self.shape, Shape::Portless)
    }

    /// Returns source and destination port, in host byte order.
    #[inline(always)]
    pub fn ports(&self) -> Option<[u16; 2]> {
        self.has_ports().then_some(self.ports_or_zeros())
    }

    /// Returns source and destination port, in host byte order, or zeros if there are none.
    #[inline(always)]
    pub const fn ports_or_zeros(&self) -> [u16; 2] {
        let [a, b, c, d] = self.ports;
        [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
    }

    /// Returns true for a [`PlainPacket`].
    #[inline(always)]
    pub const fn is_plain(&self) -> bool {
        matches!(self.shape, Shape::Plain)
    }

    /// Returns true for an IPv4 header without options, so that the ports directly follow the
    /// addresses.
    #[inline(always)]
    pub const fn is_v4_without_options(&self) -> bool {
        matches!(self.version, IpVersion::V4) && self.payload() == self.header() + 20
    }

    /// Returns source and destination with these ports.
    #[inline(always)]
    pub const fn tuple(&self, [source, destination]: [u16; 2]) -> Tuple {
        Tuple {
            source: Endpoint::new(self.source, source),
            destination: Endpoint::new(self.destination, destination),
        }
    }

    /// Returns true for an IPv4 header without options, or an IPv6 header without extensions.
    #[inline(always)]
    pub const fn has_plain_header(&self) -> bool {
        let header = match self.version {
            IpVersion::V4 => 20,
            IpVersion::V6 => 40,
        };
        self.payload() == self.header() + header
    }

    /// Returns the field of the transport checksum, with its offset in the frame.
    #[inline(always)]
    pub fn checksum_field(&self, protocol: Protocol) -> Option<ChecksumField> {
        let ChecksumField { offset, is_optional } = protocol.checksum_field()?;
        Some(ChecksumField { offset: self.payload() + offset, is_optional })
    }

    /// Returns the bytes of the packet that its header names.
    #[inline(always)]
    pub fn length(&self, frame: &impl Frame) -> Option<u32> {
        let (offset, before) = match self.version {
            IpVersion::V4 => (2, 0),
            IpVersion::V6 => (4, 40),
        };
        let length = u16::from_be_bytes(frame.load(self.header() + offset)?);
        Some(u32::from(length) + before)
    }
}

/// The offset of the checksum in the header of TCP.
pub const TCP_CHECKSUM: u32 = 16;
/// The offset of the checksum in the header of UDP.
pub const UDP_CHECKSUM: u32 = 6;

/// The IP protocol number of ICMP.
pub const ICMP: u8 = 1;
/// The IP protocol number of ICMP for IPv6.
pub const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

impl Fragment {
    #[inline(always)]
    const fn at(is_offset: bool, is_followed: bool) -> Self {
        match (is_offset, is_followed) {
            (true, _) => Self::Later,
            (false, true) => Self::First,
            (false, false) => Self::Whole,
        }
    }
}
