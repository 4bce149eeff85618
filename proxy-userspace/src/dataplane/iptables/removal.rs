//! What has to go for nothing of kube-proxy's iptables rules to be left: its chains, and whatever leads to them.

use std::fmt::Write as _;

use super::names::{Chain, KUBELET_FIREWALL, Table};
use crate::kernel::iptables::Backend;

/// So many chains, and iptables-nft is to look at all of them; [`super::input`] tells why.
const MANY_CHAINS: usize = 1000;

/// Chains that the kubelet makes to see whether it is flushed: where there is one, `KUBE-FIREWALL` is the kubelet's too.
const KUBELET_CANARY: &str = ":KUBE-KUBELET-CANARY ";

/// Whether the kubelet works with these tables.
pub(super) fn has_kubelet(saved: &str) -> bool {
    saved.lines().any(|line| line.starts_with(KUBELET_CANARY))
}

/// The input that removes chains of a table, and the rules of others that lead to them; none where there are none.
pub(super) fn input(
    table: Table,
    saved: &str,
    backend: Backend,
    is_to_go: impl Fn(&str) -> bool,
) -> Option<String> {
    let declared = saved.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next());
    let chains: Vec<&str> = declared.filter(|chain| is_to_go(chain)).collect();
    let jumps = saved.lines().filter_map(|line| {
        let (from, _) = line.strip_prefix("-A ")?.split_once(' ')?;
        let is_jump = !is_to_go(from) && target(line).is_some_and(&is_to_go);
        is_jump.then(|| &line["-A".len()..])
    });
    let mut text = format!("*{}\n", table.name());
    let before = text.len();
    // Writing to a String cannot fail.
    for jump in jumps {
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

/// Whether a chain is one of kube-proxy's in iptables mode.
pub(super) fn is_of_iptables_mode(chain: &str, keeps_kubelet_firewall: bool) -> bool {
    Chain::parse(chain).is_some_and(|chain| !(keeps_kubelet_firewall && chain == KUBELET_FIREWALL))
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
        let input = input(Table::Nat, SAVED, Backend::Nft, |chain| is_of_iptables_mode(chain, false));
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
        let input = input(Table::Nat, "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n", Backend::Nft, |_| false);
        assert_eq!(input, None);
    }
}
