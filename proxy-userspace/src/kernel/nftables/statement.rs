//! Rules, as nft statements.
//!
//! A statement displays as `nft list` prints it. A test compares both.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::{IpFamily, NftFamily};
use crate::net::Protocol;

/// The name of a chain, set or map.
pub type Name = Arc<str>;

/// A field of a packet, or a random number. One or more of them make the key of a set or map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// `ip saddr`.
    Source,
    /// `ip daddr`.
    Destination,
    /// `meta l4proto`.
    Protocol,
    /// `th dport`.
    DestinationPort,
    /// `numgen random mod N`: a number below N, in the host's byte order.
    Random(u32),
}

/// A part of a rule: a match or an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Matches if the key is an element of the set.
    InSet(Vec<Selector>, Name),
    /// Matches the source address.
    Source {
        /// The range.
        range: IpNet,
        /// True to match addresses in the range, false to match all others.
        inside: bool,
    },
    /// Matches if the destination is in the range.
    Destination(IpNet),
    /// Matches the input interface.
    InputInterface {
        /// The name. A trailing `*` matches any suffix.
        name: Arc<str>,
        /// True to match this interface, false to match all others.
        inside: bool,
    },
    /// Matches if the source is an address of this host.
    SourceIsLocal,
    /// Matches the first packet of a connection.
    StateNew,
    /// Matches if the connection has a translated destination.
    StatusDnat,
    /// Matches the protocol.
    Protocol(Protocol),
    /// Matches if the packet's mark has this bit.
    HasMark(u32),
    /// Matches one of this many packets, at random.
    OneIn(u32),
    /// Sets this bit in the packet's mark.
    SetMark(u32),
    /// Toggles this bit in the packet's mark.
    ToggleMark(u32),
    /// Applies the verdict that the map has for the key. Without one, the next rule decides.
    VerdictMap(Vec<Selector>, Name),
    /// Translates to the endpoint that the map has for the key. Without one, the next rule decides.
    DnatByMap(Vec<Selector>, Name),
    /// Translates to an endpoint.
    Dnat(SocketAddr),
    /// Adds the key to the set, or restarts its timeout.
    UpdateSet(Name, Vec<Selector>),
    /// Translates the source to an address of this host.
    Masquerade,
    /// Translates the source to an address of this host, with a port from a range. nft reads it
    /// only after [`Self::Protocol`].
    MasqueradeTo {
        /// The first port.
        first: u16,
        /// The last port.
        last: u16,
    },
    /// Matches as long as packets do not come more often than this, and some at once.
    Limit {
        /// Packets a second.
        rate: u32,
        /// Packets at once.
        burst: u32,
    },
    /// Makes the kernel report which rules the packet meets.
    Trace,
    /// Answers "port unreachable".
    Reject,
    /// Ends the rule with a verdict.
    Verdict(Verdict),
}

/// A verdict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Drops the packet.
    Drop,
    /// Continues with the rest of the rule.
    Continue,
    /// Returns to the calling chain.
    Return,
    /// Calls another chain.
    Jump(Name),
    /// Continues in another chain and does not return.
    Goto(Name),
}

/// A rule. Its statements run in order, until one does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The statements.
    pub statements: Vec<Statement>,
    /// The comment. At most 127 bytes are written.
    pub comment: Option<Arc<str>>,
}

impl Rule {
    /// Returns a rule without a comment.
    pub fn new(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect(), comment: None }
    }

    /// Returns the rule with a comment.
    #[must_use]
    pub fn comment(self, comment: &str) -> Self {
        Self { comment: Some(comment.into()), ..self }
    }

    /// Returns the rule in nft's syntax.
    pub fn display(&self, family: IpFamily) -> String {
        let statements: Vec<String> =
            self.statements.iter().map(|statement| statement.display(family)).collect();
        let comment = self.comment.iter().map(|comment| format!(" comment \"{comment}\""));
        statements.join(" ") + &comment.collect::<String>()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.write_str("drop"),
            Self::Continue => f.write_str("continue"),
            Self::Return => f.write_str("return"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
            Self::Goto(chain) => write!(f, "goto {chain}"),
        }
    }
}

impl Statement {
    fn display(&self, family: IpFamily) -> String {
        let ip = NftFamily::of(family).keyword;
        let key = |selectors| display_key(selectors, family);
        let negation = |inside: &bool| if *inside { "" } else { "!= " };
        match self {
            Self::InSet(selectors, set) => format!("{} @{set}", key(selectors)),
            Self::Source { range, inside } => {
                format!("{ip} saddr {}{}", negation(inside), display_range(range))
            }
            Self::Destination(range) => format!("{ip} daddr {}", display_range(range)),
            Self::InputInterface { name, inside } => format!("iifname {}\"{name}\"", negation(inside)),
            Self::SourceIsLocal => "fib saddr type local".into(),
            Self::StateNew => "ct state new".into(),
            Self::StatusDnat => "ct status dnat".into(),
            Self::Protocol(protocol) => format!("meta l4proto {}", protocol.lowercase_name()),
            Self::HasMark(bit) => format!("meta mark & {bit:#010x} != 0x00000000"),
            Self::OneIn(count) => format!("numgen random mod {count} 0"),
            Self::SetMark(bit) => format!("meta mark set meta mark | {bit:#010x}"),
            Self::ToggleMark(bit) => format!("meta mark set meta mark ^ {bit:#010x}"),
            Self::VerdictMap(selectors, map) => format!("{} vmap @{map}", key(selectors)),
            Self::DnatByMap(selectors, map) => format!("dnat {ip} to {} map @{map}", key(selectors)),
            Self::Dnat(endpoint) => format!("dnat to {endpoint}"),
            Self::UpdateSet(set, selectors) => format!("update @{set} {{ {} }}", key(selectors)),
            Self::Masquerade => "masquerade fully-random".into(),
            Self::MasqueradeTo { first, last } => format!("masquerade to :{first}-{last} fully-random"),
            Self::Limit { rate, burst } => format!("limit rate {rate}/second burst {burst} packets"),
            Self::Trace => "meta nftrace set 1".into(),
            Self::Reject => "reject".into(),
            Self::Verdict(verdict) => verdict.to_string(),
        }
    }
}

/// nft omits the prefix length of a range with one address.
fn display_range(range: &IpNet) -> String {
    if range.prefix_len() == range.max_prefix_len() { range.addr().to_string() } else { range.to_string() }
}

fn display_key(selectors: &[Selector], family: IpFamily) -> String {
    let ip = NftFamily::of(family).keyword;
    let words = selectors.iter().map(|selector| match selector {
        Selector::Source => format!("{ip} saddr"),
        Selector::Destination => format!("{ip} daddr"),
        Selector::Protocol => "meta l4proto".into(),
        Selector::DestinationPort => "th dport".into(),
        Selector::Random(modulus) => format!("numgen random mod {modulus}"),
    });
    words.collect::<Vec<_>>().join(" . ")
}

/// Returns the bytes of an address, in network order.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}
