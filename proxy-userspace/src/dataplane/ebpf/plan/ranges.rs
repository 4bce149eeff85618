//! Ranges of addresses as the longest-prefix tries hold them.

use aya::maps::lpm_trie::Key;
use ipnet::IpNet;
use proxy_common::{Addr, layout::SourceRange};

/// A range of addresses. Prefix bits count from the start of the mapped form: 96 more for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// The range's first address.
    pub addr: Addr,
    /// Bits of `addr` that count.
    pub prefix_len: u32,
}

impl Prefix {
    pub(crate) fn new(net: &IpNet) -> Self {
        let mapped = if net.addr().is_ipv4() { 96 } else { 0 };
        Self { addr: net.network().into(), prefix_len: mapped + u32::from(net.prefix_len()) }
    }

    pub(crate) const fn key(&self) -> Key<Addr> {
        Key::new(self.prefix_len, self.addr)
    }

    pub(crate) fn from_key(key: &Key<Addr>) -> Self {
        Self { addr: key.data(), prefix_len: key.prefix_len() }
    }
}

/// A source range of a Service. Prefix bits count from the start of the mapped form: 96 more for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// The Service's identifier.
    pub service: u32,
    /// The range's first address.
    pub addr: Addr,
    /// Bits of `addr` that count.
    pub prefix_len: u32,
}

impl Range {
    pub(crate) fn new(service: u32, net: &IpNet) -> Self {
        let Prefix { addr, prefix_len } = Prefix::new(net);
        Self { service, addr, prefix_len }
    }

    pub(crate) fn key(&self) -> Key<SourceRange> {
        let data = SourceRange { service: self.service, addr: self.addr };
        Key::new(SourceRange::SERVICE_BITS + self.prefix_len, data)
    }

    pub(crate) fn from_key(key: &Key<SourceRange>) -> Self {
        let SourceRange { service, addr } = key.data();
        Self { service, addr, prefix_len: key.prefix_len().saturating_sub(SourceRange::SERVICE_BITS) }
    }
}
