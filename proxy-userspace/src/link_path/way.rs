//! Finds the rules of others that a packet may meet on its way, and that may drop or translate it.
//!
//! Rules are not evaluated: sets, marks, counters and earlier rules decide too. A rule is left out
//! only if its text says that it is for other packets.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use super::{
    ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule, Table},
    shapes::is_allowed_chain,
};

/// How many rules are named.
const MAX_NAMED: usize = 20;
/// How deep chains may call each other, as with nftables (`NFT_JUMP_STACK_SIZE`).
const MAX_DEPTH: usize = 16;

/// The first packet of a connection, on its way through the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its source, if that is known.
    pub source: Option<IpAddr>,
    /// The destinations that it may have at some hook: before and after translation.
    pub destinations: Vec<SocketAddr>,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: &'static str,
    /// The hooks that it passes.
    pub hooks: Vec<Hook>,
}

/// Returns the rules and policies that may drop or translate the packet, in the order of hooks and
/// priorities, a text for each.
pub fn meets(tables: &[Table], way: &Way) -> Vec<String> {
    let mut chains: Vec<(BaseChain, &Table, &Chain)> = tables
        .iter()
        .filter(|table| is_for_family(table.family, way))
        .flat_map(|table| table.chains.values().filter_map(move |chain| Some((chain.base?, table, chain))))
        .filter(|(base, ..)| way.hooks.contains(&base.hook))
        .collect();
    chains.sort_by_key(|(base, ..)| (order(base.hook), base.priority));
    let mut found = Vec::new();
    for (base, table, chain) in chains {
        let mut search = Search { table, base, way, visited: BTreeSet::new(), found: &mut found };
        search.visit(chain, 0);
        if !base.accepts {
            search.add(chain, "drops what no rule of the chain accepts (policy drop)", None);
        }
    }
    let more = found.len().saturating_sub(MAX_NAMED);
    found.truncate(MAX_NAMED);
    found.extend((more > 0).then(|| format!("and {more} more")));
    found
}

fn is_for_family(family: Family, way: &Way) -> bool {
    let is_v4 = way.destinations.first().is_some_and(SocketAddr::is_ipv4);
    match family {
        Family::Ip => is_v4,
        Family::Ip6 => !is_v4,
        Family::Inet | Family::Netdev => true,
        Family::Arp | Family::Bridge => false,
    }
}

const fn order(hook: Hook) -> u8 {
    match hook {
        Hook::Ingress => 0,
        Hook::Prerouting => 1,
        Hook::Input | Hook::Output => 2,
        Hook::Forward => 3,
        Hook::Postrouting => 4,
        Hook::Egress => 5,
        Hook::Unknown => 6,
    }
}

const fn name(hook: Hook) -> &'static str {
    match hook {
        Hook::Ingress => "ingress",
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::Postrouting => "postrouting",
        Hook::Egress => "egress",
        Hook::Unknown => "an unknown hook",
    }
}

/// Searches the chains that one base chain calls.
struct Search<'a> {
    table: &'a Table,
    base: BaseChain,
    way: &'a Way,
    visited: BTreeSet<&'a str>,
    found: &'a mut Vec<String>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, chain: &'a Chain, depth: usize) {
        if depth > MAX_DEPTH || !self.visited.insert(&chain.name) {
            return;
        }
        for rule in chain.rules.iter().filter(|rule| self.way.may_match(rule)) {
            for action in &rule.actions {
                match action {
                    Action::Jump(to) | Action::Goto(to) if !is_allowed_chain(to) => {
                        if let Some(called) = self.table.chain(to) {
                            self.visit(called, depth + 1);
                        }
                    }
                    Action::Drop => self.add(chain, "may drop or reject it", Some(rule)),
                    Action::DestinationNat => self.add(chain, "may change its destination", Some(rule)),
                    Action::SourceNat => self.add(chain, "may change its source", Some(rule)),
                    _ => {}
                }
            }
        }
    }

    fn add(&mut self, chain: &Chain, what: &str, rule: Option<&Rule>) {
        let (hook, priority) = (name(self.base.hook), self.base.priority);
        let rule = rule.map(|rule| format!(": `{}`", rule.text)).unwrap_or_default();
        let at = format!("{}, chain {} ({hook}, priority {priority})", self.table, chain.name);
        self.found.push(format!("{at} {what}{rule}"));
    }
}

impl Way {
    /// Returns false if the rule is for other packets.
    fn may_match(&self, rule: &Rule) -> bool {
        let text = rule.text.to_lowercase();
        let words: Vec<&str> = text.split([' ', ',', '{', '}']).filter(|word| !word.is_empty()).collect();
        let is_other_port = rule.matches.iter().any(|found| {
            matches!(found, Match::DestinationPorts(ports) if !self
                .destinations
                .iter()
                .any(|to| ports.iter().any(|range| range.contains(&to.port()))))
        });
        let is_of_open = rule.matches.contains(&Match::ConnectionState)
            && !words.iter().any(|word| matches!(*word, "new" | "!" | "!="));
        let holds_none = |keys: [&str; 2], addresses: &[IpAddr]| {
            let is_in = |nets: &[IpNet], own: &IpAddr| nets.iter().any(|net| net.contains(own));
            networks(&words, keys).is_some_and(|nets| !addresses.iter().any(|own| is_in(&nets, own)))
        };
        let is_other_source = self.source.is_some_and(|source| holds_none(["-s", "saddr"], &[source]));
        let destinations: Vec<_> = self.destinations.iter().map(SocketAddr::ip).collect();
        !is_other_port
            && !is_of_open
            && !is_other_source
            && !holds_none(["-d", "daddr"], &destinations)
            && !is_other_protocol(&words, self.protocol)
    }
}

