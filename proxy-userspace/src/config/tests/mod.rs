//! Configuration files and command lines, and the errors of bad ones.

mod changes;
mod chart_schema;
mod documents;
mod files;
mod go_flags;
mod log;
mod rejected;

use std::{path::PathBuf, time::Duration};

use proxy_common::layout::MapSizes;

use super::*;
use crate::{
    kernel::bpf::LogLevel,
    mode::Mode,
    model::{DetectLocalMode, NodePortAddresses},
    net::ContentType,
    node::NodeSettings,
    yaml,
};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// The text that kubeadm writes into kube-proxy's `ConfigMap`: every field, most of them with Go's
/// zero values.
const KUBEADM: &str = include_str!("good/kubeadm.yaml");

/// The configuration under every conformance case.
const CONFORMANCE: &str = r"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
hostnameOverride: node1
mode: ebpf
clusterCIDR: 10.244.0.0/16,fd44::/16
healthzBindAddress: 0.0.0.0:10256
metricsBindAddress: 127.0.0.1:10249
iptables: {masqueradeAll: true, minSyncPeriod: 0s, syncPeriod: 30s}
ipvs: {minSyncPeriod: 0s, syncPeriod: 30s}
nftables: {minSyncPeriod: 0s, syncPeriod: 30s}
nodePortAddresses: [192.168.57.111/32]
detectLocalMode: InterfaceNamePrefix
detectLocal: {interfaceNamePrefix: veth}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s, udpTimeout: 0s, udpStreamTimeout: 0s}
";

fn environment() -> Environment {
    Environment {
        host_name: "Node-A\n".into(),
        mounts: "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/my\\040unified cgroup2 rw 0 0\n"
            .into(),
        ..Environment::default()
    }
}

fn load_with(file: Option<&str>, flags: &[&str], environment: &Environment) -> Result<Config, ConfigError> {
    let flags = Flags::parse([&["shunt"], flags].concat()).expect("the command line is well-formed");
    let file = file.map(|text| yaml::parse(text).expect("the file is YAML"));
    Config::from_parts(&flags, file.as_ref(), environment, Mode::Ebpf)
}

fn load(file: &str, flags: &[&str]) -> Config {
    load_with(Some(file), flags, &environment()).expect("the configuration is valid")
}

fn invalid(file: Option<&str>, flags: &[&str]) -> Vec<String> {
    match load_with(file, flags, &environment()) {
        Err(ConfigError::Invalid { invalid: settings, .. }) => {
            settings.iter().map(ToString::to_string).collect()
        }
        other => panic!("expected an invalid configuration, got {other:?}"),
    }
}

fn api(kubeconfig: Option<PathBuf>, servers: &[&str]) -> ObjectSource {
    let servers = servers.iter().map(ToString::to_string).collect();
    ObjectSource::Api { kubeconfig, servers, content_types: ContentType::ALL.to_vec() }
}

#[test]
fn defaults_are_those_of_kube_proxy() {
    let config = load_with(None, &[], &environment()).expect("defaults are valid");
    assert_eq!((config.mode, config.mode_is_auto), (Mode::Ebpf, true));
    assert_eq!(config.source, api(None, &[]));
    assert_eq!(&*config.model.node_name, "node-a");
    assert_eq!(config.model.detect_local, DetectLocalMode::ClusterCidr);
    assert_eq!(config.model.node_port_addresses, NodePortAddresses::All);
    assert_eq!(config.healthz_bind_address, Some("0.0.0.0:10256".parse().unwrap()));
    assert_eq!(config.metrics_bind_address, Some("127.0.0.1:10249".parse().unwrap()));
    assert_eq!(config.sync_period, Duration::from_secs(30));
    assert_eq!(config.min_sync_period, Duration::ZERO);
    assert_eq!(config.node.oom_score_adj, -999);
    assert_eq!((config.node.conntrack.max_per_core, config.node.conntrack.min), (32 << 10, 128 << 10));
    assert_eq!(config.node.conntrack.tcp_established_timeout, Duration::from_hours(24));
    assert_eq!(config.node.conntrack.tcp_close_wait_timeout, Duration::from_hours(1));
    assert_eq!((config.node.conntrack.udp_timeout, &*config.ipvs.scheduler), (Duration::ZERO, "rr"));
    assert_eq!(config.ebpf.map_sizes, MapSizes { dsr_returns: 1, ..MapSizes::default() });
    assert_eq!(config.counted_services, 4_000);
    assert_eq!(config.node, NodeSettings::default());
    assert_eq!(config.ineffective, []);
    assert_eq!(config.ebpf.cgroup_root, PathBuf::from("/sys/fs/cgroup/my unified"));
    assert_eq!(config.ebpf.pin_dir, PathBuf::from("/sys/fs/bpf/shunt"));
    assert_eq!(config.log_filter, "info");
}

