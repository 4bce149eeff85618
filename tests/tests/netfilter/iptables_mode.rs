//! The iptables mode in this kernel, with both kinds of iptables: iptables-save shows what was
//! written, removed rules come back, refused rules are reported, and cleanup leaves only foreign
//! rules.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU32, sync::Arc};

use proxy_userspace::{
    dataplane::{
        Dataplane as _, PlanSize as _,
        iptables::{Iptables, IptablesSettings, State},
        ipvs::{self, IpvsSettings, LinkRemoval},
        nftables::Nftables,
    },
    kernel::command::Launcher,
    model::{
        Balance, Dirty, Forwarding, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NamespacedName,
        Protocol, ResolvedEndpoint, ResolvedPort, ServicePortKey, ServicePortName, Snapshot, TrafficPolicy,
    },
};

use crate::node::Node;

/// The commands of one kind of iptables.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
}

pub(crate) const KINDS: [Kind; 2] = [Kind { name: "nft" }, Kind { name: "legacy" }];

impl Kind {
    /// Creates a node on which only this kind is installed.
    pub(crate) fn node(self, directory: &std::path::Path) -> Node {
        let commands = ["iptables", "ip6tables"]
            .map(|family| ["", "-save", "-restore"].map(|verb| format!("{family}-{}{verb}", self.name)));
        let names: Vec<&str> = commands.iter().flatten().map(String::as_str).collect();
        Node::with_only(&names, directory)
    }

    /// Runs a command line with this kind's iptables for both families.
    pub(crate) fn both(self, node: &Node, line: &str) {
        node.both_families(&format!("iptables-{} {line}", self.name));
    }

    pub(crate) fn saved(self, node: &Node) -> String {
        let commands = [format!("iptables-{}-save", self.name), format!("ip6tables-{}-save", self.name)];
        let saved = commands.map(|command| node.run(&command, &[], ""));
        // Comments contain the time.
        let lines = saved.iter().flat_map(|text| text.lines()).filter(|line| !line.starts_with('#'));
        lines.map(|line| line.split(" [").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
    }
}

pub(crate) fn on_each_kind(test: impl Fn(Kind, &Node)) {
    for kind in KINDS {
        let directory = tempfile::tempdir().expect("a directory");
        test(kind, &kind.node(directory.path()));
    }
}

pub(crate) fn mode(node: &Node) -> Iptables {
    let settings = settings(&node.launcher);
    node.within(|| Ok(Iptables::new(settings))).expect("iptables is installed")
}

pub(crate) fn settings(launcher: &Launcher) -> IptablesSettings {
    IptablesSettings { masquerade_mark: 1 << 14, localhost_node_ports: true, launcher: launcher.clone() }
}

pub(crate) fn observe(node: &Node, mode: &mut Iptables) -> State {
    node.within(|| Ok(mode.observe())).expect("rules can be read")
}

/// Plans everything and applies it. Returns the number of changes.
pub(crate) fn sync(node: &Node, mode: &mut Iptables, state: &mut State, snapshot: &Snapshot) -> usize {
    let plan = Iptables::plan(state, snapshot, &Dirty::everything());
    let changes = plan.len();
    node.within(|| Ok(mode.apply(state, plan))).expect("rules are taken");
    changes
}

/// Returns Services of every kind, in both families.
pub(crate) fn services() -> Snapshot {
    let mut snapshot = Snapshot::default();
    let node = &mut snapshot.node;
    node.local_detector = LocalTrafficDetector::Cidrs(vec![net("10.244.1.0/24"), net("fd44:1::/64")]);
    node.local_addresses = ["127.0.0.1", "::1", "192.168.57.11", "fd57::11"].map(ip).into();
    node.node_port_addresses = node.local_addresses.clone();
    node.primary_addresses = [(IpFamily::V4, ip("192.168.57.11")), (IpFamily::V6, ip("fd57::11"))].into();
    for (family, prefix, outer) in
        [(IpFamily::V4, "10.96.0.", "198.51.100."), (IpFamily::V6, "fd96::", "2001:db8::")]
    {
        let of = |name: &str, protocol, port| add(family, name, protocol, port);
        let (cluster, local) = (TrafficPolicy::Cluster, TrafficPolicy::Local);
        let frontends = |number: u16| {
            vec![
                frontend(FrontendKind::ClusterIp, Some(&format!("{prefix}{number}")), 80),
                frontend(FrontendKind::NodePort, None, 30_000 + number),
                frontend(FrontendKind::ExternalIp, Some(&format!("{outer}{number}")), 80),
                frontend(FrontendKind::LoadBalancerIp, Some(&format!("{outer}1{number}")), 80),
            ]
        };
        let open = port(frontends(1), family, cluster, 3);
        let guarded = ResolvedPort {
            source_ranges: vec![net(if family == IpFamily::V4 { "192.168.57.0/24" } else { "fd57::/64" })],
            affinity_timeout: NonZeroU32::new(10_800),
            ..port(frontends(2), family, local, 2)
        };
        let away = ResolvedPort { local_endpoints: Vec::new(), ..port(frontends(3), family, local, 1) };
        let empty = ResolvedPort { has_endpoints: false, ..port(frontends(4), family, cluster, 0) };
        let all = [
            of("open", Protocol::Tcp, open.clone()),
            of("open", Protocol::Udp, open),
            of("guarded", Protocol::Tcp, guarded),
            of("away", Protocol::Tcp, away),
            of("empty", Protocol::Udp, empty),
        ];
        snapshot.ports.extend(all);
    }
    snapshot
}

pub(crate) fn add(
    family: IpFamily,
    name: &str,
    protocol: Protocol,
    port: ResolvedPort,
) -> (ServicePortKey, Arc<ResolvedPort>) {
    let service = NamespacedName::parse("default", name).expect("a valid name");
    let name = ServicePortName { service, port: "p".into(), protocol };
    (ServicePortKey { name, family }, Arc::new(port))
}

pub(crate) fn port(
    frontends: Vec<Frontend>,
    family: IpFamily,
    external_policy: TrafficPolicy,
    endpoints: u16,
) -> ResolvedPort {
    let address = |number: u16| match family {
        IpFamily::V4 => format!("10.244.1.{number}:8080"),
        IpFamily::V6 => format!("[fd44:1::{number}]:8080"),
    };
    let endpoint =
        |number| ResolvedEndpoint { address: address(number).parse().expect("an endpoint"), is_local: true };
    let endpoints: Vec<_> = (1..=endpoints).map(endpoint).collect();
    let is_local = external_policy == TrafficPolicy::Local;
    ResolvedPort {
        frontends,
        local_endpoints: if is_local { endpoints.clone() } else { Vec::new() },
        cluster_endpoints: endpoints,
        serving: Vec::new(),
        has_endpoints: true,
        affinity_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        balance: Balance::Random,
        forwarding: Forwarding::Nat,
        dsr_nodes: BTreeMap::new(),
    }
}

pub(crate) fn frontend(kind: FrontendKind, address: Option<&str>, port: u16) -> Frontend {
    Frontend { kind, address: address.map(ip), port: port.try_into().expect("not 0") }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn net<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text} is no range"))
}

