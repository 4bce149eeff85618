//! The keys and values of the maps about links and other nodes.

use crate::addr::Addr;

map_type! {
    /// Value of `bridge_ports`, whose keys are interface indexes of bridge ports: the hardware
    /// address of the bridge.
    HardwareAddress, 8 {
        /// The address.
        bytes: [u8; 6],
        /// Zero.
        zero: [u8; 2],
    }
}

impl HardwareAddress {
    /// Returns the value for an address.
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self { bytes, zero: [0; 2] }
    }
}

/// Value of `dsr_nodes`: what an address is to a node that announces the tunnel.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DsrAddress {
    /// Packets of the tunnel go to it, and come from it.
    End = 1,
    /// It is another address of the node.
    Other = 2,
}

map_type! {
    /// Key of `vlans`: a VLAN whose link has programs of its own.
    VlanKey, 8 {
        /// The interface index of the link beneath, where frames come in with the tag.
        link: u32,
        /// The identifier in the tag.
        id: u16,
        /// The protocol of the tag, as an Ethernet type in host byte order.
        protocol: u16,
    }
}

map_type! {
    /// Value of `xdp_links`, whose keys are the interface indexes of links with an XDP program.
    XdpLinkValue, 8 {
        /// The hardware address of the link.
        address: [u8; 6],
        /// 1 if the link takes frames that XDP programs of other links redirect to it.
        takes_frames: u8,
        /// 1 if frames that leave on the link where they came in are redirected to it, because its
        /// driver may not send them otherwise (veth).
        redirects_to_itself: u8,
    }
}

map_type! {
    /// Key of `masquerade_addresses`, a longest-prefix trie. The values are addresses of the node.
    /// The prefix length counts the bits of both fields.
    MasqueradeSubnet, 20 {
        /// The index of the link on which packets leave.
        link: u32,
        /// The address of the endpoint.
        addr: Addr,
    }
}

impl MasqueradeSubnet {
    /// The bits of the key before the address.
    pub const LINK_BITS: u32 = 32;
    /// The bits of a whole key, for lookups.
    pub const BITS: u32 = Self::LINK_BITS + 128;
}
