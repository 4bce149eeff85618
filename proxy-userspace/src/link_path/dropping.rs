//! Finds rules of others that can drop packets of Services.

use std::{collections::BTreeSet, ops::RangeInclusive};

use super::{
    Evidence,
    judge::{NODE_PORTS, TableJudge},
    ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule},
};

/// A chain that drops what no rule of it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppingChain {
    /// The chain, and what drops.
    pub text: String,
    /// Rules of others accept some new connections. Which ones cannot be told.
    pub accepts_some: bool,
}

/// Returns the chains of others that drop forwarded packets, by their policy or by a rule without
/// conditions.
pub fn forward_drops(evidence: &Evidence) -> Vec<DroppingChain> {
    let mut found = Vec::new();
    for (judge, chain, base) in base_chains(evidence, |hook| hook == Hook::Forward) {
        let Some(why) = drops_rest(chain, base) else { continue };
        let accepts_some = reachable(judge, chain).iter().any(|(_, rule, _)| accepts_new(rule));
        found.push(DroppingChain { text: format!("{} {} {why}", judge.table, chain.name), accepts_some });
    }
    found
}

/// Returns the rules and policies of others that can drop packets to node ports before they are
/// translated. With `at_input` also those for packets to the node itself, as IPVS needs it.
pub fn drops_before_services(evidence: &Evidence, at_input: bool) -> Vec<String> {
    let is_before =
        |hook| matches!(hook, Hook::Prerouting | Hook::Ingress) || (at_input && hook == Hook::Input);
    let mut found = Vec::new();
    for (judge, chain, base) in base_chains(evidence, is_before) {
        // Firewalls drop at input what nobody may reach, and accept what they know.
        if base.hook != Hook::Input && !base.accepts {
            found.push(format!("{} {} has the policy drop", judge.table, chain.name));
        }
        for (chain, rule, to_node_ports) in reachable(judge, chain) {
            if to_node_ports && rule.actions.contains(&Action::Drop) {
                found.push(format!("{} {} `{}`", judge.table, chain.name, rule.text));
            }
        }
    }
    found
}

/// Returns the base chains at hooks that see packets of Services.
fn base_chains(
    evidence: &Evidence,
    is_wanted: impl Fn(Hook) -> bool,
) -> impl Iterator<Item = (TableJudge<'_>, &Chain, BaseChain)> {
    let of_packets = |family| !matches!(family, Family::Arp | Family::Bridge);
    let tables = evidence.tables.iter().filter(move |table| of_packets(table.family));
    tables.flat_map(move |table| table.chains.values().map(move |chain| (table, chain))).filter_map(
        move |(table, chain)| {
            let base = chain.base.filter(|base| !base.is_nat && is_wanted(base.hook))?;
            Some((TableJudge { table, evidence }, chain, base))
        },
    )
}

/// Returns what drops packets about which no rule decides.
fn drops_rest(chain: &Chain, base: BaseChain) -> Option<String> {
    let drops_all = |rule: &&Rule| rule.matches.is_empty() && rule.actions.contains(&Action::Drop);
    match chain.rules.iter().find(drops_all) {
        Some(rule) => Some(format!("has the rule `{}`", rule.text)),
        None => (!base.accepts).then(|| "has the policy drop".to_owned()),
    }
}

/// Returns true if a rule accepts packets of new connections.
fn accepts_new(rule: &Rule) -> bool {
    let is_of_open_connections =
        |found: &Match| matches!(found, Match::ConnectionState | Match::Mark(_) | Match::ConnectionMark(_));
    rule.actions.contains(&Action::Accept) && !rule.matches.iter().any(is_of_open_connections)
}

