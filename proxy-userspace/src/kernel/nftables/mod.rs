//! Changes and lists nf_tables over netlink. It does not know about Services.
//!
//! No existing crate fits: rustables has the GPL, nftnl needs the C library libnftnl and has no
//! concatenated keys, and the crate nftables runs nft. For netlink-packet-netfilter, see
//! [`super::netlink`]. A process of nft costs 2.3 ms of CPU and 12 to 15 ms of time for a change;
//! most of the time it waits for an RCU grace period when it exits. To add or list the elements of
//! 30,000 Services with four endpoints, it needs 350 to 470 MiB of memory. This module costs what
//! the kernel needs for the change.

mod change;
mod element;
mod expression;
mod listing;
mod set;
mod socket;
mod statement;
mod uapi;

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use libc::c_int;

pub use self::{
    change::{Chain, Change, Hook, comment},
    element::{ElementData, ElementKey, ElementValue, Field, FieldType, VerdictValue},
    listing::TableListing,
    set::{Set, SetKind, SetSpec},
    socket::Nftables,
    statement::{Name, Rule, Selector, Statement, Verdict},
};

/// The family of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `ip`.
    Ip,
    /// `ip6`.
    Ip6,
}

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::Ip, Self::Ip6];

    /// Returns the family of an address.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ip } else { Self::Ip6 }
    }

    /// Returns nft's keyword for the family and for its header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        }
    }

    const fn nfproto(self) -> c_int {
        match self {
            Self::Ip => libc::NFPROTO_IPV4,
            Self::Ip6 => libc::NFPROTO_IPV6,
        }
    }

    /// Returns the length of an address in bytes.
    const fn address_length(self) -> u32 {
        match self {
            Self::Ip => 4,
            Self::Ip6 => 16,
        }
    }

    /// Returns the length of an address in 32-bit words.
    const fn address_words(self) -> c_int {
        match self {
            Self::Ip => 1,
            Self::Ip6 => 4,
        }
    }

    /// Returns the offset of the source address in the IP header. The destination follows it.
    const fn source_offset(self) -> u32 {
        match self {
            Self::Ip => 12,
            Self::Ip6 => 8,
        }
    }
}
