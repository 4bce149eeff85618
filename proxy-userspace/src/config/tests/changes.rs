//! What a changed file asks for.

use super::*;

fn between(old: &str, new: &str) -> Change {
    let flags = ["--config=unread", "--hostname-override=n"];
    Change::between(&load(&format!("{HEAD}{old}"), &flags), &load(&format!("{HEAD}{new}"), &flags))
}

#[test]
fn what_only_looks_different_or_has_no_effect_asks_for_nothing() {
    for (old, new) in [
        ("mode: ebpf\n", "# a comment\nmode: 'ebpf'\n"),
        ("hostnameOverride: a\n", "hostnameOverride: b\n"),
        ("", "clientConnection: {qps: 50}\nwinkernel: {enableDSR: true}\n"),
        (
            "mode: iptables\n",
            "mode: iptables\nipvs: {scheduler: sh}\nshunt: {ebpf: {mapSizes: {flows: 32}}}\n",
        ),
        ("", "iptables: {masqueradeBit: 14}\n"),
    ] {
        assert!(between(old, new).is_empty(), "{old} {new}: {:?}", between(old, new));
    }
}

#[test]
fn logs_periods_node_port_addresses_and_growing_sizes_are_taken_on_in_place() {
    let new = "logging: {verbosity: 4}\niptables: {syncPeriod: 10s}\nnodePortAddresses: [10.0.0.0/8]\n\
               shunt: {ebpf: {mapSizes: {services: 200000}}}\n";
    let change = between("", new);
    let in_place =
        ["logging.verbosity", "iptables.syncPeriod", "nodePortAddresses", "shunt.ebpf.mapSizes.services"];
    assert_eq!((change.in_place, change.grows), (in_place.to_vec(), true));
    assert_eq!(change.restart, Vec::<&str>::new());
}

#[test]
fn all_else_needs_another_process() {
    let change =
        between("mode: ebpf\n", "mode: nftables\nlogging: {verbosity: 4}\nclusterCIDR: 10.0.0.0/8\n");
    assert_eq!(change.restart, ["mode", "clusterCIDR"]);
    // Unset, the latter is not the same in both modes.
    assert_eq!(change.in_place, ["logging.verbosity", "iptables.minSyncPeriod"]);
    let shrinks = between("", "shunt: {ebpf: {mapSizes: {services: 64}}}\n");
    assert_eq!((shrinks.restart, shrinks.grows), (vec!["shunt.ebpf.mapSizes.services"], false));
}
