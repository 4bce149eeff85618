//! Every finding: its identifier, severity, meaning and remedy. docs/doctor.md has the same list,
//! which a test compares.

use super::Severity::{self, Error, Info, Warning};

/// What is always the same about a finding.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) id: &'static str,
    pub(super) severity: Severity,
    pub(super) meaning: &'static str,
    /// A check may know a better one.
    pub(super) remedy: &'static str,
}

/// Declares constants and the list of them.
macro_rules! kinds {
    ($($name:ident: $severity:ident $id:literal, $meaning:literal, $remedy:literal;)*) => {
        $(pub(super) const $name: Kind =
            Kind { id: $id, severity: $severity, meaning: $meaning, remedy: $remedy };)*

        /// All of them.
        #[cfg(test)]
        pub(super) const ALL: &[Kind] = &[$($name),*];
    };
}

kinds! {
    DAEMON_NOT_RUNNING: Error "DaemonNotRunning",
        "nobody takes in changes of Services; what was programmed before stays as it was",
        "start shunt, or look at the log of its pod: kubectl -n kube-system logs --previous POD";
    DAEMON_SILENT: Error "DaemonSilent",
        "shunt runs, but does not say how it is",
        "run the command as root; if it is root, look at the log of shunt";
    NOT_READY: Error "NotReady",
        "/healthz answers 503, so load balancers send no new connections to this node",
        "look at the other findings and the log; at a start, wait for the first full sync";
    SYNC_FAILING: Error "SyncFailing",
        "the kernel does not have all changes of Services; shunt tries again with a backoff",
        "mend what the error names";
    CHANGES_PENDING: Warning "ChangesPending",
        "Services changed a while ago, and the kernel does not have the change yet",
        "look at SyncFailing; otherwise the node is short of CPU, or a command of iptables or nft hangs";
    WATCH_FAILING: Error "WatchFailing",
        "shunt does not get changes from the API server, or of the directory of manifests; the last known Services keep working",
        "check the address of the API server (--master or clientConnection.kubeconfig), its certificate, and the permissions of the service account; with --manifests, mend what the error names";
    CONFIGURATION_REFUSED: Error "ConfigurationRefused",
        "shunt does not use the changed configuration file: its settings stay as they were, and its next start fails",
        "correct the file, or what it names; shunt reads it again at once";
    MANIFESTS_UNREADABLE: Warning "ManifestsUnreadable",
        "an object in the directory of manifests is not in effect in its newest version",
        "mend the file; shunt reads it again at once";
    SERVICE_LEFT_OUT: Error "ServiceLeftOut",
        "this Service does not work on this node, while all others do",
        "mend what the reason names; shunt get left-out lists all";
    LINK_LEFT_OUT: Warning "LinkLeftOut",
        "no program can be attached to this link; the backstop serves it, and with --backstop never its packets are not translated",
        "the log names the error; exclude the link with --exclude-interfaces if no client is behind it";
    LINK_DISPLACED: Warning "LinkDisplaced",
        "a program of another owner runs before shunt's on this link and may drop, redirect or change packets",
        "let the other program pass packets on (TC_ACT_UNSPEC, TCX_NEXT), or set --links-path netfilter";
    NETFILTER_ON_LINKS: Info "NetfilterOnLinks",
        "rules or filters of others need netfilter's translation, so netfilter serves the links; Services work",
        "nothing has to be done; docs/clusters.md says which rules decide this";
    OTHERS_UNREADABLE: Warning "OthersUnreadable",
        "shunt does not know whether rules of others need netfilter's translation, so netfilter serves the links: Services work, and connections from outside are slower",
        "mend what the error names, such as a command of nft or iptables that is missing or crashes; shunt reads again by itself";
    SOCKETS_LEFT_ALONE: Info "SocketsLeftAlone",
        "programs serve only sockets of the node itself; packets of pods are translated on their links",
        "nothing has to be done, unless the reason names a missing capability";
    MAP_NEARLY_FULL: Warning "MapNearlyFull",
        "when the map is full, more Services or endpoints are left out, or the oldest flows are forgotten",
        "docs/maps.md says what sizes each map; fewer Services or connections on the node also help";
    DRIFT: Warning "Drift",
        "the kernel does not hold what shunt wrote, so connections to this Service may fail; another program changed it",
        "the next periodic look repairs it (syncPeriod); find the other program, or restart shunt to write everything again";
    CLOCK_SKEWED: Warning "ClockSkewed",
        "tokens of service accounts and certificates can be refused as expired, or as not valid yet",
        "set the clock of the node, for example with chronyd or systemd-timesyncd; if the node is right, that of the API server";
    WATCH_SILENT: Info "WatchSilent",
        "the watch is open, but brings nothing; changes may be missing if something between keeps it open",
        "kubectl get --watch from the node; look for a proxy or load balancer between the node and the API server";
    CONFINED: Info "Confined",
        "the module may refuse eBPF, bpffs or netfilter, now or after a change of its policy",
        "if shunt logs refused operations, run it unconfined";
    FORWARD_DROPPED: Warning "ForwardDropped",
        "connections between clients outside, other nodes and pods may be dropped, because only open and masqueraded ones are accepted",
        "accept the ranges of pods: iptables -I FORWARD -s POD_CIDR -j ACCEPT, and the same with -d; most pod networks do it";
    FORWARD_FILTERED: Info "ForwardFiltered",
        "packets to and from pods pass only if one of these rules accepts them; which ones cannot be told",
        "nothing has to be done if pods are reached; otherwise accept the ranges of pods in that chain";
    NODE_PORTS_DROPPED: Warning "NodePortsDropped",
        "the packets are dropped before they are translated, so node ports may not work for these clients",
        "remove the rule, or exclude the node ports that are to be reached";
    OTHER_VERSION: Info "OtherVersion",
        "the daemon is another version than this command, which may not know all of its findings",
        "run the command in the pod of the daemon";
    NO_MODE_WORKS: Error "NoModeWorks",
        "shunt cannot start on this node",
        "shunt probe names what each mode lacks";
    FEATURE_MISSING: Error "FeatureMissing",
        "the mode that runs needs what is missing: its next start would fail",
        "shunt probe names what each mode lacks";
    FEATURE_LIMITED: Info "FeatureLimited",
        "the mode works, with this limitation",
        "shunt probe names what each mode lacks";
    OTHER_PROXY: Error "OtherProxyRunning",
        "two proxies write the rules of this node and can undo each other's changes",
        "remove kube-proxy: kubectl -n kube-system delete daemonset kube-proxy; docs/migration.md says in which order";
    SECOND_SHUNT: Warning "SecondShunt",
        "only one shunt can run on a node; the one that starts first does, with its version and its settings",
        "kubectl get daemonsets --all-namespaces names those that start shunt; remove one, or the service of the node that does";
    OTHER_RULES: Warning "OtherProxyRules",
        "rules of kube-proxy that nobody keeps up to date may translate to endpoints that are gone",
        "they go with the first full sync in which all Services are served; otherwise run shunt --cleanup while no proxy runs";
    PINS_WITHOUT_DAEMON: Warning "PinsWithoutDaemon",
        "programs of an earlier shunt still translate to the endpoints that it knew last",
        "start shunt again, or remove them with shunt --cleanup";
    PINS_UNFINISHED: Warning "PinsUnfinished",
        "an upgrade ended while it replaced maps; the programs use what they used before",
        "restart shunt: it completes or discards the replacement";
    NOT_FORWARDING: Error "NotForwarding",
        "clients outside the node cannot reach its pods, and pods cannot reach other nodes",
        "sysctl -w net.ipv4.ip_forward=1, and the same in /etc/sysctl.d; most pod networks do it";
    NOT_FORWARDING_IPV6: Info "NotForwardingIPv6",
        "IPv6 packets are not forwarded, which matters only where the cluster has IPv6 Services",
        "sysctl -w net.ipv6.conf.all.forwarding=1 if the cluster uses IPv6";
    STRICT_RP_FILTER: Info "StrictReversePath",
        "the kernel drops packets whose source it would reach over another link, as on nodes with several networks",
        "if clients of such a network time out: sysctl -w net.ipv4.conf.LINK.rp_filter=2";
    ROUTE_LOCALNET: Info "RouteLocalnet",
        "packets for 127.0.0.0/8 that come in on links are routed; a rule of kube-proxy's or shunt's iptables mode should drop them",
        "if no iptables mode runs on this node: sysctl -w net.ipv4.conf.LINK.route_localnet=0";
    CONNTRACK_NEARLY_FULL: Warning "ConntrackNearlyFull",
        "when the table is full, the kernel drops packets of new connections",
        "raise conntrack.maxPerCore or conntrack.min, or find who opens so many connections: conntrack -S, conntrack -L";
    CHECK_FAILED: Warning "CheckFailed",
        "a check could not read what it judges, so its findings may be missing",
        "run the command as root, in the network namespace of the node, with the tools that the error names";
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    #[test]
    fn the_page_lists_each_finding_with_its_severity_and_no_others() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/doctor.md");
        let page = fs::read_to_string(page).expect("docs/doctor.md");
        let (_, table) = page.split_once("## Findings").expect("a section of findings");
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let listed: BTreeSet<&str> = rows.filter_map(|row| Some(row.split_once(" | ")?.0)).collect();
        for Kind { id, severity, .. } in ALL {
            let row = format!("| `{id}` | {} | ", severity.label().to_lowercase());
            assert!(page.contains(&row), "docs/doctor.md needs a row that begins with {row}");
        }
        assert_eq!(listed.len(), ALL.len(), "{listed:?}");
    }
}
