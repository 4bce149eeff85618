//! Reading a packet's headers: where it comes from and goes to, and whether it is a fragment.

use crate::{Addr, Protocol, checksum::Difference, layout::Endpoint};

/// A packet that can be read and changed; offsets are in bytes from the start of what the link carries.
pub trait Frame {
    /// Copies bytes out; none if they are not all there.
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
    /// Puts bytes in; none if there is no room for them all.
    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()>;
    /// Brings the checksum of an IPv4 header up to date.
    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()>;
    /// Brings the checksum of what an IP packet carries up to date.
    fn fix_checksum(&self, offset: u32, difference: Difference, covered: ChecksumCoverage) -> Option<()>;
    /// Bytes changed that no checksum within the packet makes up for, but one the link's hardware took may cover.
    fn update_hardware_checksum(&self, difference: Difference);

    /// The bytes of all of it.
    fn length(&self) -> u32;
    /// The link.
    fn link(&self) -> u32;
    /// The mark, which netfilter sees.
    fn mark(&self) -> u32;
    /// Changes the mark.
    fn set_mark(&self, mark: u32);
}

/// How a checksum covers the bytes that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumCoverage {
    /// As part of the pseudo header, which is in the IP header of this version; else as part of what the packet carries.
    pub pseudo_header: Option<IpVersion>,
    /// All zeros stand for no checksum (UDP).
    pub may_be_absent: bool,
}

/// The version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// What an IP packet holds of its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// All of it.
    Whole,
    /// Its beginning, with the ports.
    First {
        /// The datagram's identification.
        id: u32,
    },
    /// A later part.
    Later {
        /// The datagram's identification.
        id: u32,
    },
}

/// The headers of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The version of IP.
    pub version: IpVersion,
    /// Where the IP header begins.
    pub header: u32,
    /// Where what it carries begins: behind options and extension headers.
    pub payload: u32,
    /// What it carries: an IP protocol number.
    pub proto: u8,
    /// The checksum of an IPv4 header, as it stands there.
    pub checksum: [u8; 2],
    /// Whether that is all of it.
    pub fragment: Fragment,
    /// Source.
    pub source: Addr,
    /// Destination.
    pub destination: Addr,
}

/// Source and destination with their ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// Source.
    pub source: Endpoint,
    /// Destination.
    pub destination: Endpoint,
}

