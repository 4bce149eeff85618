//! Changes of the configuration file.

use super::*;

fn between(old: &str, new: &str) -> ConfigChange {
    let flags = ["--config=unread", "--hostname-override=n"];
    ConfigChange::between(&load(&format!("{HEAD}{old}"), &flags), &load(&format!("{HEAD}{new}"), &flags))
}

#[test]
fn a_change_without_an_effect_is_empty() {
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
fn some_settings_and_growing_maps_change_in_place() {
    let new = "logging: {verbosity: 4}\niptables: {syncPeriod: 10s}\nnodePortAddresses: [10.0.0.0/8]\n\
               shunt: {ebpf: {mapSizes: {services: 200000}}, reload: {jitter: 5m}}\n";
    let change = between("", new);
    let in_place = [
        "logging.verbosity",
        "iptables.syncPeriod",
        "nodePortAddresses",
        "shunt.reload.jitter",
        "shunt.ebpf.mapSizes.services",
    ];
    assert_eq!((change.in_place, change.maps_grow), (in_place.to_vec(), true));
    assert_eq!(change.restart, Vec::<&str>::new());
}

#[test]
fn other_settings_need_a_restart() {
    let change =
        between("mode: ebpf\n", "mode: nftables\nlogging: {verbosity: 4}\nclusterCIDR: 10.0.0.0/8\n");
    assert_eq!(change.restart, ["mode", "clusterCIDR"]);
    // The default of the latter differs between the modes.
    assert_eq!(change.in_place, ["logging.verbosity", "iptables.minSyncPeriod"]);
    let dsr = between("mode: ebpf\n", "mode: ebpf\nshunt: {dsr: {enabled: true, port: 4791}}\n");
    assert_eq!(dsr.restart, ["shunt.dsr.enabled", "shunt.dsr.port"]);
    let shrinks = between("", "shunt: {ebpf: {mapSizes: {services: 64}}}\n");
    assert_eq!((shrinks.restart, shrinks.maps_grow), (vec!["shunt.ebpf.mapSizes.services"], false));
}