#[test]
fn the_api_server_is_asked_for_the_encodings_of_the_file_or_the_flag() {
    const BOTH: &str = "application/vnd.kubernetes.protobuf, application/json";
    const REVERSED: &str = "application/json, application/vnd.kubernetes.protobuf";
    let content_types = |file: &str, flags: &[&str]| match load(file, flags).source {
        ObjectSource::Api { content_types, .. } => ContentType::accept(&content_types),
        ObjectSource::Manifests(_) => panic!("no API server"),
    };
    let file = |fields: &str| format!("{HEAD}clientConnection: {{{fields}}}\n");
    assert_eq!(content_types(&file(r#"contentType: "", acceptContentTypes: """#), &[]), BOTH);
    assert_eq!(content_types(&file("contentType: application/vnd.kubernetes.protobuf"), &[]), BOTH);
    assert_eq!(content_types(&file("contentType: application/json"), &[]), "application/json");
    assert_eq!(content_types(&file(&format!("acceptContentTypes: '{REVERSED}'")), &[]), REVERSED);
    let with_parameters =
        "acceptContentTypes: 'application/JSON;q=0.9, application/vnd.kubernetes.protobuf,'";
    assert_eq!(content_types(&file(with_parameters), &[]), REVERSED);
    let config = load_with(None, &["--kube-api-content-type=application/json"], &environment());
    assert!(matches!(
        config.expect("a valid flag").source,
        ObjectSource::Api { content_types, .. } if content_types == [ContentType::Json]
    ));
    assert_eq!(
        invalid(Some(&file("acceptContentTypes: application/cbor")), &[]),
        [
            "clientConnection.acceptContentTypes: \"application/cbor\": must be a list of application/vnd.kubernetes.protobuf and application/json"
        ]
    );
    assert_eq!(
        invalid(Some(&file("contentType: json")), &[]),
        [
            "clientConnection.contentType: \"json\": must be one of application/vnd.kubernetes.protobuf, application/json"
        ]
    );
}

#[test]
fn zero_values_of_kubeadms_file_are_not_reported() {
    let config = load(KUBEADM, &[]);
    assert_eq!(config.ineffective, []);
    let kubeconfig = Some(PathBuf::from("/var/lib/kube-proxy/kubeconfig.conf"));
    assert_eq!(config.source, api(kubeconfig, &[]));
    assert_eq!(config.healthz_bind_address, Some("0.0.0.0:10256".parse().unwrap()));
    assert_eq!(config.sync_period, Duration::from_secs(30));
    assert_eq!(config.min_sync_period, Duration::ZERO);
}

#[test]
fn defaults_of_other_modes_are_not_reported() {
    let config = load(CONFORMANCE, &["--manifests", "/m"]);
    assert_eq!(config.source, ObjectSource::Manifests("/m".into()));
    assert_eq!(&*config.model.node_name, "node1");
    assert_eq!(config.model.cluster_cidrs, ["10.244.0.0/16", "fd44::/16"].map(|cidr| cidr.parse().unwrap()));
    assert_eq!(config.model.detect_local, DetectLocalMode::InterfaceNamePrefix("veth".into()));
    assert_eq!(
        config.model.node_port_addresses,
        NodePortAddresses::Cidrs(vec!["192.168.57.111/32".parse().unwrap()])
    );
    assert!(config.model.masquerade_all);
    assert_eq!(config.min_sync_period, Duration::ZERO);
    assert_eq!(config.ineffective, []);
}

#[test]
fn beside_a_file_other_flags_are_ignored_and_reported() {
    let file = format!(
        "{HEAD}mode: iptables\nhostnameOverride: from-file\nnodePortAddresses: [primary]\nlogging: {{verbosity: 1}}\n"
    );
    let flags = [
        "--hostname-override= From-Flag ",
        "--nodeport-addresses=10.0.0.0/8",
        "--kubeconfig=/k",
        "--master=https://api",
        "--proxy-mode=ebpf",
        "-v=4",
        "--cgroup-root=/c",
    ];
    let config = load(&file, &[&["--config=unread"], &flags[..]].concat());
    assert_eq!(&*config.model.node_name, "from-flag");
    assert_eq!(config.model.node_port_addresses, NodePortAddresses::Primary { cidrs: Vec::new() });
    assert_eq!(config.source, api(None, &["https://api"]));
    assert_eq!((config.mode, config.mode_is_auto), (Mode::Ebpf, false));
    assert_eq!(config.log_filter, "info,shunt=debug,proxy_userspace=debug");
    assert_eq!(config.ebpf.cgroup_root, PathBuf::from("/c"));
    let named: Vec<_> = config.ineffective.iter().map(ToString::to_string).collect();
    let why = "ignored because --config is given, as with kube-proxy";
    assert_eq!(named, [format!("--kubeconfig: {why}"), format!("--nodeport-addresses: {why}")]);
}

/// The other modes have rules of their own for loopback addresses.
#[test]
fn ebpf_mode_serves_node_ports_on_loopback_unless_that_is_turned_off() {
    let off = "--iptables-localhost-nodeports=false";
    let serves = |flags: &[&str]| {
        let config = load_with(None, flags, &environment()).expect("flags");
        assert_eq!(config.ineffective, []);
        config.model.loopback_node_ports
    };
    assert!(serves(&["--mode=ebpf"]) && serves(&["--mode=iptables", off]));
    assert!(!serves(&["--mode=ebpf", off]) && !serves(&["--mode=auto", off]));
}

#[test]
fn programs_may_masquerade_where_the_node_may_have_the_direct_path() {
    let masquerade = |flags: &[&str]| {
        let model = load_with(None, flags, &environment()).expect("flags").model;
        (model.masquerade_ports.is_some(), model.masquerades_with_direct_path)
    };
    let (never, with_direct_path, always) = ((false, false), (true, true), (true, false));
    for (flags, expected) in [
        (&[][..], with_direct_path),
        (&["--links-path=direct"], always),
        (&["--links-masquerade=programs"], always),
        (&["--links-path=programs"], never),
        (&["--links-path=netfilter"], never),
    ] {
        assert_eq!(masquerade(flags), expected, "{flags:?}");
    }
    assert!(!masquerade(&["--links-masquerade=netfilter"]).0);
}

#[test]
fn a_written_configuration_means_the_same_when_read() {
    let flags = ["--iptables-sync-period=1m", "--masquerade-all", "--cluster-cidr=10.0.0.0/8", "--v=2"];
    for mode in ["auto", "ebpf", "nftables", "iptables", "ipvs"] {
        let flags = [&flags[..], &["--mode", mode]].concat();
        let by_flags = load_with(None, &flags, &environment()).expect("flags");
        let written = by_flags.effective.document().to_string();
        let by_file = load(&written, &[]);
        assert_eq!(
            (by_file.sync_period, by_file.min_sync_period, &by_file.model, &by_file.node),
            (by_flags.sync_period, by_flags.min_sync_period, &by_flags.model, &by_flags.node),
            "{mode}: {written}"
        );
        assert_eq!(by_file.log_filter, by_flags.log_filter);
    }
}

#[test]
fn without_a_file_all_flags_apply() {
    let flags = [
        "--hostname-override= From-Flag ",
        "--nodeport-addresses=10.0.0.0/8,primary",
        "--bind_address_hard_fail=T",
        "--iptables-sync-period=1m30s",
        "--proxy-mode=auto",
        "--metrics-bind-address=",
        "--healthz-bind-address=127.0.0.1",
        "--healthz-port=1234",
        "--oom-score-adj",
        "-5",
        "--conntrack-max-per-core=0",
        "--feature-gates=WatchList=true,AllowServiceExternalIPs=false",
        "--feature-gates=KubeletPSI=true",
        "--ipvs-exclude-cidrs=010.0.0.0/8",
    ];
    let config = load_with(None, &flags, &environment()).unwrap();
    assert_eq!(&*config.model.node_name, "from-flag");
    assert_eq!(
        config.model.node_port_addresses,
        NodePortAddresses::Primary { cidrs: vec!["10.0.0.0/8".parse().unwrap()] }
    );
    assert!(config.bind_address_hard_fail && config.mode_is_auto);
    assert_eq!(config.sync_period, Duration::from_secs(90));
    assert_eq!(config.metrics_bind_address, None);
    assert_eq!(config.healthz_bind_address, Some("127.0.0.1:1234".parse().unwrap()));
    assert_eq!((config.node.oom_score_adj, config.node.conntrack.max_per_core), (-5, 0));
    let named: Vec<_> = config.ineffective.iter().map(|setting| setting.setting.as_str()).collect();
    assert_eq!(named, ["--feature-gates", "--ipvs-exclude-cidrs"]);
    let gates = "these gates change nothing in shunt: KubeletPSI, WatchList";
    assert_eq!(config.ineffective[0].why, gates);
    assert!(config.model.ignores_external_ips);
}

/// KEP-6032: the words may be combined with each other and with ranges, without a feature gate.
#[test]
fn node_port_addresses_accept_the_words_of_1_37() {
    let addresses = |text: &str, mode: &str| {
        let config = load(&format!("{HEAD}mode: {mode}\nnodePortAddresses: {text}\n"), &[]);
        (config.model.node_port_addresses, config.ineffective.len())
    };
    let cidrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    let loopback = ["127.0.0.0/8", "::1/128"];
    let primary = NodePortAddresses::Primary { cidrs: cidrs(&loopback) };
    assert_eq!(addresses("[primary, localhost]", "ebpf"), (primary.clone(), 0));
    assert_eq!(addresses("[primary, localhost]", "nftables"), (primary, 1));
    let all = NodePortAddresses::Cidrs(cidrs(&["0.0.0.0/0", "::/0"]));
    assert_eq!(addresses("[all]", "nftables"), (all, 0));
    let both = NodePortAddresses::Cidrs(cidrs(&["10.0.0.0/8", loopback[0], loopback[1]]));
    assert_eq!(addresses("[10.0.0.0/8, localhost]", "iptables"), (both, 0));
    let typo = invalid(Some(&format!("{HEAD}nodePortAddresses: [Localhost]\n")), &[]);
    assert!(typo[0].contains("Localhost") && typo[0].ends_with("primary, localhost and all"), "{typo:?}");
}

#[test]
fn flagz_has_given_values_and_defaults() {
    let flags = ["shunt", "--config=/etc/a", "-v=4", "--interfaces=eth0", "--interfaces=eth1"];
    let values = Flags::parse(flags).unwrap().values();
    let shown = ["config", "cleanup", "v", "interfaces", "iptables-sync-period", "profiling", "master"];
    let shown = shown.map(|name| values[name].as_str());
    assert_eq!(shown, ["/etc/a", "false", "4", "eth0,eth1", "30s", "false", ""]);
}

#[test]
fn the_gates_of_all_alpha_and_beta_features_apply_to_gates_that_are_not_given() {
    let gates = |text: &str| load(&format!("{HEAD}featureGates: {text}\n"), &[]).feature_gates;
    let on = |gates: &FeatureGates| FeatureGate::ALL.map(|gate| u8::from(gates.is_on(gate)));
    assert_eq!(on(&gates("{}")), [0, 0, 1, 1, 1, 1, 0, 0]);
    assert_eq!(on(&gates("{AllAlpha: true}")), [1, 0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(on(&gates("{AllBeta: false, ComponentFlagz: true}")), [0, 0, 1, 1, 0, 1, 0, 0]);
    assert_eq!(on(&gates("{AllAlpha: true, LoggingAlphaOptions: false}")), [1, 0, 1, 1, 1, 1, 0, 1]);
}

#[test]
fn ipvs_reads_its_own_section_and_masquerade_from_iptables() {
    let file = format!(
        "{HEAD}mode: ipvs\niptables: {{masqueradeAll: true, masqueradeBit: 9}}\nipvs: {{syncPeriod: 7s, minSyncPeriod: 1s, \
         scheduler: lc, excludeCIDRs: [192.0.2.0/24], strictARP: true, tcpTimeout: 15m, udpTimeout: 1500ms}}\n"
    );
    let config = load(&file, &[]);
    assert_eq!((config.mode, config.sync_period), (Mode::Ipvs, Duration::from_secs(7)));
    assert_eq!((config.min_sync_period, config.model.masquerade_all), (Duration::from_secs(1), true));
    let ipvs = config.ipvs;
    assert_eq!((&*ipvs.scheduler, ipvs.strict_arp, config.masquerade_mark), ("lc", true, 1 << 9));
    assert_eq!(ipvs.exclude_cidrs, ["192.0.2.0/24".parse().unwrap()]);
    assert_eq!((ipvs.timeouts.tcp, ipvs.timeouts.tcp_fin, ipvs.timeouts.udp), (900, 0, 1));
    assert_eq!(load(&file, &["--mode", "ebpf"]).mode, Mode::Ebpf);
}

#[test]
fn a_scheduler_or_timeout_that_no_kernel_accepts_is_rejected() {
    let file = format!("{HEAD}mode: ipvs\nipvs: {{scheduler: 'no such', tcpTimeout: 9999h}}\n");
    let said = invalid(Some(&file), &[]);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("must be the name of a scheduler") && said[1].contains("2147483s"), "{said:?}");
}

#[test]
fn nftables_reads_its_own_section_and_serves_primary_addresses() {
    let sections =
        "iptables: {masqueradeAll: true, syncPeriod: 7s}\nnftables: {masqueradeBit: 9, syncPeriod: 8s}\n";
    let config = load(&format!("{HEAD}mode: nftables\n{sections}"), &[]);
    assert_eq!(config.mode, Mode::Nftables);
    assert_eq!(config.model.node_port_addresses, NodePortAddresses::Primary { cidrs: Vec::new() });
    assert_eq!((config.masquerade_mark, config.ebpf.masquerade_mark), (1 << 9, 1 << 14));
    assert_eq!((config.model.masquerade_all, config.sync_period), (false, Duration::from_secs(8)));
    let named: Vec<_> = config.ineffective.iter().map(|setting| setting.setting.as_str()).collect();
    assert_eq!(named, ["iptables.masqueradeAll", "iptables.syncPeriod"]);
    let by_flag = ["--proxy-mode=nftables", "--masquerade-all", "--iptables-sync-period=7s"];
    let by_flag = load_with(None, &by_flag, &environment()).unwrap();
    assert_eq!((by_flag.model.masquerade_all, by_flag.sync_period), (true, Duration::from_secs(7)));
    assert_eq!((by_flag.min_sync_period, by_flag.ineffective), (Duration::from_secs(1), vec![]));
    let asked_for = load(&format!("{HEAD}mode: nftables\nnodePortAddresses: [10.0.0.0/8]\n"), &[]);
    assert!(matches!(asked_for.model.node_port_addresses, NodePortAddresses::Cidrs(_)));
}

#[test]
fn the_mode_that_auto_chooses_has_its_own_defaults() {
    let flags = Flags::parse(["shunt", "--hostname-override=n"]).unwrap();
    let config = Config::from_parts(&flags, None, &environment(), Mode::Nftables).unwrap();
    assert_eq!((config.mode, config.mode_is_auto), (Mode::Nftables, true));
    assert_eq!(config.model.node_port_addresses, NodePortAddresses::Primary { cidrs: Vec::new() });
}

#[test]
fn defaults_of_listeners_follow_the_family_of_the_bind_address() {
    let config = load(&format!("{HEAD}bindAddress: '::'\nhealthzBindAddress: '::1'\n"), &[]);
    assert_eq!(config.healthz_bind_address, Some("[::1]:10256".parse().unwrap()));
    assert_eq!(config.metrics_bind_address, Some("[::1]:10249".parse().unwrap()));
}

#[test]
fn the_shunt_section_and_its_flags_are_read() {
    let file = format!(
        "{HEAD}shunt: {{manifests: /a, ebpf: {{pinDir: /p, cgroupRoot: /c, mapSizes: {{services: 64}}, interfaces: [eth*], excludeInterfaces: [eth1, eth2]}}}}\n"
    );
    let config =
        load(&file, &["--cgroup-root=/d", "--exclude-interfaces=docker0", "--exclude-interfaces=br-*, eth3"]);
    let served = ["eth0", "eth1", "eth3", "wg0", "docker0"].map(|name| config.model.interfaces.allow(name));
    assert_eq!(served, [true, true, false, false, false]);
    assert_eq!(config.source, ObjectSource::Manifests("/a".into()));
    assert_eq!(config.ebpf.cgroup_root, PathBuf::from("/d"));
    assert_eq!(config.ebpf.pin_dir, PathBuf::from("/p"));
    assert_eq!(config.ebpf.map_sizes, MapSizes { services: 64, dsr_returns: 1, ..MapSizes::default() });
}

#[test]
fn the_node_name_comes_from_the_environment_before_the_host_name() {
    let environment = Environment { node_name: Some(" Worker-7 ".into()), ..environment() };
    assert_eq!(&*load_with(None, &[], &environment).unwrap().model.node_name, "worker-7");
}

#[test]
fn all_invalid_settings_are_reported_at_once() {
    let file = "
apiVersion: kubeproxy.config.k8s.io/v1beta1
mode: epbf
bindAddress: host
healthzBindAddress: 1.2.3.4:99999
iptables: {masqueradeBit: 32, syncPeriod: 30, minSyncPeriod: -1s, masqueradeAll: 'yes'}
clusterCIDR: 10.0.0.0/8,11.0.0.0/8
nodePortAddresses: [10.0.0.1, primary]
detectLocalMode: BridgeInterface
conntrack: 7
oomScoreAdj: -1001
shunt: {ebpf: {mapSizes: {services: 0}}}
";
    let got =
        invalid(Some(file), &["--metrics-bind-address=localhost:1", "--cgroup-root=relative"]).join("\n");
    insta::assert_snapshot!("every_problem_at_once", got);
}

#[test]
fn every_flag_sets_a_field_and_is_in_the_help() {
    // Flags::parse builds the command, whose own checks run in debug builds.
    let help = Flags::parse(["shunt", "--help"]).unwrap_err().to_string();
    for flag in flags::FLAGS {
        assert!(flag.path().is_none_or(|path| schema::field(path).is_some()), "--{}", flag.name);
        assert!(help.contains(&format!("--{}", flag.name)), "--{} is missing in --help", flag.name);
        assert!(!flags::help(flag).is_empty(), "--{} says nothing", flag.name);
    }
    let (before, once) = help.split_once("Do one thing and exit:").expect("a group");
    for flag in ["--cleanup", "--cleanup-own", "--init-only", "--write-config-to", "--version", "--help"] {
        assert!(once.contains(flag) && !before.contains(&format!("{flag} ")), "{flag}");
    }
}