impl Tuple {
    /// The tuple of what answers.
    #[inline(always)]
    pub const fn swapped(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;
const VLAN_TAG: u32 = 4;
/// Tags that are stepped over, at most.
const VLAN_TAGS: usize = 2;

/// Where the IP header begins, and its version, behind VLAN tags that are in the frame; none of other packets. `ethertype` is
/// that of what begins at `offset`.
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

/// IPv6 extension headers that are stepped over, at most.
const EXTENSION_HEADERS: usize = 6;

impl Packet {
    /// A packet whose headers are still to be read.
    #[inline(always)]
    pub const fn at(header: u32, version: IpVersion) -> Self {
        Self {
            version,
            header,
            payload: header,
            proto: 0,
            checksum: [0; 2],
            fragment: Fragment::Whole,
            source: Addr::UNSPECIFIED_V6,
            destination: Addr::UNSPECIFIED_V6,
        }
    }

    /// Reads the headers; none if they are cut short or make no sense. In place, as the verifier wants every byte of a result
    /// written, on the way to none too.
    #[inline(never)]
    pub fn read<F: Frame>(&mut self, frame: &F) -> Option<()> {
        match self.version {
            IpVersion::V4 => self.read_v4(frame),
            IpVersion::V6 => self.read_v6(frame),
        }
    }

    #[inline(always)]
    fn read_v4(&mut self, frame: &impl Frame) -> Option<()> {
        let ip: [u8; 20] = frame.load(self.header)?;
        let length = u32::from(ip[0] & 0x0f) * 4;
        if ip[0] >> 4 != 4 || length < 20 {
            return None;
        }
        let id = u32::from(u16::from_be_bytes([ip[4], ip[5]]));
        let place = u16::from_be_bytes([ip[6], ip[7]]);
        self.payload = self.header + length;
        self.proto = ip[9];
        self.checksum = [ip[10], ip[11]];
        self.fragment = Fragment::at(place & 0x1fff != 0, place & 0x2000 != 0, id);
        self.source = Addr::from_v4([ip[12], ip[13], ip[14], ip[15]]);
        self.destination = Addr::from_v4([ip[16], ip[17], ip[18], ip[19]]);
        Some(())
    }

    #[inline(always)]
    fn read_v6(&mut self, frame: &impl Frame) -> Option<()> {
        let fixed: [u8; 8] = frame.load(self.header)?;
        if fixed[0] >> 4 != 6 {
            return None;
        }
        self.payload = self.header + 40;
        self.proto = fixed[6];
        self.source = Addr { octets: frame.load(self.header + 8)? };
        self.destination = Addr { octets: frame.load(self.header + 24)? };
        // Mapped IPv4 addresses do not belong on a link (RFC 4942, section 2.2), and the maps take them for IPv4.
        if self.source.is_v4() || self.destination.is_v4() {
            return None;
        }
        self.step_over_extensions(frame)
    }

    /// Goes to what the packet carries (RFC 8200, section 4). What follows a later fragment's header is data.
    #[inline(always)]
    fn step_over_extensions(&mut self, frame: &impl Frame) -> Option<()> {
        for _ in 0..EXTENSION_HEADERS {
            if !self.is_at_extension() {
                return Some(());
            }
            self.payload += self.extension_length(frame)?;
            if matches!(self.fragment, Fragment::Later { .. }) {
                return Some(());
            }
        }
        if self.is_at_extension() { None } else { Some(()) }
    }

    #[inline(always)]
    const fn is_at_extension(&self) -> bool {
        matches!(self.proto, HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | FRAGMENT | AUTHENTICATION)
    }

    /// Reads one extension header, and says how long it is.
    #[inline(always)]
    fn extension_length(&mut self, frame: &impl Frame) -> Option<u32> {
        let extension: [u8; 8] = frame.load(self.payload)?;
        let kind = self.proto;
        self.proto = extension[0];
        let units = u32::from(extension[1]);
        Some(match kind {
            FRAGMENT => {
                let place = u16::from_be_bytes([extension[2], extension[3]]);
                let id = u32::from_be_bytes([extension[4], extension[5], extension[6], extension[7]]);
                self.fragment = Fragment::at(place & 0xfff8 != 0, place & 1 != 0, id);
                8
            }
            // In units of 4 bytes, and 2 of them are not counted (RFC 4302).
            AUTHENTICATION => (units + 2) * 4,
            _ => (units + 1) * 8,
        })
    }

    /// Source and destination port of TCP or UDP, in host byte order.
    #[inline(always)]
    pub fn ports(&self, frame: &impl Frame) -> Option<[u16; 2]> {
        let [a, b, c, d] = frame.load(self.payload)?;
        Some([u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])])
    }

    /// An IPv4 header without options, so that the ports come right behind the addresses.
    #[inline(always)]
    pub const fn is_plain_v4(&self) -> bool {
        matches!(self.version, IpVersion::V4) && self.payload == self.header + 20
    }

    /// Source and destination with their ports.
    #[inline(always)]
    pub const fn tuple(&self, [source, destination]: [u16; 2]) -> Tuple {
        Tuple {
            source: Endpoint::new(self.source, source),
            destination: Endpoint::new(self.destination, destination),
        }
    }

    /// The flags of a TCP segment, if all up to its checksum is there, so that what is judged by them can also be changed; none
    /// at all for other protocols.
    #[inline(always)]
    pub fn tcp_flags(&self, frame: &impl Frame, protocol: Protocol) -> Option<TcpFlags> {
        match protocol {
            Protocol::Tcp => {
                let [flags, _, _, _, _] = frame.load(self.payload + 13)?;
                Some(TcpFlags(flags))
            }
            Protocol::Udp | Protocol::Sctp => Some(TcpFlags(0)),
        }
    }
}

/// IP protocol numbers and IPv6 next headers.
pub const ICMP: u8 = 1;
/// ICMP of IPv6.
pub const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

impl Fragment {
    #[inline(always)]
    const fn at(is_offset: bool, is_followed: bool, id: u32) -> Self {
        match (is_offset, is_followed) {
            (true, _) => Self::Later { id },
            (false, true) => Self::First { id },
            (false, false) => Self::Whole,
        }
    }
}

/// The flags of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    const FIN: u8 = 1;
    const SYN: u8 = 1 << 1;
    const RST: u8 = 1 << 2;
    const ACK: u8 = 1 << 4;

    /// A client begins a connection.
    #[inline(always)]
    pub const fn is_syn(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN
    }

    /// A server agrees to one.
    #[inline(always)]
    pub const fn is_syn_ack(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN | Self::ACK
    }

    /// One side will send no more.
    #[inline(always)]
    pub const fn has_fin(self) -> bool {
        self.0 & Self::FIN != 0
    }

    /// One side gives up.
    #[inline(always)]
    pub const fn has_rst(self) -> bool {
        self.0 & Self::RST != 0
    }
}
