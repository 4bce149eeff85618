//! Ranges of addresses, as entries of longest-prefix-match tries.

use aya::maps::lpm_trie::Key;
use ipnet::IpNet;
use proxy_common::{
    Addr,
    layout::{MasqueradeSubnet, SourceRange},
};

/// A range of addresses. IPv4 addresses are mapped to IPv6, so their prefix is 96 bits longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// The first address of the range.
    pub addr: Addr,
    /// The length of the prefix in bits.
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

/// A source range of a service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// The identifier of the service port.
    pub service: u32,
    /// The addresses.
    pub prefix: Prefix,
}

impl Range {
    pub(crate) fn key(&self) -> Key<SourceRange> {
        let data = SourceRange { service: self.service, addr: self.prefix.addr };
        Key::new(SourceRange::SERVICE_BITS + self.prefix.prefix_len, data)
    }

    pub(crate) fn from_key(key: &Key<SourceRange>) -> Self {
        let SourceRange { service, addr } = key.data();
        let prefix_len = key.prefix_len().saturating_sub(SourceRange::SERVICE_BITS);
        Self { service, prefix: Prefix { addr, prefix_len } }
    }
}

/// Endpoints behind a link, for which masqueraded packets have the same source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkSubnet {
    /// The index of the link.
    pub link: u32,
    /// The addresses of the endpoints.
    pub prefix: Prefix,
}

impl LinkSubnet {
    pub(crate) fn key(&self) -> Key<MasqueradeSubnet> {
        let data = MasqueradeSubnet { link: self.link, addr: self.prefix.addr };
        Key::new(MasqueradeSubnet::LINK_BITS + self.prefix.prefix_len, data)
    }

    pub(crate) fn from_key(key: &Key<MasqueradeSubnet>) -> Self {
        let MasqueradeSubnet { link, addr } = key.data();
        let prefix_len = key.prefix_len().saturating_sub(MasqueradeSubnet::LINK_BITS);
        Self { link, prefix: Prefix { addr, prefix_len } }
    }
}
