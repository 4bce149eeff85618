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

#[cfg(feature = "fuzzing")]
pub(super) use self::listing::read_any;
pub use self::{
    change::{Chain, Change, Hook, comment},
    element::{ElementData, ElementKey, ElementValue, Field, FieldBytes, FieldType, VerdictValue},
    listing::TableListing,
    set::{Set, SetKind, SetSpec},
    socket::Nftables,
    statement::{Name, Rule, Selector, Statement, Verdict},
};
use crate::net::IpFamily;

/// The properties of a family in nf_tables.
struct NftFamily {
    /// nft's keyword for the family and for its header.
    keyword: &'static str,
    /// The kernel's number of the family (`NFPROTO_*`).
    number: c_int,
    /// The length of an address in 32-bit words.
    address_words: u8,
    /// The offset of the source address in the IP header. The destination follows it.
    source_offset: u32,
}

impl NftFamily {
    const fn of(family: IpFamily) -> Self {
        match family {
            IpFamily::V4 => {
                Self { keyword: "ip", number: libc::NFPROTO_IPV4, address_words: 1, source_offset: 12 }
            }
            IpFamily::V6 => {
                Self { keyword: "ip6", number: libc::NFPROTO_IPV6, address_words: 4, source_offset: 8 }
            }
        }
    }

    fn address_length(&self) -> u32 {
        4 * u32::from(self.address_words)
    }
}
