//! The chains of the iptables mode, and the rules of built-in chains that lead to them.

use crate::dataplane::iptables_text::{
    Chain, Content, EXTERNAL_SERVICES, FORWARD, Jump, KUBELET_FIREWALL, ModeChains, NODE_PORTS, POSTROUTING,
    PROXY_FIREWALL, SERVICES, Table,
};

/// The chains and jumps of this mode.
pub(super) const MODE: ModeChains =
    ModeChains { parse: |_, name| Chain::parse(name), jumps: &JUMPS, content: Content::of };

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

/// In the order of upstream (`iptablesJumpChains`, `iptablesKubeletJumpChains`).
const JUMPS: [Jump; 14] = [
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