#[test]
fn next_process_finds_all_rules_and_writes_nothing() {
    on_each_kind(|kind, node| {
        let mut first = mode(node);
        let mut state = observe(node, &mut first);
        assert!(sync(node, &mut first, &mut state, &services()) > 50);
        let shown = kind.saved(node);
        assert!(shown.contains("KUBE-FW-") && shown.contains("KUBE-SVL-"), "{shown}");
        let mut next = mode(node);
        let mut state = observe(node, &mut next);
        assert_eq!(sync(node, &mut next, &mut state, &services()), 0, "{}", kind.name);
    });
}

#[test]
fn flushed_rules_come_back_and_jumps_exist_once() {
    on_each_kind(|kind, node| {
        kind.both(node, "-A INPUT -p tcp --dport 1 -j DROP");
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        sync(node, &mut mode, &mut state, &services());
        let whole = kind.saved(node);
        for flush in [
            &["-t nat -F", "-t nat -X"][..],
            &["-t mangle -X"],
            &["-t filter -F FORWARD"],
            &["-t nat -D POSTROUTING 1"],
            &["-t nat -X KUBE-PROXY-CANARY"],
        ] {
            assert!(node.within(|| Ok(mode.is_certain(&state))), "{}: before {flush:?}", kind.name);
            for line in flush {
                kind.both(node, line);
            }
            assert!(!node.within(|| Ok(mode.is_certain(&state))), "{}: after {flush:?}", kind.name);
            state = observe(node, &mut mode);
            assert!(sync(node, &mut mode, &mut state, &services()) > 0);
            let sorted = |text: &str| {
                let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
                lines.sort();
                lines
            };
            assert_eq!(sorted(&kind.saved(node)), sorted(&whole), "{}: after {flush:?}", kind.name);
        }
    });
}