/// Returns the rules that a packet in a chain can meet, without those of shunt and kube-proxy. The
/// last value says that the rule, or a jump to it, names node ports.
fn reachable<'a>(judge: TableJudge<'a>, chain: &'a Chain) -> Vec<(&'a Chain, &'a Rule, bool)> {
    let (mut found, mut waiting, mut seen) = (Vec::new(), vec![(chain, false)], BTreeSet::new());
    while let Some((chain, to_node_ports)) = waiting.pop() {
        if !seen.insert((&*chain.name, to_node_ports)) {
            continue;
        }
        for rule in chain.rules.iter().filter(|rule| !judge.is_own_jump(rule)) {
            let to_node_ports = to_node_ports || rule.matches.iter().any(names_node_ports);
            found.push((chain, rule, to_node_ports));
            let called = rule.actions.iter().filter_map(|action| match action {
                Action::Jump(to) | Action::Goto(to) => judge.table.chain(to),
                _ => None,
            });
            waiting.extend(called.map(|to| (to, to_node_ports)));
        }
    }
    found
}

fn names_node_ports(found: &Match) -> bool {
    let overlaps =
        |range: &RangeInclusive<u16>| range.start() <= NODE_PORTS.end() && range.end() >= NODE_PORTS.start();
    matches!(found, Match::DestinationPorts(ports) if ports.iter().any(overlaps))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            ruleset::{Family, Source},
            save,
        },
        *,
    };

    fn evidence(table: &str, lines: &str) -> Evidence {
        let saved = format!("*{table}\n{lines}\nCOMMIT\n");
        Evidence { tables: save::parse(&saved, Source::IptablesNft, Family::Ip), ..Evidence::default() }
    }

    #[test]
    fn a_chain_that_drops_what_is_forwarded_is_named() {
        let own = "-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n:KUBE-SERVICES - [0:0]\n";
        for (lines, expected) in [
            (":FORWARD ACCEPT [0:0]", None),
            (":FORWARD DROP [0:0]", Some(("has the policy drop", false))),
            (
                ":FORWARD DROP [0:0]\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
                Some(("has the policy drop", false)),
            ),
            (
                ":FORWARD DROP [0:0]\n:DOCKER - [0:0]\n-A FORWARD -j DOCKER\n-A DOCKER -i docker0 -j ACCEPT",
                Some(("has the policy drop", true)),
            ),
            (
                ":FORWARD ACCEPT [0:0]\n-A FORWARD -s 10.244.0.0/16 -j ACCEPT\n-A FORWARD -j REJECT",
                Some(("has the rule", true)),
            ),
            (":FORWARD ACCEPT [0:0]\n-A FORWARD -i eth1 -j DROP", None),
        ] {
            let found = forward_drops(&evidence("filter", &format!("{lines}\n{own}")));
            let found: Vec<_> = found.iter().map(|chain| (chain.text.as_str(), chain.accepts_some)).collect();
            match (expected, &found[..]) {
                (None, []) => {}
                (Some((text, accepts)), [(found, found_accepts)]) => {
                    assert!(found.contains(text), "{lines}: {found}");
                    assert_eq!(*found_accepts, accepts, "{lines}");
                }
                _ => panic!("{lines}: {found:?}"),
            }
        }
    }

    #[test]
    fn a_rule_that_drops_node_ports_matters_before_they_are_translated() {
        for (table, lines, at_input, is_found) in [
            ("raw", "-A PREROUTING -p tcp -m tcp --dport 30080 -j DROP", false, true),
            (
                "mangle",
                ":mine - [0:0]\n-A PREROUTING -p tcp -m tcp --dport 1024:65535 -j mine\n-A mine -j DROP",
                false,
                true,
            ),
            ("raw", "-A PREROUTING -p tcp -m tcp --dport 22 -j DROP", false, false),
            ("raw", "-A PREROUTING -p tcp -m tcp --dport 30080 -j ACCEPT", false, false),
            ("filter", "-A INPUT -p tcp -m tcp --dport 30080 -j DROP", false, false),
            ("filter", "-A INPUT -p tcp -m tcp --dport 30080 -j DROP", true, true),
        ] {
            let chains = ":PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]";
            let found = drops_before_services(&evidence(table, &format!("{chains}\n{lines}")), at_input);
            assert_eq!(found.len(), usize::from(is_found), "{table} {lines}: {found:?}");
        }
    }
}
