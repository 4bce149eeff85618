//! Reads the headers of a packet: addresses, ports, TCP flags, and whether it is a fragment.

use crate::{Addr, Protocol, checksum::Difference, layout::Endpoint};

/// A frame of a link that can be read and changed. Offsets are in bytes from its start.
pub trait Frame {
    /// The frame begins with an Ethernet header.
    const IS_ETHERNET: bool;
    /// The frame came through the tunnel from another node.
    const IS_TUNNELED: bool;

    /// Reads bytes. Returns `None` if the frame is too short.
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
    /// Writes bytes. Returns `None` if the frame is too short or the kernel has no memory.
    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()>;
    /// Updates the checksum of an IPv4 header.
    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()>;
    /// Updates the checksum of a transport header or ICMP message.
    fn fix_checksum(&self, offset: u32, difference: Difference, coverage: ChecksumCoverage) -> Option<()>;
    /// Updates the sum of the packet that the hardware computed, if there is one. For changed bytes
    /// for which no checksum within the packet compensates.
    fn update_hardware_checksum(&self, difference: Difference);

    /// Returns the number of bytes.
    fn length(&self) -> u32;
    /// Returns the interface index of the link.
    fn link(&self) -> u32;
    /// Returns the mark, which netfilter sees.
    fn mark(&self) -> u32;
    /// Sets the mark.
    fn set_mark(&self, mark: u32);
    /// Returns the note that the program on the link where the packet came in left for the one on
    /// the link where it leaves. Netfilter does not see it.
    fn note(&self) -> u32;
    /// Leaves a note, of 16 bits.
    fn set_note(&self, note: u32);
    /// Returns the interface index of the link on which the packet came in, or 0 if the node sends
    /// it.
    fn ingress_link(&self) -> u32;
    /// Returns the bytes of payload in each segment into which the kernel will cut the packet, or 0
    /// if it will not.
    fn segment_size(&self) -> u32;
    /// Returns true if the frame has a VLAN tag beside its bytes.
    fn has_vlan_tag(&self) -> bool;
    /// Returns the priority, by which a qdisc may choose.
    fn priority(&self) -> u32;
    /// Sets the priority.
    fn set_priority(&self, priority: u32);
    /// Returns true if a socket of the node gets packets with this source and destination.
    fn has_socket(&self, protocol: Protocol, tuple: &Tuple) -> bool;
    /// Asks the kernel where it would forward a packet that came in on this link. Returns false if
    /// it would not, if the packet is too long, or if a tunnel is on the way.
    fn find_route(&self, packet: &RoutedPacket, route: &mut Route) -> bool;
    /// Makes the packet leave on another link, as it is, if the program returns
    /// [`Outcome::Redirect`](crate::link::Outcome).
    fn redirect(&self, link: u32);
    /// Makes the packet go through the tunnel from `source` to the node with this address, if the
    /// program then redirects it to the tunnel. Returns `None` if the kernel has no memory. Kernels
    /// before 5.19 choose the source.
    fn tunnel_to(&self, node: &Addr, source: &Addr) -> Option<()>;
    /// Returns the address of the node that sent the packet through the tunnel.
    fn tunnel_source(&self) -> Option<Addr>;
    /// Cuts the frame to its first bytes. Returns `None` if it is shorter, if the rest has a
    /// checksum that hardware is to complete, or if the kernel has no memory.
    fn cut(&self, length: u32) -> Option<()>;
    /// Inserts bytes of any content between the Ethernet header, if there is one, and the IP
    /// header. Returns `None` if the kernel has no memory.
    fn insert(&self, bytes: u32) -> Option<()>;
    /// Makes the packet leave on another link with the Ethernet addresses that the kernel has for
    /// the route, if the program returns [`Outcome::Redirect`](crate::link::Outcome). The kernel
    /// asks for the address of the next hop if it does not know it.
    fn redirect_to(&self, route: &Route);
}

/// A packet whose route is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedPacket {
    /// The version of IP.
    pub version: IpVersion,
    /// The IP protocol number.
    pub proto: u8,
    /// The traffic class, with the bits for congestion.
    pub traffic_class: u8,
    /// The bytes of the packet, or of its longest segment.
    pub length: u16,
    /// Source and destination.
    pub tuple: Tuple,
}

/// Where the kernel forwards a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The interface index of the link.
    pub link: u32,
    /// The address of the router, or of the destination.
    pub next_hop: Addr,
}

impl Route {
    /// No route.
    pub const NONE: Self = Self { link: 0, next_hop: Addr::UNSPECIFIED_V6 };
}

