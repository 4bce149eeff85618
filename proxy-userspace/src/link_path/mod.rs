//! Judges whether link programs may translate what comes in on links, or whether another program on
//! the node could notice that netfilter does not.
//!
//! Link programs translate at traffic control: VIP to endpoint before netfilter sees a packet, and
//! endpoint to VIP after netfilter has seen the answer. kube-proxy's rules translate at nat
//! prerouting, by conntrack. So rules of others can see another destination ([`shapes::Stage`]), or
//! a connection that netfilter did not translate.
//!
//! The judgement is conservative. Rules, filters of traffic control and IPsec policies of others
//! are compared with an [allow-list](shapes). Whatever is not on it decides for netfilter, and the
//! reason names it.
#![forbid(unsafe_code)]

mod dropping;
mod judge;
mod lease;
pub mod nft_json;
mod read;
mod report;
pub mod ruleset;
pub mod save;
pub mod shapes;
mod way;

#[cfg(test)]
mod tests;

pub use self::{
    dropping::{DroppingChain, drops_before_services, forward_drops},
    judge::judge,
    read::{read, read_tables},
    report::{CANNOT_READ, DirectPath, Settings, report},
    way::{Way, meets},
};
use crate::kernel::{foreign_filters::LinkFilter, xfrm::Policy};

/// What others have set up on the node, as far as it can matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The netfilter rules, without shunt's tables.
    pub tables: Vec<ruleset::Table>,
    /// The filters and programs of traffic control that others attached to links.
    pub filters: Vec<LinkFilter>,
    /// The IPsec policies, without those of single sockets.
    pub policies: Vec<Policy>,
    /// A routing rule selects by source (`ip rule add from`).
    pub routes_by_source: bool,
    /// The mark bits that shunt uses.
    pub own_marks: u32,
}
