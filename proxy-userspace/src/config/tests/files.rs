//! Whole files: those of distributions, one with every field, and forty invalid ones.

use std::{fs, num::NonZeroU16, path::Path};

use super::*;
use crate::config::schema;

const K3S: &str = include_str!("good/k3s.yaml");
const EVERY_FIELD: &str = include_str!("good/every-field.yaml");

fn names(config: &Config) -> Vec<&str> {
    config.ineffective.iter().map(|setting| setting.setting.as_str()).collect()
}

#[test]
fn k3s_file_is_accepted_and_keeps_the_kernels_conntrack() {
    let config = load(K3S, &["--config=unread", "--hostname-override=server-0"]);
    assert_eq!(names(&config), Vec::<&str>::new());
    assert_eq!((config.mode, config.sync_period), (Mode::Iptables, Duration::from_secs(30)));
    assert_eq!(
        (config.node.conntrack.max_per_core, config.node.conntrack.tcp_established_timeout),
        (0, Duration::ZERO)
    );
    assert_eq!(config.healthz_bind_address, Some("127.0.0.1:10256".parse().unwrap()));
}

#[test]
fn k3s_flags_are_accepted() {
    let flags = [
        "--cluster-cidr=10.42.0.0/16,2001:cafe:42::/56",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-close-wait=0s",
        "--conntrack-tcp-timeout-established=0s",
        "--healthz-bind-address=127.0.0.1",
        "--hostname-override=server-0",
        "--kubeconfig=/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig",
        "--proxy-mode=iptables",
    ];
    let config = load_with(None, &flags, &environment()).unwrap();
    assert_eq!(names(&config), Vec::<&str>::new());
    assert_eq!(config.node.conntrack.tcp_close_wait_timeout, Duration::ZERO);
}

#[test]
fn fields_without_an_effect_are_reported_once() {
    let yaml: serde_yaml_ng::Value = serde_yaml_ng::from_str(EVERY_FIELD).unwrap();
    for field in schema::fields() {
        let value = field.path.split('.').try_fold(&yaml, |yaml, name| yaml.get(name));
        // Manifests and an API server exclude each other.
        assert!(value.is_some() || field.path == "shunt.master", "{} is not set", field.path);
    }
    let config = load(EVERY_FIELD, &["--config=unread"]);
    insta::assert_snapshot!(
        config.ineffective.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    );
}

#[test]
fn booleans_of_yaml_1_1_are_booleans_unless_they_are_quoted() {
    let file =
        format!("{HEAD}enableProfiling: on\niptables: {{masqueradeAll: yes, localhostNodePorts: no}}\n");
    let config = load(&file, &[]);
    assert!(config.model.masquerade_all && !config.localhost_node_ports && config.profiling);
}

#[test]
fn unknown_fields_are_reported_and_ignored() {
    let config = load(&format!("{HEAD}iptables: {{speed: 3}}\nudpIdleTimeout: 250ms\nmode: ebpf\n"), &[]);
    assert_eq!(names(&config), ["iptables.speed", "udpIdleTimeout"]);
    assert!(config.ineffective[0].why.starts_with("unknown field, ignored; known here: localhostNodePorts"));
}

#[test]
fn an_invalid_file_is_rejected_with_field_value_and_rule() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config/tests/bad");
    let mut files: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert!(files.len() >= 40, "{} files", files.len());
    for path in files {
        let flags = Flags::parse(["shunt".as_ref(), "--config".as_ref(), path.as_os_str()]).unwrap();
        let error = Config::load(&flags, &environment()).expect_err(&path.display().to_string());
        let said = crate::causes::with_causes(&error).replace(&*directory.to_string_lossy(), "DIR");
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path(&directory);
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!(name, said));
    }
}

#[test]
fn the_port_of_the_tunnel_is_set_only_in_the_ebpf_mode_with_dsr() {
    let port = |mode: &str, settings: &str| {
        let config = load(&format!("{HEAD}mode: {mode}\nshunt: {{dsr: {settings}}}\n"), &[]);
        (config.model.dsr_port.map(NonZeroU16::get), config.ineffective.len())
    };
    assert_eq!(port("ebpf", "{}"), (None, 0));
    assert_eq!(port("ebpf", "{port: 4791}"), (None, 0));
    assert_eq!(port("ebpf", "{enabled: true}"), (Some(4790), 0));
    assert_eq!(port("auto", "{enabled: true, port: 4791}"), (Some(4791), 0));
    assert_eq!(port("nftables", "{enabled: true, port: 4791}"), (None, 2));
    let by_flags = load_with(None, &["--dsr-enabled", "--dsr-port=4792"], &environment()).unwrap();
    assert_eq!(by_flags.model.dsr_port.map(NonZeroU16::get), Some(4792));
}

#[test]
fn the_map_of_returns_has_room_only_where_packets_go_back_through_the_tunnel() {
    let room = |dsr: &str| {
        let sizes = "ebpf: {mapSizes: {dsrReturns: 4096}}";
        let config = load(&format!("{HEAD}mode: ebpf\nshunt: {{dsr: {dsr}, {sizes}}}\n"), &[]);
        (config.model.dsr_returns, config.ebpf.map_sizes.dsr_returns)
    };
    assert_eq!(room("{enabled: true}"), (false, 1));
    assert_eq!(room("{return: tunnel}"), (true, 1));
    assert_eq!(room("{enabled: true, return: tunnel}"), (true, 4096));
    let by_flags = load_with(None, &["--dsr-enabled", "--dsr-return=tunnel"], &environment()).unwrap();
    assert_eq!((by_flags.model.dsr_returns, by_flags.ebpf.map_sizes.dsr_returns), (true, 65_536));
}
