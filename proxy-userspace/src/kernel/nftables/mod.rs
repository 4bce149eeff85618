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

use libc::c_int;

pub use self::{
    change::{Chain, Change, Hook, comment},
    element::{ElementData, ElementKey, ElementValue, Field, FieldType, VerdictValue},
    listing::TableListing,
    set::{Set, SetKind, SetSpec},
    socket::Nftables,
    statement::{Name, Rule, Selector, Statement, Verdict},
};
use crate::net::IpFamily;

/// The properties of a family in nf_tables.
trait NftFamily {
    /// Returns nft's keyword for the family and for its header.
    fn keyword(self) -> &'static str;
    /// Returns the kernel's number of the family (`NFPROTO_*`).
    fn nfproto(self) -> c_int;
    /// Returns the length of an address in bytes.
    fn address_length(self) -> u32;
    /// Returns the length of an address in 32-bit words.
    fn address_words(self) -> c_int;
    /// Returns the offset of the source address in the IP header. The destination follows it.
    fn source_offset(self) -> u32;
}

impl NftFamily for IpFamily {
    fn keyword(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    fn nfproto(self) -> c_int {
        match self {
            Self::V4 => libc::NFPROTO_IPV4,
            Self::V6 => libc::NFPROTO_IPV6,
        }
    }

    fn address_length(self) -> u32 {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }

    fn address_words(self) -> c_int {
        match self {
            Self::V4 => 1,
            Self::V6 => 4,
        }
    }

    fn source_offset(self) -> u32 {
        match self {
            Self::V4 => 12,
            Self::V6 => 8,
        }
    }
}
