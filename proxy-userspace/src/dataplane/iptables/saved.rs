//! Reads what iptables-save and `iptables -S` print: which chains of ours there are, what they hold, and which jumps lead to them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use super::{
    jumps::{JUMPS, Jump},
    names::{Chain, Table},
    rules::Lines,
    state::{Content, TableState},
};
use crate::model::IpFamily;

/// What a table holds of ours.
pub(super) fn table(table: Table, saved: &str) -> TableState {
    let mut chains: BTreeMap<Chain, Lines> = BTreeMap::new();
    let mut state = TableState::default();
    for line in saved.lines() {
        if let Some(name) = declared(line) {
            if let Some(chain) = Chain::parse(name) {
                chains.entry(chain).or_default();
            }
        } else if let Some((name, rule)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' ')) {
            match Chain::parse(name) {
                Some(chain) => {
                    let lines = chains.entry(chain).or_default();
                    lines.push_str(&single_spaced(line));
                    lines.push('\n');
                }
                None => state.jumps.extend(jump(table, name, rule)),
            }
        }
    }
    for (chain, lines) in chains {
        state.fill(chain, Content::of(&lines));
    }
    state
}

/// Where rules of an earlier process translate UDP: addresses of Services, and node ports with the unspecified address.
pub(super) fn udp_destinations(saved: &str, family: IpFamily) -> Vec<SocketAddr> {
    let unspecified: IpAddr = match family {
        IpFamily::V4 => Ipv4Addr::UNSPECIFIED.into(),
        IpFamily::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let destination = |line: &str| {
        let rule = line.strip_prefix("-A ")?;
        let is_node_port = rule.starts_with("KUBE-NODEPORTS ");
        let is_udp = rule.contains(" -p udp ") && (is_node_port || rule.starts_with("KUBE-SERVICES "));
        let port = after(rule, " --dport ").filter(|_| is_udp)?.parse().ok()?;
        let address =
            if is_node_port { unspecified } else { after(rule, " -d ")?.split('/').next()?.parse().ok()? };
        Some(SocketAddr::new(address, port))
    };
    saved.lines().filter_map(destination).collect()
}

fn after<'a>(rule: &'a str, option: &str) -> Option<&'a str> {
    rule.split_once(option)?.1.split(' ').next()
}

/// The chain that a line names as being there.
fn declared(line: &str) -> Option<&str> {
    let rest = line.strip_prefix(':').or_else(|| line.strip_prefix("-N "))?;
    rest.split(' ').next()
}

/// iptables prints two spaces before a counter's name, where nobody wrote them.
fn single_spaced(line: &str) -> String {
    line.replace("--nfacct-name  ", "--nfacct-name ")
}

/// The jump that a rule of a built-in chain is.
pub(super) fn jump(table: Table, from: &str, rule: &str) -> Option<usize> {
    let words = words(rule);
    let is_this =
        |jump: &Jump| jump.table == table && jump.from == from && self::words(&jump.rule()) == words;
    JUMPS.iter().position(is_this)
}

/// The order of matches and what stands in quotation marks differ between versions.
fn words(rule: &str) -> Vec<&str> {
    let mut words: Vec<_> = rule.split([' ', '"']).filter(|word| !word.is_empty()).collect();
    words.sort_unstable();
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "\
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A PREROUTING -m comment --comment kubernetes_of_another -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment \"kube-system/dns cluster IP\" -m udp --dport 53 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment \"kube-system/dns cluster IP\" -m tcp --dport 53 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A KUBE-NODEPORTS -p udp -m comment --comment \"a/b\" -m udp --dport 30053 -m nfacct --nfacct-name  n -j KUBE-EXT-FYZB2HTOW53NRIPL
COMMIT
";

    #[test]
    fn chains_jumps_and_rules_are_found() {
        let state = table(Table::Nat, SAVED);
        assert_eq!(state.chains.len(), 3, "KUBE-NODEPORTS is not declared, but has a rule");
        assert_eq!(state.rules, 3);
        let portals: Vec<_> = state.jumps.iter().map(|jump| JUMPS[*jump].from).collect();
        assert_eq!(portals, ["OUTPUT"], "that of others is none of ours");
    }

    #[test]
    fn what_an_earlier_process_translated_of_udp_is_found() {
        let found = udp_destinations(SAVED, IpFamily::V4);
        assert_eq!(found, ["10.96.0.10:53".parse().unwrap(), "0.0.0.0:30053".parse().unwrap()]);
    }
}
