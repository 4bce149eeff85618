//! The cases and tests that single steps of `cargo xtask test` run or leave out.

/// The cases of `cargo xtask test --quick`, where the modes of netfilter run only the first of
/// them, and of these modes with the API server as the source of objects.
pub(super) const QUICK: [&str; 18] = [
    "clusterip-tcp",
    "clusterip-udp",
    "dual-stack",
    "endpoint-replaced",
    "hairpin",
    "no-endpoints",
    "nodeport-cluster",
    "restart",
    "affinity-clientip",
    "fragmented-udp",
    "links-path-changes",
    "loadbalancer-source-ranges-node",
    "nodeport-local-with-endpoint",
    "redirect-in-a-pod",
    "switch-ebpf-to-nftables",
    "udp-endpoint-replaced",
    "v6-clusterip",
    "vlan",
];
pub(super) const QUICK_NETFILTER: usize = 8;

/// Cases that often wait for silence. Only `cargo xtask conformance --mode MODE` and the ebpf mode
/// run them.
pub(super) const SLOW: [&str; 4] = [
    "outside-cgroup-internal-local",
    "outside-cgroup-local",
    "refused-or-dropped",
    "source-ranges-of-some-pods",
];

/// Cases with masqueraded packets, and changes of what masquerades. By default the link programs do
/// here; with `--links-masquerade netfilter`, netfilter does, as on nodes without the direct path.
pub(super) const MASQUERADED: [&str; 20] = [
    "dual-stack",
    "established-survives",
    "externalip-cluster",
    "forward-policy-drop-legacy",
    "forward-policy-drop-nft",
    "fragmented-udp",
    "fragments-both-ways",
    "hairpin",
    "links-path-changes",
    "loadbalancer-cluster",
    "masquerade-all-packets",
    "nodeport-cluster",
    "nodeport-udp",
    "outside-cgroup-hairpin",
    "path-mtu-behind-other-node",
    "path-mtu-behind-other-node-tcp",
    "restart",
    "switch-ebpf-to-nftables",
    "switch-iptables-to-ebpf",
    "switch-nftables-to-ebpf",
];

/// Cases whose packets take the direct path, so that the XDP program in the driver sends them on.
/// Some set the path themselves.
pub(super) const IN_THE_DRIVER: [&str; 7] = [
    "direct-path",
    "direct-path-and-changes-beneath",
    "direct-whole",
    "dsr",
    "dual-stack",
    "externalip-cluster",
    "nodeport-cluster",
];

/// Cases that slow guests leave out: those about the model, which is the same in every mode, those
/// that others resemble, and most switches between modes. `cargo xtask conformance --mode ipvs`
/// runs them.
pub(super) const NOT_IN_GUESTS: [&str; 30] = [
    "affinity-separate-clients",
    "clusterip-many-slices",
    "clusterip-multi-port",
    "clusterip-spread",
    "detect-local-interface-prefix",
    "established-survives",
    "externalip-cluster",
    "headless-and-externalname",
    "health-check-node-port",
    "healthz-and-livez",
    "internal-local-with-endpoint",
    "loadbalancer-cluster",
    "loadbalancer-ipmode-proxy",
    "loadbalancer-source-ranges-node",
    "node-hints",
    "nodeport-addresses-cidr",
    "nodeport-every-node-address",
    "nodeport-not-on-other-hosts",
    "not-ready",
    "service-changed",
    "service-proxy-name",
    "switch-iptables-to-ipvs",
    "switch-ipvs-to-iptables",
    "switch-ipvs-to-nftables",
    "switch-nftables-to-ipvs",
    "terminating-only",
    "terminating-with-ready",
    "two-namespaces",
    "zone-hints",
    "zone-hints-missing-one",
];

/// Kernel tests that guests run only with `--all-kernels`, because what they test works alike on
/// all kernels. This machine always runs them.
pub(super) const ALIKE: [&str; 11] = [
    "iptables_mode::",
    "iptables_refused::",
    // When userspace looks at links, and what it does then. Each test loads the link programs some
    // times, which takes most of a minute in a guest.
    "daemon::",
    "look::",
    // Counts of system calls.
    "calls::",
    "changes::",
    "look_costs_the_thread_of_changes_the_same_calls",
    // Which of shunt's rules act on which marks, and the size of the prefilter.
    "marks::",
    "prefilter_doubles",
    "ratio_of_false_positives",
    // What userspace writes. The programs run with frames in each kernel.
    "maglev_tables::",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::conformance::is_case;

    #[test]
    fn every_case_in_a_list_exists() {
        let is_mode = |mode: &str| ["ebpf", "nftables", "iptables", "ipvs"].contains(&mode);
        let is_switch = |case: &str| {
            let modes = case.strip_prefix("switch-").and_then(|modes| modes.split_once("-to-"));
            modes.is_some_and(|(from, to)| from != to && is_mode(from) && is_mode(to))
        };
        let lists = [&SLOW[..], &NOT_IN_GUESTS, &MASQUERADED, &IN_THE_DRIVER, &QUICK];
        for case in lists.into_iter().flatten() {
            assert!(is_case(case) || is_switch(case), "there is no {case}.yaml");
        }
    }
}
