//! The netfilter rules of others, as far as the judgement needs them: where each rule is, what it
//! looks at, and what it does.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use libc::c_int;

/// What wrote a table, and so what prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `iptables-save` or `ip6tables-save` on nftables.
    IptablesNft,
    /// The same on `ip_tables`.
    IptablesLegacy,
    /// `nft`.
    Nft,
}

/// The packets that a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Both.
    Inet,
    /// ARP.
    Arp,
    /// Frames that bridges forward.
    Bridge,
    /// All packets of one link.
    Netdev,
}

impl Family {
    /// Returns nft's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Inet => "inet",
            Self::Arp => "arp",
            Self::Bridge => "bridge",
            Self::Netdev => "netdev",
        }
    }

    /// Returns the kernel's number (`NFPROTO_*`).
    pub const fn number(self) -> c_int {
        match self {
            Self::Ip => libc::NFPROTO_IPV4,
            Self::Ip6 => libc::NFPROTO_IPV6,
            Self::Inet => libc::NFPROTO_INET,
            Self::Arp => libc::NFPROTO_ARP,
            Self::Bridge => libc::NFPROTO_BRIDGE,
            Self::Netdev => libc::NFPROTO_NETDEV,
        }
    }

    /// Returns the family with this name of nft.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Ip, Self::Ip6, Self::Inet, Self::Arp, Self::Bridge, Self::Netdev]
            .into_iter()
            .find(|family| family.name() == name)
    }
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// What wrote it.
    pub source: Source,
    /// The packets that it sees.
    pub family: Family,
    /// The name.
    pub name: String,
    /// The chains, by name.
    pub chains: BTreeMap<String, Chain>,
}

impl Table {
    /// Adds a rule to a chain, which is added too if it was not declared.
    pub(super) fn add_rule(&mut self, chain: &str, rule: Rule) {
        let chain = self.chains.entry(chain.to_owned()).or_insert_with(|| Chain {
            name: chain.into(),
            base: None,
            rules: Vec::new(),
        });
        chain.rules.push(rule);
    }

    /// Returns the chain with this name.
    pub fn chain(&self, name: &str) -> Option<&Chain> {
        self.chains.get(name)
    }
}

/// Prints the table as its command calls it, such as `iptables-nft raw` or `nft inet firewalld`.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let six = if self.family == Family::Ip6 { "6" } else { "" };
        match self.source {
            Source::IptablesNft => write!(f, "ip{six}tables-nft {}", self.name),
            Source::IptablesLegacy => write!(f, "ip{six}tables-legacy {}", self.name),
            Source::Nft => write!(f, "nft {} {}", self.family.name(), self.name),
        }
    }
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The name.
    pub name: String,
    /// Where the kernel calls the chain; `None` if only rules do.
    pub base: Option<BaseChain>,
    /// The rules, in order.
    pub rules: Vec<Rule>,
}

/// Where and when the kernel calls a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseChain {
    /// The hook.
    pub hook: Hook,
    /// The chain sees only the first packet of each connection, and may translate it.
    pub is_nat: bool,
    /// The priority: chains with lower numbers come first.
    pub priority: i32,
    /// Packets that no rule decides about are accepted.
    pub accepts: bool,
}

/// A hook of netfilter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// After traffic control, when a packet arrives on a link.
    Ingress,
    /// Before routing.
    Prerouting,
    /// For a socket of this node.
    Input,
    /// For another host or pod.
    Forward,
    /// From a socket of this node.
    Output,
    /// After routing.
    Postrouting,
    /// Before traffic control, when a packet leaves on a link.
    Egress,
    /// A hook that shunt does not know.
    Unknown,
}

/// A rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// What a packet must be. All of them must hold.
    pub matches: Vec<Match>,
    /// What happens to such a packet. Empty if the rule only counts.
    pub actions: Vec<Action>,
    /// The rule as its command prints it, without the chain.
    pub text: String,
}

/// What a rule looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// Links, protocols, flags, lengths, rates: neither addresses nor ports.
    Plain,
    /// The source address or port.
    Source,
    /// The destination address or port, in any other way than the next two.
    Destination,
    /// The destination port is in one of these ranges.
    DestinationPorts(Vec<RangeInclusive<u16>>),
    /// The destination is an address of the node.
    LocalDestination,
    /// The route back to the source.
    ReversePath,
    /// These bits of the packet's mark.
    Mark(u32),
    /// These bits of the connection's mark.
    ConnectionMark(u32),
    /// The state of the connection: new, established, related, invalid or untracked.
    ConnectionState,
    /// Addresses of the connection that are the same in both paths after prerouting.
    ConnectionAddress,
    /// Whether netfilter translated the connection.
    Translation,
    /// The destination that the connection's first packet had.
    OriginalDestination,
    /// Something that shunt does not know, with its name.
    Unknown(String),
}

/// What a rule does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Accepts the packet.
    Accept,
    /// Drops or rejects the packet.
    Drop,
    /// Returns to the calling chain.
    Return,
    /// Calls a chain.
    Jump(String),
    /// Continues in a chain, and does not come back.
    Goto(String),
    /// Changes these bits of the packet's mark.
    SetMark(u32),
    /// Changes these bits of the connection's mark, or copies them from or to the packet's mark.
    ConnectionMark(u32),
    /// Writes the packet to a log.
    Log,
    /// Changes other fields than addresses and ports, such as the maximum segment size.
    Modify,
    /// Translates the source.
    SourceNat,
    /// Translates the destination.
    DestinationNat,
    /// Something that shunt does not know, with its name.
    Unknown(String),
}
