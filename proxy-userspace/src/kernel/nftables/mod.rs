//! `nf_tables` over netlink: whole transactions in, and what a table holds out. Knows nothing of Services.
//!
//! No crate was found that does this: rustables is under the GPL, nftnl needs the C library libnftnl and has no concatenated
//! keys, and the crate nftables runs nft. A process of nft costs 2.3 ms of CPU and 12 to 15 ms of time a change (most of it waiting for an
//! RCU grace period when it ends), and 350 to 470 MiB of memory to add or list the elements of 30,000 Services with four
//! endpoints; this costs what the kernel takes for the change.

pub(in crate::kernel) mod attributes;
mod change;
mod element;
mod expression;
mod listing;
mod set;
mod socket;
mod statement;

#[cfg(test)]
mod tests;

pub use self::{
    change::{Chain, Change, Hook, comment},
    element::{Data, Field, FieldKind, Key, Led, Value},
    listing::Found,
    set::{Holds, Set, Shape},
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
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ip, Self::Ip6];

    /// As nft calls it, the table's family and what is matched in it alike.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        }
    }

    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`.
    const fn number(self) -> u8 {
        match self {
            Self::Ip => 2,
            Self::Ip6 => 10,
        }
    }

    /// In bytes.
    const fn address_length(self) -> u32 {
        match self {
            Self::Ip => 4,
            Self::Ip6 => 16,
        }
    }

    /// Where the header has the source; the destination follows it.
    const fn source_offset(self) -> u32 {
        match self {
            Self::Ip => 12,
            Self::Ip6 => 8,
        }
    }
}