/// How a checksum covers the changed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumCoverage {
    /// The IP version if they are in the pseudo header. `None` if they are in the payload.
    pub pseudo_header: Option<IpVersion>,
    /// True if zero means that the packet has no checksum (UDP).
    pub is_optional: bool,
}

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
    has_ports: bool,
    /// The traffic class, with the bits for congestion.
    pub traffic_class: u8,
    /// The hop limit.
    pub hops: u8,
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
            has_ports: false,
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
            (self.ports, self.has_ports) = (ports, true);
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
        let has_other_ports = || self.has_ports && frame.load(self.payload()) != Some(self.ports);
        address.is_some_and(|address| address != self.destination) || has_other_ports()
    }

    /// Returns the offset of the payload, after options and extension headers.
    #[inline(always)]
    pub const fn payload(&self) -> u32 {
        (self.payload & OFFSETS) as u32
    }

    /// Returns source and destination port, in host byte order.
    #[inline(always)]
    pub fn ports(&self) -> Option<[u16; 2]> {
        let [a, b, c, d] = self.ports;
        self.has_ports.then_some([u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])])
    }

    /// Returns true for an IPv4 header without options, so that the ports directly follow the
    /// addresses.
    #[inline(always)]
    pub const fn is_plain_v4(&self) -> bool {
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

    /// Returns the flags of a TCP segment, and no flags for other protocols. Returns `None` if the
    /// segment is truncated before the end of its checksum, because it could not be rewritten.
    #[inline(always)]
    pub fn tcp_flags(&self, frame: &impl Frame, protocol: Protocol) -> Option<TcpFlags> {
        match protocol {
            Protocol::Tcp => {
                let [_, flags, _, _, _, _] = frame.load(self.payload() + TCP_LENGTH)?;
                Some(TcpFlags(flags))
            }
            Protocol::Udp | Protocol::Sctp => Some(TcpFlags(0)),
        }
    }

    /// Returns the flags of a TCP segment, as [`Self::tcp_flags`], and its acknowledgement number,
    /// which counts if the flag ACK is set.
    ///
    /// The number is no `Option`: LLVM would leave it undefined for other protocols, and the
    /// verifiers of older kernels do not permit to copy an undefined value.
    #[inline(always)]
    pub fn tcp_answer(&self, frame: &impl Frame, protocol: Protocol) -> Option<(TcpFlags, u32)> {
        match protocol {
            Protocol::Tcp => {
                let [a, b, c, d, _, flags, _, _, _, _] = frame.load(self.payload() + TCP_ACKNOWLEDGEMENT)?;
                Some((TcpFlags(flags), u32::from_be_bytes([a, b, c, d])))
            }
            Protocol::Udp | Protocol::Sctp => Some((TcpFlags(0), 0)),
        }
    }

    /// Returns the sequence number of a TCP segment.
    #[inline(always)]
    pub fn tcp_sequence(&self, frame: &impl Frame) -> Option<u32> {
        frame.load(self.payload() + TCP_SEQUENCE).map(u32::from_be_bytes)
    }

    /// Returns the bytes of the header of a TCP segment.
    #[inline(always)]
    pub fn tcp_header(&self, frame: &impl Frame) -> Option<u32> {
        let [words, _] = frame.load(self.payload() + TCP_LENGTH)?;
        Some(u32::from(words >> 4) * 4)
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

    /// Returns the acknowledgement number of a TCP segment.
    #[inline(always)]
    pub fn tcp_acknowledgement(&self, frame: &impl Frame) -> Option<u32> {
        frame.load(self.payload() + TCP_ACKNOWLEDGEMENT).map(u32::from_be_bytes)
    }
}

/// The offset of the length of the header of TCP.
const TCP_LENGTH: u32 = 12;
/// The offset of the sequence number in the header of TCP.
const TCP_SEQUENCE: u32 = 4;
/// The offset of the acknowledgement number.
const TCP_ACKNOWLEDGEMENT: u32 = 8;

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

/// The flags of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    const FIN: u8 = 1;
    const SYN: u8 = 1 << 1;
    const RST: u8 = 1 << 2;
    const ACK: u8 = 1 << 4;

    /// Returns true for the first segment of a client.
    #[inline(always)]
    pub const fn is_syn(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN
    }

    /// Returns true for the first segment of a server.
    #[inline(always)]
    pub const fn is_syn_ack(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN | Self::ACK
    }

    /// Returns true if the acknowledgement number counts.
    #[inline(always)]
    pub const fn has_ack(self) -> bool {
        self.0 & Self::ACK != 0
    }

    /// Returns true if the sender closes its side.
    #[inline(always)]
    pub const fn has_fin(self) -> bool {
        self.0 & Self::FIN != 0
    }

    /// Returns true for a segment that neither opens, closes nor resets a connection.
    #[inline(always)]
    pub const fn is_plain(self) -> bool {
        self.0 & (Self::ACK | Self::SYN | Self::FIN | Self::RST) == Self::ACK
    }

    /// Returns true if the sender resets the connection.
    #[inline(always)]
    pub const fn has_rst(self) -> bool {
        self.0 & Self::RST != 0
    }
}
