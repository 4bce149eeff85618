//! The chains, rules and jumps that do not depend on service ports.

use super::rules::{INVALID_DROPPED, RuleContext, SHARED_CHAINS};
use crate::{
    dataplane::iptables_text::{
        CANARY, Chain, ChainRules, Content, EXTERNAL_SERVICES, FORWARD, Jump, KUBELET_FIREWALL, ModeChains,
        NODE_PORTS, POSTROUTING, PROXY_FIREWALL, SERVICES, Table, add_forward_rules, add_postrouting_rules,
        host_bits, mark_masq_rules,
    },
    model::IpFamily,
};

/// The chains and jumps of this mode.
pub(super) static MODE: ModeChains =
    ModeChains { parse: |_, name| Chain::parse(name), jumps: &JUMPS, content: Content::of };

const EXTERNALLY_VISIBLE: &str = "kubernetes externally-visible service portals";
const PORTALS: &str = "kubernetes service portals";
const LOAD_BALANCER_FIREWALL: &str = "kubernetes load balancer firewall";

/// In the order of upstream (`iptablesJumpChains`, `iptablesKubeletJumpChains`).
const JUMPS: [Jump; 14] = [
    Jump::new(Table::Filter, "INPUT", EXTERNAL_SERVICES, EXTERNALLY_VISIBLE).of_new_connections(),
    Jump::new(Table::Filter, "FORWARD", EXTERNAL_SERVICES, EXTERNALLY_VISIBLE).of_new_connections(),
    Jump::new(Table::Filter, "INPUT", NODE_PORTS, "kubernetes health check service ports"),
    Jump::new(Table::Filter, "FORWARD", SERVICES, PORTALS).of_new_connections(),
    Jump::new(Table::Filter, "OUTPUT", SERVICES, PORTALS).of_new_connections(),
    Jump::new(Table::Filter, "FORWARD", FORWARD, "kubernetes forwarding rules"),
    Jump::new(Table::Filter, "INPUT", PROXY_FIREWALL, LOAD_BALANCER_FIREWALL).of_new_connections(),
    Jump::new(Table::Filter, "OUTPUT", PROXY_FIREWALL, LOAD_BALANCER_FIREWALL).of_new_connections(),
    Jump::new(Table::Filter, "FORWARD", PROXY_FIREWALL, LOAD_BALANCER_FIREWALL).of_new_connections(),
    Jump::new(Table::Nat, "OUTPUT", SERVICES, PORTALS),
    Jump::new(Table::Nat, "PREROUTING", SERVICES, PORTALS),
    Jump::new(Table::Nat, "POSTROUTING", POSTROUTING, "kubernetes postrouting rules"),
    Jump::new(Table::Filter, "INPUT", KUBELET_FIREWALL, ""),
    Jump::new(Table::Filter, "OUTPUT", KUBELET_FIREWALL, ""),
];

/// Chains that only have to exist. Another program may fill them.
pub(super) const REQUIRED_CHAINS: [(Table, Chain); 4] = [
    (Table::Mangle, CANARY),
    (Table::Filter, CANARY),
    (Table::Nat, CANARY),
    (Table::Filter, KUBELET_FIREWALL),
];

/// Returns the chains that service ports add no rules to.
pub(super) fn fixed_chains(context: RuleContext<'_>) -> Vec<(Table, ChainRules)> {
    let mark = context.options.masquerade_mark;
    let mut postrouting = ChainRules::new(POSTROUTING);
    add_postrouting_rules(
        &mut postrouting,
        mark,
        context.options.random_fully,
        context.node.masquerade_ports,
    );
    let mut chains = vec![
        (Table::Filter, forward(context)),
        (Table::Nat, postrouting),
        (Table::Nat, mark_masq_rules(mark)),
    ];
    if context.node.localhost_node_ports {
        chains.push((Table::Filter, kubelet_firewall()));
    }
    chains
}

/// Appends the rules that follow the rules of service ports in a chain of [`SHARED_CHAINS`].
pub(super) fn add_last_rules(index: usize, rules: &mut ChainRules, context: RuleContext<'_>) {
    if SHARED_CHAINS[index] != (Table::Nat, SERVICES) {
        return;
    }
    let comment = "-m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\"";
    if let Some(addresses) = &context.node.served_on {
        for address in addresses {
            rules.add(format_args!("-d {address}/{} {comment} -j {NODE_PORTS}", host_bits(*address)));
        }
        return;
    }
    let except = match context.family {
        _ if context.node.localhost_node_ports => "",
        IpFamily::V4 => "! -d 127.0.0.0/8 ",
        IpFamily::V6 => "! -d ::1/128 ",
    };
    rules.add(format_args!("{except}{comment} -m addrtype --dst-type LOCAL -j {NODE_PORTS}"));
}

/// Drops packets that conntrack calls invalid: they would leave untranslated, and reset connections
/// (<https://github.com/kubernetes/kubernetes/issues/74839>).
fn forward(context: RuleContext<'_>) -> ChainRules {
    let mut rules = ChainRules::new(FORWARD);
    if !context.options.be_liberal {
        let counter = if context.options.counters {
            format!("-m nfacct --nfacct-name {INVALID_DROPPED} ")
        } else {
            String::new()
        };
        rules.add(format_args!("-m conntrack --ctstate INVALID {counter}-j DROP"));
    }
    add_forward_rules(&mut rules, context.options.masquerade_mark);
    rules
}

/// The rule that the kubelet writes too: hosts on the same network must not reach loopback
/// addresses while the kernel routes them
/// (<https://github.com/kubernetes/kubernetes/issues/90259>).
fn kubelet_firewall() -> ChainRules {
    let mut rules = ChainRules::new(KUBELET_FIREWALL);
    rules.add(
        "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet connections\" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
    );
    rules
}