/// Returns the networks behind a word for source or destination. `None` if the rule has none, or if
/// they are negated, or in a set.
fn networks(words: &[&str], keys: [&str; 2]) -> Option<Vec<IpNet>> {
    let at = words.iter().position(|word| keys.contains(word))?;
    if at.checked_sub(1).is_some_and(|before| words[before] == "!") {
        return None;
    }
    let network = |word: &&str| {
        let address = |word: &str| word.parse::<IpAddr>().ok().map(IpNet::from);
        word.parse::<IpNet>().ok().or_else(|| address(word))
    };
    let networks: Vec<_> = words[at + 1..].iter().map_while(network).collect();
    (!networks.is_empty()).then_some(networks)
}

/// Returns true if a rule names another protocol, as `-p udp`, `l4proto udp` or `udp dport`.
fn is_other_protocol(words: &[&str], protocol: &str) -> bool {
    const PROTOCOLS: [&str; 8] = ["tcp", "udp", "sctp", "icmp", "icmpv6", "ipv6-icmp", "esp", "gre"];
    let named = words.windows(2).enumerate().find_map(|(at, pair)| match *pair {
        // `! -p udp` is for all others.
        ["-p" | "l4proto", named] if PROTOCOLS.contains(&named) && (at == 0 || words[at - 1] != "!") => {
            Some(named)
        }
        [named, "dport" | "sport"] if PROTOCOLS.contains(&named) => Some(named),
        _ => None,
    });
    named.is_some_and(|named| named != protocol)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{ruleset::Source, save},
        *,
    };

    const SAVED: &str = "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n:OTHERS - [0:0]\n:KUBE-FORWARD - [0:0]\n\
        -A FORWARD -m conntrack --ctstate INVALID -j DROP\n\
        -A FORWARD -j KUBE-FORWARD\n\
        -A FORWARD -s 203.0.113.0/24 -j DROP\n\
        -A FORWARD -d 10.244.0.0/16 -p tcp -m tcp --dport 8080 -j OTHERS\n\
        -A FORWARD -d 10.99.0.0/16 -j DROP\n\
        -A FORWARD ! -d 10.99.0.0/16 -p udp -j REJECT\n\
        -A OTHERS -p udp -j DROP\n\
        -A OTHERS ! -s 198.51.100.0/24 -j REJECT\n\
        -A KUBE-FORWARD -j DROP\nCOMMIT\n";

    fn way(source: &str) -> Way {
        Way {
            source: Some(source.parse().expect(source)),
            destinations: ["10.96.0.1:80", "10.244.1.8:8080"].map(|to| to.parse().expect(to)).to_vec(),
            protocol: "tcp",
            hooks: vec![Hook::Prerouting, Hook::Forward, Hook::Postrouting],
        }
    }

    #[test]
    fn rules_for_the_packet_are_named_and_those_for_others_are_not() {
        let tables = save::parse(SAVED, Source::IptablesNft, Family::Ip);
        let found = meets(&tables, &way("192.0.2.1"));
        let at = |chain: &str| format!("iptables-nft filter, chain {chain} (forward, priority 0)");
        assert_eq!(found.len(), 2, "{found:#?}");
        assert!(found[0].starts_with(&format!("{} may drop or reject it: `", at("OTHERS"))), "{found:#?}");
        assert!(found[0].contains("198.51.100.0/24"), "{found:#?}");
        assert_eq!(
            found[1],
            format!("{} drops what no rule of the chain accepts (policy drop)", at("FORWARD"))
        );
        let from_there = meets(&tables, &way("203.0.113.9"));
        assert!(from_there.iter().any(|text| text.contains("203.0.113.0/24")), "{from_there:#?}");
        let v6 = Way { destinations: vec!["[fd00::1]:80".parse().expect("IPv6")], ..way("192.0.2.1") };
        assert!(meets(&tables, &v6).is_empty());
    }

    #[test]
    fn words_of_nft_are_understood() {
        let may = |text: &str, matches: Vec<Match>| {
            way("192.0.2.1").may_match(&Rule { matches, actions: vec![Action::Drop], text: text.to_owned() })
        };
        for (text, is_met) in [
            ("drop", true),
            ("ip daddr 10.244.0.0/16 drop", true),
            ("ip daddr { 10.1.0.1, 10.244.1.8 } drop", true),
            ("ip daddr { 10.1.0.1, 10.1.0.2 } drop", false),
            ("ip daddr != 10.244.0.0/16 drop", true),
            ("ip daddr @blocked drop", true),
            ("ip saddr 198.51.100.0/24 drop", false),
            ("udp dport 8080 drop", false),
            ("meta l4proto icmp reject", false),
        ] {
            assert_eq!(may(text, Vec::new()), is_met, "{text}");
        }
        assert!(!may("ct state established, related drop", vec![Match::ConnectionState]));
        assert!(may("ct state new drop", vec![Match::ConnectionState]));
        assert!(!may("tcp dport 443 drop", vec![Match::DestinationPorts(vec![443..=443])]));
    }

    #[test]
    fn no_more_than_twenty_are_named() {
        let rules = "-A FORWARD -j DROP\n".repeat(25);
        let saved = format!("*filter\n:FORWARD ACCEPT [0:0]\n{rules}COMMIT\n");
        let found = meets(&save::parse(&saved, Source::IptablesNft, Family::Ip), &way("192.0.2.1"));
        assert_eq!((found.len(), found.last().map(String::as_str)), (21, Some("and 5 more")));
    }
}
