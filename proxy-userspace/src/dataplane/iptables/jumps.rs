//! The rules of built-in chains that lead to ours.

use super::names::{
    Chain, EXTERNAL_SERVICES, FORWARD, KUBELET_FIREWALL, NODE_PORTS, POSTROUTING, PROXY_FIREWALL, SERVICES,
    Table,
};

/// A rule of a built-in chain that leads to one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Jump {
    /// The table of both chains.
    pub(super) table: Table,
    /// The built-in chain.
    pub(super) from: &'static str,
    /// Ours.
    pub(super) to: Chain,
    matches: &'static str,
    comment: &'static str,
}

const fn jump(
    table: Table,
    from: &'static str,
    to: Chain,
    matches: &'static str,
    comment: &'static str,
) -> Jump {
    Jump { table, from, to, matches, comment }
}

const NEW: &str = "-m conntrack --ctstate NEW ";
const EXTERNALLY_VISIBLE: &str = "kubernetes externally-visible service portals";
const PORTALS: &str = "kubernetes service portals";
const LOAD_BALANCER_FIREWALL: &str = "kubernetes load balancer firewall";

/// All of them, in the order in which upstream (`iptablesJumpChains`, `iptablesKubeletJumpChains`) puts each before the ones
/// that were there.
pub(super) const JUMPS: [Jump; 14] = [
    jump(Table::Filter, "INPUT", EXTERNAL_SERVICES, NEW, EXTERNALLY_VISIBLE),
    jump(Table::Filter, "FORWARD", EXTERNAL_SERVICES, NEW, EXTERNALLY_VISIBLE),
    jump(Table::Filter, "INPUT", NODE_PORTS, "", "kubernetes health check service ports"),
    jump(Table::Filter, "FORWARD", SERVICES, NEW, PORTALS),
    jump(Table::Filter, "OUTPUT", SERVICES, NEW, PORTALS),
    jump(Table::Filter, "FORWARD", FORWARD, "", "kubernetes forwarding rules"),
    jump(Table::Filter, "INPUT", PROXY_FIREWALL, NEW, LOAD_BALANCER_FIREWALL),
    jump(Table::Filter, "OUTPUT", PROXY_FIREWALL, NEW, LOAD_BALANCER_FIREWALL),
    jump(Table::Filter, "FORWARD", PROXY_FIREWALL, NEW, LOAD_BALANCER_FIREWALL),
    jump(Table::Nat, "OUTPUT", SERVICES, "", PORTALS),
    jump(Table::Nat, "PREROUTING", SERVICES, "", PORTALS),
    jump(Table::Nat, "POSTROUTING", POSTROUTING, "", "kubernetes postrouting rules"),
    jump(Table::Filter, "INPUT", KUBELET_FIREWALL, "", ""),
    jump(Table::Filter, "OUTPUT", KUBELET_FIREWALL, "", ""),
];

impl Jump {
    /// What follows the chain in a rule, in the words of iptables-save.
    pub(super) fn rule(&self) -> String {
        let Self { matches, comment, to, .. } = self;
        if comment.is_empty() {
            format!("{matches}-j {to}")
        } else {
            format!("{matches}-m comment --comment \"{comment}\" -j {to}")
        }
    }
}
