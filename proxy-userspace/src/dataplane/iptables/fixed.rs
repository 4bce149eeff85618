//! Chains and rules that are there whatever the Services.

use super::{
    names::{CANARY, Chain, FORWARD, KUBELET_FIREWALL, MARK_MASQ, NODE_PORTS, POSTROUTING, SERVICES, Table},
    rules::{INVALID_DROPPED, Lines, SHARED, Terms, rule},
    terms::NodePortsOn,
};
use crate::model::IpFamily;

/// Chains that only have to exist: somebody else may fill them.
pub(super) const EXISTING: [(Table, Chain); 4] = [
    (Table::Mangle, CANARY),
    (Table::Filter, CANARY),
    (Table::Nat, CANARY),
    (Table::Filter, KUBELET_FIREWALL),
];

/// Chains with rules that no service port adds to.
pub(super) fn chains(terms: Terms<'_>) -> Vec<(Table, Chain, Lines)> {
    let mut chains = vec![
        (Table::Filter, FORWARD, forward(terms)),
        (Table::Nat, POSTROUTING, postrouting(terms)),
        (Table::Nat, MARK_MASQ, mark(terms)),
    ];
    if terms.family == IpFamily::V4 && terms.node.has_localhost_node_ports() {
        chains.push((Table::Filter, KUBELET_FIREWALL, kubelet_firewall()));
    }
    chains
}

/// What follows the rules of service ports in one of [`SHARED`].
pub(super) fn tail(shared: usize, terms: Terms<'_>) -> Lines {
    let mut lines = Lines::new();
    if SHARED[shared] != (Table::Nat, SERVICES) {
        return lines;
    }
    let comment = "-m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\"";
    match &terms.node.ports_on {
        NodePortsOn::EveryAddress { loopback } => {
            let except = match (terms.family, loopback) {
                (_, true) => "",
                (IpFamily::V4, false) => "! -d 127.0.0.0/8 ",
                (IpFamily::V6, false) => "! -d ::1/128 ",
            };
            let on_all = format_args!("{except}{comment} -m addrtype --dst-type LOCAL -j {NODE_PORTS}");
            rule(&mut lines, SERVICES, on_all);
        }
        NodePortsOn::Addresses(addresses) => {
            let bits = if terms.family == IpFamily::V4 { 32 } else { 128 };
            for address in addresses {
                rule(&mut lines, SERVICES, format_args!("-d {address}/{bits} {comment} -j {NODE_PORTS}"));
            }
        }
    }
    lines
}

/// Packets that conntrack cannot place would leave untranslated, and reset connections
/// (<https://github.com/kubernetes/kubernetes/issues/74839>).
fn forward(terms: Terms<'_>) -> Lines {
    let (mut lines, mark) = (Lines::new(), terms.offer.masquerade_mark);
    if !terms.offer.be_liberal {
        let counted = if terms.offer.counters {
            format!("-m nfacct --nfacct-name {INVALID_DROPPED} ")
        } else {
            String::new()
        };
        rule(&mut lines, FORWARD, format_args!("-m conntrack --ctstate INVALID {counted}-j DROP"));
    }
    let comment = "-m comment --comment \"kubernetes forwarding";
    rule(&mut lines, FORWARD, format_args!("{comment} rules\" -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT"));
    let known =
        format_args!("{comment} conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
    rule(&mut lines, FORWARD, known);
    lines
}

/// The mark is taken off again, so that a packet that passes once more is not masqueraded twice.
fn postrouting(terms: Terms<'_>) -> Lines {
    let (mut lines, mark) = (Lines::new(), terms.offer.masquerade_mark);
    rule(&mut lines, POSTROUTING, format_args!("-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN"));
    rule(&mut lines, POSTROUTING, format_args!("-j MARK --set-xmark {mark:#x}/0x0"));
    let random = if terms.offer.random_fully { " --random-fully" } else { "" };
    let comment = "-m comment --comment \"kubernetes service traffic requiring SNAT\"";
    rule(&mut lines, POSTROUTING, format_args!("{comment} -j MASQUERADE{random}"));
    lines
}

fn mark(terms: Terms<'_>) -> Lines {
    let (mut lines, mark) = (Lines::new(), terms.offer.masquerade_mark);
    rule(&mut lines, MARK_MASQ, format_args!("-j MARK --set-xmark {mark:#x}/{mark:#x}"));
    lines
}

/// As the kubelet writes it: a host nearby must not reach loopback addresses while they are routed
/// (<https://github.com/kubernetes/kubernetes/issues/90259>).
fn kubelet_firewall() -> Lines {
    let mut lines = Lines::new();
    rule(
        &mut lines,
        KUBELET_FIREWALL,
        format_args!(
            "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet connections\" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
        ),
    );
    lines
}