#[test]
fn cleanup_leaves_only_foreign_rules() {
    on_each_kind(|kind, node| {
        for line in [
            "-A INPUT -p tcp --dport 1 -j DROP",
            "-t nat -N CNI-HOSTPORT",
            "-t nat -A PREROUTING -m comment --comment KUBE-SERVICES -j CNI-HOSTPORT",
            "-t mangle -N KUBE-KUBELET-CANARY",
            "-N KUBE-FIREWALL",
            "-A INPUT -j KUBE-FIREWALL",
            "-t nat -L -n",
        ] {
            kind.both(node, line);
        }
        let before = kind.saved(node);
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        sync(node, &mut mode, &mut state, &services());
        assert_ne!(kind.saved(node), before);
        let settings = settings(&node.launcher);
        let errors = node.within(|| Ok(Iptables::remove(&settings)));
        assert!(errors.is_empty(), "{errors:?}");
        // The kubelet writes the content of its chain again. The jump from OUTPUT stays as the
        // kubelet's.
        let after = kind.saved(node);
        let others = |text: &str| {
            text.lines().filter(|line| !line.contains("KUBE-FIREWALL")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(others(&after), others(&before), "{}", kind.name);
    });
}

#[test]
fn without_a_kubelet_cleanup_leaves_nothing_and_resets_its_sysctls() {
    const SETTING: &str = "net.ipv4.conf.all.route_localnet";
    let is_routed = |node: &Node| node.run("sysctl", &["-n", SETTING], "").trim() == "1";
    on_each_kind(|kind, node| {
        for set_by_others in [false, true] {
            node.run("sysctl", &["-w", &format!("{SETTING}={}", u8::from(set_by_others))], "");
            let mut mode = mode(node);
            let mut state = observe(node, &mut mode);
            sync(node, &mut mode, &mut state, &services());
            assert!(is_routed(node), "{}", kind.name);
            // The next process knows only the rules.
            let mut next = self::mode(node);
            let mut state = observe(node, &mut next);
            assert_eq!(sync(node, &mut next, &mut state, &services()), 0, "{}", kind.name);
            let settings = settings(&node.launcher);
            let errors = node.within(|| Ok(Iptables::remove(&settings)));
            assert!(errors.is_empty(), "{errors:?}");
            assert_eq!(is_routed(node), set_by_others, "{}", kind.name);
            // While loopback addresses are routed, other hosts must not reach them.
            let left = kind.saved(node);
            assert_eq!(left.contains("KUBE-FIREWALL"), set_by_others, "{}: {left}", kind.name);
            assert!(
                !left.lines().any(|line| line.contains("KUBE-") && !line.contains("KUBE-FIREWALL")),
                "{left}"
            );
        }
    });
}

/// What kube-proxy's other modes leave behind, abridged from the recordings.
const OF_NFTABLES: &str =
    "add table ip kube-proxy\nadd table ip6 kube-proxy\nadd chain ip kube-proxy services\n";
const OF_IPVS: &str = "*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
COMMIT
*filter
:KUBE-IPVS-FILTER - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-A INPUT -m comment --comment \"kubernetes ipvs access filter\" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
COMMIT
";

#[test]
fn rules_of_kube_proxys_other_modes_are_removed_and_ours_stay() {
    on_each_kind(|kind, node| {
        node.run("nft", &["-f", "-"], OF_NFTABLES);
        node.run("ipset", &["create", "KUBE-CLUSTER-IP", "hash:ip,port"], "");
        node.run("ipset", &["create", "KUBE-6-NODE-PORT-TCP", "bitmap:port", "range", "0-65535"], "");
        node.run("ipset", &["create", "mine", "hash:ip"], "");
        node.run(&format!("iptables-{}-restore", kind.name), &["-w", "--noflush"], OF_IPVS);
        let mut mode = mode(node);
        let mut state = observe(node, &mut mode);
        sync(node, &mut mode, &mut state, &services());
        let settings = settings(&node.launcher);
        let errors = node.within(|| {
            let mut errors: Vec<String> =
                Iptables::remove_others(&settings).iter().map(ToString::to_string).collect();
            errors.extend(Nftables::cleanup_tables().iter().map(ToString::to_string));
            errors.extend(
                ipvs::remove(&IpvsSettings::default(), LinkRemoval::Now).iter().map(ToString::to_string),
            );
            Ok(errors)
        });
        assert!(errors.is_empty(), "{errors:?}");
        let shown = kind.saved(node);
        for gone in [
            "KUBE-NODE-PORT ",
            "KUBE-LOAD-BALANCER",
            "KUBE-IPVS",
            "SOURCE-RANGES",
            "kube-proxy firewall",
            "match-set",
        ] {
            assert!(!shown.contains(gone), "{}: {gone}: {shown}", kind.name);
        }
        assert!(!node.run("nft", &["list", "tables"], "").contains("kube-proxy"));
        assert_eq!(node.run("ipset", &["list", "-name"], "").trim(), "mine");
        let mut next = self::mode(node);
        let mut state = observe(node, &mut next);
        assert_eq!(sync(node, &mut next, &mut state, &services()), 0, "our rules are complete");
    });
}

#[test]
fn set_that_is_in_use_does_not_keep_the_others() {
    let node = Node::new();
    let sets = ["KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-LOAD-BALANCER"];
    for set in sets {
        node.run("ipset", &["create", set, "hash:ip,port"], "");
    }
    node.run("ipset", &["create", "mine", "list:set"], "");
    node.run("ipset", &["add", "mine", "KUBE-EXTERNAL-IP"], "");
    let remove = || {
        let errors = node.within(|| Ok(ipvs::remove(&IpvsSettings::default(), LinkRemoval::Now)));
        errors.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let errors = remove();
    assert!(matches!(&errors[..], [error] if error.contains("ipset destroy KUBE-EXTERNAL-IP")), "{errors:?}");
    assert_eq!(node.run("ipset", &["list", "-name"], ""), "KUBE-EXTERNAL-IP\nmine\n");
    node.run("ipset", &["destroy", "mine"], "");
    assert_eq!(remove(), Vec::<String>::new());
    assert_eq!(node.run("ipset", &["list", "-name"], ""), "");
}
