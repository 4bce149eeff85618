//! Rules: statements in the words of nft, and the kernel's expressions that they are made of.
//!
//! What a statement shows as is what `nft list` prints of it; a test holds both to each other.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::Family;
use crate::net::Protocol;

/// A name of a chain, set or map.
pub type Name = Arc<str>;

/// Something of a packet, or a number drawn for it, that a set is asked about. Several are one key.
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
    /// `numgen random mod N`: a number below N, in the order of the host.
    Random(u32),
}

/// A part of a rule: the packet has to match, or something is done to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// The key is an element of the set.
    In(Vec<Selector>, Name),
    /// The source is in the range; or is not.
    Source {
        /// The range.
        range: IpNet,
        /// Whether the packet has to be in it.
        inside: bool,
    },
    /// The destination is in the range.
    Destination(IpNet),
    /// The packet came in through this interface; or did not. A `*` at the end stands for anything.
    InputInterface {
        /// The name.
        name: Arc<str>,
        /// Whether the packet has to be of it.
        inside: bool,
    },
    /// The source is an address of this host.
    SourceIsLocal,
    /// It is the first packet of its connection.
    StateNew,
    /// Its connection is translated to another destination.
    StatusDnat,
    /// The protocol.
    Protocol(u8),
    /// The packet's mark has this bit.
    Marked(u32),
    /// One packet in so many, by chance.
    OneIn(u32),
    /// Sets this bit of the packet's mark.
    SetMark(u32),
    /// Flips this bit of the packet's mark.
    FlipMark(u32),
    /// Does what the map says of the key; nothing where it is not in the map.
    VerdictMap(Vec<Selector>, Name),
    /// Translates to the endpoint that the map has for the key; does nothing where it has none.
    DnatByMap(Vec<Selector>, Name),
    /// Translates to an endpoint.
    Dnat(SocketAddr),
    /// Adds the key to the set, or has its time begin anew.
    Update(Name, Vec<Selector>),
    /// Gives the connection this host's address.
    Masquerade,
    /// Answers that the port is unreachable.
    Reject,
    /// What becomes of the packet.
    Verdict(Verdict),
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// It is dropped.
    Drop,
    /// The rest of the rule decides.
    Continue,
    /// The calling chain goes on.
    Return,
    /// Another chain decides, and then this one goes on.
    Jump(Name),
    /// Another chain decides.
    Goto(Name),
}

/// A rule: statements that are tried in turn until one does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The statements.
    pub statements: Vec<Statement>,
    /// What people read of it; at most 127 bytes.
    pub comment: Option<Arc<str>>,
}

impl Rule {
    /// A rule without a comment.
    pub fn new(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect(), comment: None }
    }

    /// The same with a comment.
    #[must_use]
    pub fn comment(self, comment: &str) -> Self {
        Self { comment: Some(comment.into()), ..self }
    }

    /// In the words of nft.
    pub fn show(&self, family: Family) -> impl fmt::Display {
        let statements: Vec<String> =
            self.statements.iter().map(|statement| Shown(statement, family).to_string()).collect();
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

/// A protocol as nft names it.
pub(super) fn protocol_name(protocol: u8) -> String {
    Protocol::from_number(protocol)
        .map_or_else(|| protocol.to_string(), |known| known.lowercase_name().into())
}

struct Shown<'a>(&'a Statement, Family);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(statement, family) = self;
        let ip = family.word();
        let negation = |inside: &bool| if *inside { "" } else { "!= " };
        match statement {
            Statement::In(key, set) => write!(f, "{} @{set}", words(key, *family)),
            Statement::Source { range, inside } => write!(f, "{ip} saddr {}{}", negation(inside), net(range)),
            Statement::Destination(range) => write!(f, "{ip} daddr {}", net(range)),
            Statement::InputInterface { name, inside } => {
                write!(f, "iifname {}\"{name}\"", negation(inside))
            }
            Statement::SourceIsLocal => f.write_str("fib saddr type local"),
            Statement::StateNew => f.write_str("ct state new"),
            Statement::StatusDnat => f.write_str("ct status dnat"),
            Statement::Protocol(protocol) => write!(f, "meta l4proto {}", protocol_name(*protocol)),
            Statement::Marked(bit) => write!(f, "meta mark & {bit:#010x} != 0x00000000"),
            Statement::OneIn(count) => write!(f, "numgen random mod {count} 0"),
            Statement::SetMark(bit) => write!(f, "meta mark set meta mark | {bit:#010x}"),
            Statement::FlipMark(bit) => write!(f, "meta mark set meta mark ^ {bit:#010x}"),
            Statement::VerdictMap(key, map) => write!(f, "{} vmap @{map}", words(key, *family)),
            Statement::DnatByMap(key, map) => write!(f, "dnat {ip} to {} map @{map}", words(key, *family)),
            Statement::Dnat(endpoint) => write!(f, "dnat to {endpoint}"),
            Statement::Update(set, key) => write!(f, "update @{set} {{ {} }}", words(key, *family)),
            Statement::Masquerade => f.write_str("masquerade fully-random"),
            Statement::Reject => f.write_str("reject"),
            Statement::Verdict(verdict) => verdict.fmt(f),
        }
    }
}

/// nft leaves out the length of a range that is one address.
fn net(range: &IpNet) -> String {
    if range.prefix_len() == range.max_prefix_len() { range.addr().to_string() } else { range.to_string() }
}

fn words(key: &[Selector], family: Family) -> String {
    let ip = family.word();
    let words = key.iter().map(|selector| match selector {
        Selector::Source => format!("{ip} saddr"),
        Selector::Destination => format!("{ip} daddr"),
        Selector::Protocol => "meta l4proto".into(),
        Selector::DestinationPort => "th dport".into(),
        Selector::Random(below) => format!("numgen random mod {below}"),
    });
    words.collect::<Vec<_>>().join(" . ")
}

/// The bytes of an address, in network order.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}
