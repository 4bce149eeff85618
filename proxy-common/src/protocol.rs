//! The transport protocols of Service ports, and everything in which the programs treat them
//! differently.

use core::fmt;

/// A transport protocol that a Service port can have, with its IP protocol number.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp = 6,
    /// UDP.
    Udp = 17,
    /// SCTP.
    Sctp = 132,
}

/// Where the Internet checksum of a transport header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumField {
    /// Bytes from the start of the transport header.
    pub offset: u32,
    /// True if zero means that the packet has no checksum.
    pub is_optional: bool,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Returns the IP protocol number.
    #[inline(always)]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the name that Kubernetes objects use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    /// Returns the name that `/etc/protocols`, nft and iptables use.
    pub const fn lowercase_name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// Returns the protocol with this IP protocol number, unless no Service port can have it.
    #[inline(always)]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            132 => Some(Self::Sctp),
            _ => None,
        }
    }

    /// Returns the protocol of a socket. An MPTCP socket counts as TCP, because its subflows are
    /// TCP connections.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the guard excludes larger numbers")]
    pub const fn of_socket(number: u32) -> Option<Self> {
        const IPPROTO_MPTCP: u32 = 262;
        match number {
            IPPROTO_MPTCP => Some(Self::Tcp),
            0..=0xff => Self::from_number(number as u8),
            _ => None,
        }
    }

    /// Returns the protocol of a packet that the link programs translate. They leave SCTP packets
    /// alone.
    #[inline(always)]
    pub const fn of_packet(number: u8) -> Option<Self> {
        match Self::from_number(number) {
            Some(Self::Sctp) | None => None,
            translated => translated,
        }
    }

    /// Returns true if the first packet of a flow says that it opens a connection.
    #[inline(always)]
    pub const fn is_connection_oriented(self) -> bool {
        match self {
            Self::Tcp | Self::Sctp => true,
            Self::Udp => false,
        }
    }

    /// Returns the Internet checksum in the transport header, if the protocol has one.
    #[inline(always)]
    pub const fn checksum_field(self) -> Option<ChecksumField> {
        match self {
            Self::Tcp => Some(ChecksumField { offset: 16, is_optional: false }),
            Self::Udp => Some(ChecksumField { offset: 6, is_optional: true }),
            // A CRC32c, which does not cover the addresses (RFC 9260, section 6.8).
            Self::Sctp => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mptcp_socket_counts_as_tcp() {
        assert_eq!(Protocol::of_socket(262), Some(Protocol::Tcp));
        assert_eq!(Protocol::of_socket(1), None);
        assert_eq!(Protocol::of_socket(6 + 256), Some(Protocol::Tcp));
        assert_eq!(Protocol::of_socket(17 + 256), None);
    }
}
