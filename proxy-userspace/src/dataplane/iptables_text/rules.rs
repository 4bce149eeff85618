//! Rules as text, and those that the iptables mode and the ipvs mode share.

use std::fmt::{self, Write as _};

use ipnet::IpNet;

use super::{Chain, MARK_MASQ};
use crate::model::{IpFamily, LinkName, LocalTrafficDetector, PortRange};

/// The rules of one chain, as iptables-restore reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChainRules {
    pub(crate) chain: Chain,
    /// A line `-A CHAIN RULE` for each rule.
    pub(crate) lines: String,
}

impl ChainRules {
    pub(crate) const fn new(chain: Chain) -> Self {
        Self { chain, lines: String::new() }
    }

    /// Appends a rule, given without `-A` and the chain.
    pub(crate) fn add(&mut self, rule: impl fmt::Display) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.lines, "-A {} {rule}", self.chain);
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.lines().count()
    }
}

/// The chain that sets the mark of packets to be masqueraded.
pub(crate) fn mark_masq_rules(mark: u32) -> ChainRules {
    let mut rules = ChainRules::new(MARK_MASQ);
    rules.add(format_args!("-j MARK --set-xmark {mark:#x}/{mark:#x}"));
    rules
}

/// Appends the rules that masquerade packets with the mark. They clear the mark, so that a packet
/// that passes once more is not masqueraded twice.
///
/// `ports` are the source ports of masqueraded packets; `None` for any.
pub(crate) fn add_postrouting_rules(
    rules: &mut ChainRules,
    mark: u32,
    random_fully: bool,
    ports: Option<PortRange>,
) {
    rules.add(format_args!("-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN"));
    rules.add(format_args!("-j MARK --set-xmark {mark:#x}/0x0"));
    let random = if random_fully { " --random-fully" } else { "" };
    let comment = "-m comment --comment \"kubernetes service traffic requiring SNAT\"";
    for (protocol, target) in masquerades(ports) {
        rules.add(format_args!("{protocol}{comment} -j {target}{random}"));
    }
}

/// Returns the targets that masquerade with these source ports, each with the match of its
/// protocol. Only protocols with ports have a range of them.
pub(crate) fn masquerades(ports: Option<PortRange>) -> impl Iterator<Item = (&'static str, String)> {
    let of_ports = ports.into_iter().flat_map(|ports| {
        ["-p tcp ", "-p udp "].map(|protocol| (protocol, format!("MASQUERADE --to-ports {ports}")))
    });
    of_ports.chain([("", "MASQUERADE".to_owned())])
}

/// Appends the rules that accept forwarded traffic of Services.
pub(crate) fn add_forward_rules(rules: &mut ChainRules, mark: u32) {
    let comment = "-m comment --comment \"kubernetes forwarding";
    rules.add(format_args!("{comment} rules\" -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT"));
    let states = "-m conntrack --ctstate RELATED,ESTABLISHED";
    rules.add(format_args!("{comment} conntrack rule\" {states} -j ACCEPT"));
}

/// The argument of `--reject-with` that answers "port unreachable".
pub(crate) const fn port_unreachable(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "icmp-port-unreachable",
        IpFamily::V6 => "icmp6-port-unreachable",
    }
}

/// A match of packets of local pods. `! ` before it matches all others. In the order of
/// iptables-save, sources stand before destinations and links after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LocalMatch {
    /// Packets from this range.
    Source(IpNet),
    /// Packets that came in on this link.
    Link(LinkName),
    /// Packets that came in on a link whose name starts so.
    LinkPrefix(LinkName),
}

impl LocalMatch {
    /// The match of a detector in a family; `None` if the detector finds no local packets. Of
    /// several ranges of a family only the first counts, as upstream (`getLocalDetectors`): one
    /// rule cannot exclude two.
    pub(crate) fn of(detector: &LocalTrafficDetector, family: IpFamily) -> Option<Self> {
        match detector {
            LocalTrafficDetector::None => None,
            LocalTrafficDetector::Cidrs(cidrs) => {
                let range = cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family)?;
                Some(Self::Source(range.trunc()))
            }
            LocalTrafficDetector::BridgeInterface(bridge) => Some(Self::Link(bridge.clone())),
            LocalTrafficDetector::InterfaceNamePrefix(prefix) => Some(Self::LinkPrefix(prefix.clone())),
        }
    }
}

impl fmt::Display for LocalMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(range) => write!(f, "-s {range}"),
            Self::Link(link) => write!(f, "-i {link}"),
            // The `+` stands for any rest of the name.
            Self::LinkPrefix(prefix) => write!(f, "-i {prefix}+"),
        }
    }
}
