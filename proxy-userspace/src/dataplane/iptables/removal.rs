//! What has to go for nothing of kube-proxy's iptables rules to be left: its chains, and whatever leads to them.

use std::fmt::Write as _;

use super::{
    names::{Chain, KUBELET_FIREWALL, ROUTES_LOCALNET, Table},
    saved,
};
use crate::{dataplane::ipvs, kernel::iptables::Backend};

/// So many chains, and iptables-nft is to look at all of them; [`super::input`] tells why.
const MANY_CHAINS: usize = 1000;

/// Chains of kube-proxy's ipvs mode that the iptables mode does not have.
const OF_IPVS: [&str; 5] = [
    "KUBE-LOAD-BALANCER",
    "KUBE-NODE-PORT",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-SOURCE-RANGES-FIREWALL",
];

/// Chains that the kubelet makes to see whether it is flushed: where there is one, `KUBE-FIREWALL` is the kubelet's too.
const KUBELET_CANARY: &str = ":KUBE-KUBELET-CANARY ";

/// Whether the kubelet works with these tables.
pub(super) fn has_kubelet(saved: &str) -> bool {
    saved.lines().any(|line| line.starts_with(KUBELET_CANARY))
}

/// Whether it was the iptables mode that set `route_localnet`.
pub(super) fn has_set_route_localnet(saved: &str) -> bool {
    saved.lines().any(|line| line.starts_with(&format!(":{ROUTES_LOCALNET} ")))
}

/// What is to be left of what kube-proxy writes into iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing, but for `KUBE-FIREWALL` where somebody else wants it.
    Nothing {
        /// Somebody does.
        but_kubelet_firewall: bool,
        /// And for the note that it was the iptables mode that set `route_localnet`, which it still needs.
        but_note: bool,
    },
    /// What the iptables mode writes.
    IptablesMode,
    /// What the ipvs mode writes, and `KUBE-FIREWALL` where somebody else wants it.
    IpvsMode {
        /// Somebody does.
        but_kubelet_firewall: bool,
    },
}

impl Left {
    fn takes_chain(self, table: Table, chain: &str) -> bool {
        match (self, Chain::parse(chain)) {
            (Self::IpvsMode { .. }, _) if ipvs::has_chain(table.name(), chain) => false,
            (_, None) => OF_IPVS.contains(&chain),
            (Self::IptablesMode, Some(_)) => false,
            (Self::IpvsMode { but_kubelet_firewall }, Some(chain)) => {
                !(but_kubelet_firewall && chain == KUBELET_FIREWALL)
            }
            (Self::Nothing { but_kubelet_firewall, but_note }, Some(chain)) => {
                !(but_kubelet_firewall && chain == KUBELET_FIREWALL || but_note && chain == ROUTES_LOCALNET)
            }
        }
    }

    /// A rule of somebody else's chain that leads to one of ours.
    fn takes_jump(self, table: Table, from: &str, target: &str, rule: &str) -> bool {
        let is_stray = match self {
            Self::Nothing { .. } => false,
            Self::IptablesMode => {
                Chain::parse(target).is_some_and(|chain| chain != KUBELET_FIREWALL)
                    && saved::jump(table, from, rule).is_none()
            }
            Self::IpvsMode { .. } => {
                ipvs::has_chain(table.name(), target) && !ipvs::has_jump(table.name(), from, rule)
            }
        };
        self.takes_chain(table, target) || (is_stray && is_built_in(from))
    }
}

fn is_built_in(chain: &str) -> bool {
    ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"].contains(&chain)
}

/// The input that removes chains of a table, and the rules of others that lead to them; none where there are none.
pub(super) fn input(table: Table, saved: &str, backend: Backend, left: Left) -> Option<String> {
    let declared = saved.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next());
    let chains: Vec<&str> = declared.filter(|chain| left.takes_chain(table, chain)).collect();
    let jumps = saved.lines().filter_map(|line| {
        let (from, rule) = line.strip_prefix("-A ")?.split_once(' ')?;
        let is_ours = left.takes_chain(table, from) || Chain::parse(from).is_some();
        let is_jump = !is_ours && left.takes_jump(table, from, target(rule)?, rule);
        is_jump.then(|| &line["-A".len()..])
    });
    let mut text = format!("*{}\n", table.name());
    let before = text.len();
    for jump in jumps {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "-D{jump}");
    }
    if backend == Backend::Nft && chains.len() > MANY_CHAINS {
        text.push_str("-S\n");
    }
    // Named, it is empty, so that nothing leads from one to another when they go.
    for head in [":{} - [0:0]", "-X {}"] {
        for chain in &chains {
            text.extend([&*head.replace("{}", chain), "\n"]);
        }
    }
    (text.len() > before).then(|| text + "COMMIT\n")
}

/// The chain that a rule leads to. A comment ends in a quotation mark, so that none is taken for it.
fn target(rule: &str) -> Option<&str> {
    let words = rule.rsplit_once('"').map_or(rule, |(_, after)| after);
    let (_, after) = words.rsplit_once("-j ").or_else(|| words.rsplit_once("-g "))?;
    after.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "\
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-FYZB2HTOW53NRIPL - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -m comment --comment \"not -j KUBE-SERVICES\" -j MINE
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A MINE -j KUBE-SERVICES
COMMIT
";

    #[test]
    fn chains_go_with_all_that_leads_to_them_and_nothing_else_does() {
        let input = input(
            Table::Nat,
            SAVED,
            Backend::Nft,
            Left::Nothing { but_kubelet_firewall: false, but_note: false },
        );
        let expected = "*nat
-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-D MINE -j KUBE-SERVICES
:KUBE-SERVICES - [0:0]
:KUBE-SVC-FYZB2HTOW53NRIPL - [0:0]
-X KUBE-SERVICES
-X KUBE-SVC-FYZB2HTOW53NRIPL
COMMIT
";
        assert_eq!(input.as_deref(), Some(expected));
    }

    #[test]
    fn where_there_is_nothing_nothing_is_done() {
        let empty = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n";
        let input = input(
            Table::Nat,
            empty,
            Backend::Nft,
            Left::Nothing { but_kubelet_firewall: false, but_note: false },
        );
        assert_eq!(input, None);
    }

    #[test]
    fn beside_the_ipvs_mode_its_chains_stay_with_what_leads_to_them() {
        let saved = "*filter\n:KUBE-SERVICES - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-FIREWALL - [0:0]\n\
            -A INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\n\
            -A FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A INPUT -j KUBE-FIREWALL\nCOMMIT\n";
        let left = Left::IpvsMode { but_kubelet_firewall: true };
        let input = input(Table::Filter, saved, Backend::Legacy, left);
        let expected = "*filter\n\
            -D INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -D FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            :KUBE-SERVICES - [0:0]\n-X KUBE-SERVICES\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }

    #[test]
    fn beside_the_iptables_mode_only_what_is_of_ipvs_goes() {
        let saved = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n\
            -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            -A CNI -j KUBE-SERVICES\n\
            -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n";
        let input = input(Table::Nat, saved, Backend::Legacy, Left::IptablesMode);
        let expected = "*nat\n-D PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            :KUBE-NODE-PORT - [0:0]\n-X KUBE-NODE-PORT\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }
}
