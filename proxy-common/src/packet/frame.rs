//! What programs can do with a frame of a link.

use super::{IpVersion, Tuple};
use crate::{Addr, Protocol, checksum::Difference, layout::Endpoint};

/// A frame of a link that can be read and changed. Offsets are in bytes from its start.
pub trait Frame {
    /// The frame begins with an Ethernet header.
    const IS_ETHERNET: bool;
    /// The frame came through the tunnel from another node.
    const IS_TUNNELED: bool;

    /// Reads bytes. Returns `None` if the frame is too short.
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
    /// Reads words of four bytes, as [`Self::load`]. Programs need less code for it.
    fn load_words<const N: usize>(&self, offset: u32) -> Option<[[u8; 4]; N]>;
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
    fn find_route(&self, packet: &RoutedPacket<'_>, route: &mut Route) -> bool;
    /// Makes the packet leave on another link, as it is, if the program returns
    /// [`Outcome::Redirect`](crate::link::Outcome).
    fn redirect(&self, link: u32);
    /// Does the same, but hands the packet to the peer of the link, a veth, in the peer's network
    /// namespace. It comes in there at once, and no program, qdisc or capture of the link sees
    /// it. Only for programs at the ingress of links.
    fn redirect_to_peer(&self, link: u32);
    /// Makes the packet go through the tunnel from `source` to the node with this address, if the
    /// program then redirects it to the tunnel. Returns `None` if the kernel has no memory. Kernels
    /// before 5.19 choose the source.
    fn tunnel_to(&self, node: &Addr, source: &Addr) -> Option<()>;
    /// Returns the address of the node that sent the packet through the tunnel.
    fn tunnel_source(&self) -> Option<Addr>;
    /// Cuts the frame to its first bytes. If it was longer, the kernel forgets a sum of the
    /// hardware. Returns `None` if it is shorter, if the rest has a checksum that hardware is to
    /// complete, or if the kernel has no memory.
    fn cut(&self, length: u32) -> Option<()>;
    /// Inserts bytes of any content between the Ethernet header, if there is one, and the IP
    /// header. Returns `None` if the kernel has no memory.
    fn insert(&self, bytes: u32) -> Option<()>;
    /// Inserts bytes of any content in the same place, for headers of IPv4 and UDP that carry the
    /// packet through a tunnel. Not for packets that the kernel put together or will cut
    /// ([`Self::segment_size`]). Returns `None` if the kernel refuses, and changes nothing then.
    fn insert_tunnel_headers(&self, bytes: u32) -> Option<()>;
    /// Removes so many bytes after the Ethernet header: the headers of a tunnel. The packet that
    /// they carried is left. Not for packets that the kernel put together or will cut. Returns
    /// `None` if the kernel refuses, and changes nothing then.
    fn remove_tunnel_headers(&self, bytes: u32) -> Option<()>;
    /// Makes the packet leave on another link with the Ethernet addresses that the kernel has for
    /// the route, if the program returns [`Outcome::Redirect`](crate::link::Outcome). The kernel
    /// asks for the address of the next hop if it does not know it. A frame without an Ethernet
    /// header gets one, so offsets from before are invalid.
    fn redirect_to(&self, route: &Route);
}

/// A packet whose route is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedPacket<'a> {
    /// The version of IP.
    pub version: IpVersion,
    /// The IP protocol number.
    pub proto: u8,
    /// The traffic class, with the bits for congestion.
    pub traffic_class: u8,
    /// The bytes of the packet, or of its longest segment.
    pub length: u16,
    /// The source.
    pub source: &'a Endpoint,
    /// The destination.
    pub destination: &'a Endpoint,
}

/// Where the kernel forwards a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The interface index of the link.
    pub link: u32,
    /// The address of the router, or of the destination.
    pub next_hop: Addr,
    /// The Ethernet addresses of packets: destination and source. The destination is zero if the
    /// kernel does not know the next hop. Kernels before 6.3 tell the former address of a next hop
    /// that does not answer any more (1fe4850b34ab).
    pub hardware: [u8; 12],
    /// Packets may leave by the peer of the link.
    pub to_peer: bool,
}

impl Route {
    /// No route.
    pub const NONE: Self =
        Self { link: 0, next_hop: Addr::UNSPECIFIED_V6, hardware: [0; 12], to_peer: false };
}

/// How a checksum covers the changed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumCoverage {
    /// The IP version if they are in the pseudo header. `None` if they are in the payload.
    pub pseudo_header: Option<IpVersion>,
    /// True if zero means that the packet has no checksum (UDP).
    pub is_optional: bool,
}
