//! Flags, hosts and files that are rejected, and the errors of each.

use super::*;

/// Invalid flags with their messages.
const BAD_FLAGS: &[(&str, &str)] = &[
    ("--mode=fast", r#"--mode: "fast": must be one of auto, ebpf, nftables, iptables, ipvs"#),
    (
        "--detect-local-mode=Pod",
        r#"--detect-local-mode: "Pod": must be one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix"#,
    ),
    (
        "--cluster-cidr=10.0.0.0/33",
        r#"--cluster-cidr: "10.0.0.0/33": must be one CIDR, or one of each family, such as 10.244.0.0/16,fd44::/16"#,
    ),
    (
        "--nodeport-addresses=eth0",
        r#"--nodeport-addresses: "eth0": must be a list of CIDRs such as 192.168.0.0/16 and of the words primary, localhost and all"#,
    ),
    (
        "--healthz-bind-address=:10256",
        r#"--healthz-bind-address: ":10256": must be IP:port with a port from 1 to 65535, or an IP alone for port 10256"#,
    ),
    (
        "--iptables-sync-period=30",
        r#"--iptables-sync-period: "30": must be a duration above zero, such as 30s or 1m30s"#,
    ),
    (
        "--iptables-min-sync-period=1m",
        r#"--iptables-min-sync-period: "1m": must not be longer than iptables.syncPeriod, which is 30s"#,
    ),
    (
        "--proxy-mode=userspace",
        r#"--proxy-mode: "userspace": must be one of auto, ebpf, nftables, iptables, ipvs"#,
    ),
    (
        "--feature-gates=AllAlpha=yes",
        r#"--feature-gates: "AllAlpha=yes": must be names of feature gates with true or false, such as AllowServiceExternalIPs=false"#,
    ),
    (
        "--vmodule=foo",
        r#"--vmodule: "foo": must be a list of PATTERN=VERBOSITY, such as conntrack=4,proxy*=2"#,
    ),
    ("--conntrack-udp-timeout=9999999h", r#"--conntrack-udp-timeout: "9999999h": must be at most 2555555h"#),
    (
        "--master=https://192.168.0.1:6443,",
        r#"--master: "https://192.168.0.1:6443,": must be a URL such as https://192.168.0.1:6443, a host with or without a port, or several with commas between them"#,
    ),
    ("--hostname-override= ", r#"--hostname-override: " ": must be the name of a Node"#),
    ("--log-format=xml", r#"--log-format: "xml": must be one of text, json"#),
    (
        "--log-filter=shunt=loud",
        r#"--log-filter: "shunt=loud": must be a level (error, warn, info, debug, trace, off) or targets with levels, such as info,proxy_userspace=debug"#,
    ),
    (
        "--log-filter=inof",
        r#"--log-filter: "inof": must be a level (error, warn, info, debug, trace, off) or targets with levels, such as info,proxy_userspace=debug"#,
    ),
    (
        "--log-filter=info,",
        r#"--log-filter: "info,": must be a level (error, warn, info, debug, trace, off) or targets with levels, such as info,proxy_userspace=debug"#,
    ),
    ("-v=high", r#"--v: "high": must be a whole number from 0 to 2147483647"#),
    (
        "--interfaces=eth0,",
        r#"--interfaces: "eth0,": must be a list of interface names or globs, such as eth0 or cali*"#,
    ),
    (
        "--exclude-interfaces=eth[0",
        r#"--exclude-interfaces: "eth[0": must be a list of interface names or globs, such as eth0 or cali*"#,
    ),
    ("--bpf-pin-dir=here", r#"--bpf-pin-dir: "here": must be an absolute path"#),
];

#[test]
fn flags_are_reported_by_their_own_name() {
    for (flag, message) in BAD_FLAGS {
        assert_eq!(invalid(None, &[flag]), [*message]);
    }
}

#[test]
fn a_missing_host_name_or_cgroup_names_the_setting() {
    let Err(ConfigError::Invalid { invalid: settings, .. }) =
        load_with(None, &["--mode=ebpf"], &Environment::default())
    else {
        panic!("neither a host name nor a cgroup2 mount, and still a configuration");
    };
    let named: Vec<_> =
        settings.iter().map(|setting| (setting.setting.as_str(), setting.value.as_str())).collect();
    assert_eq!(named, [("hostnameOverride", "not set"), ("shunt.ebpf.cgroupRoot", "not set")]);
}

#[test]
fn files_that_are_no_configuration_are_rejected() {
    assert_eq!(
        invalid(Some("[]"), &[]),
        ["--config: not a mapping: must be one KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1"]
    );
    let read = |path: &str| {
        let flags = Flags::parse(["shunt", "--config", path]).unwrap();
        Config::load(&flags, &environment()).unwrap_err().to_string()
    };
    assert_eq!(
        read("/nonexistent/config"),
        "cannot read the configuration file /nonexistent/config (--config)"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a: [").unwrap();
    assert!(read(file.path().to_str().unwrap()).ends_with("as YAML or JSON"));
    std::fs::write(file.path(), format!("{HEAD}---\n{HEAD}")).unwrap();
    assert!(read(file.path().to_str().unwrap()).contains("has several YAML documents"));
    for text in [format!("\u{feff}{HEAD}"), format!("{HEAD}---\n")] {
        std::fs::write(file.path(), &text).unwrap();
        let flags = Flags::parse(["shunt", "--config", file.path().to_str().unwrap()]).unwrap();
        Config::load(&flags, &environment()).expect("a byte order mark or an empty document means nothing");
    }
}

/// Upstream validates the sections `ipvs` and `nftables` only in that mode.
#[test]
fn values_of_other_modes_are_not_checked() {
    const FIELDS: &str = "ipvs: {excludeCIDRs: [x], tcpTimeout: -1s, udpTimeout: 999999h, scheduler: w-r}\n\
                          nftables: {masqueradeBit: 99, syncPeriod: -1s}\n";
    let of_mode = |mode: &str| format!("{HEAD}mode: {mode}\n{FIELDS}");
    let named: Vec<_> =
        load(&of_mode("iptables"), &[]).ineffective.into_iter().map(|one| one.setting).collect();
    for path in ["ipvs.excludeCIDRs", "ipvs.tcpTimeout", "nftables.masqueradeBit", "nftables.syncPeriod"] {
        assert!(named.iter().any(|name| name == path), "{path}: {named:?}");
    }
    assert_eq!(invalid(Some(&of_mode("ipvs")), &[]).len(), 4);
    assert_eq!(invalid(Some(&of_mode("nftables")), &[]).len(), 2);
    assert_eq!(invalid(Some(&of_mode("auto")), &[]).len(), 2, "auto may choose nftables");
    load(&of_mode("iptables"), &["--ipvs-udp-timeout=-1s", "--ipvs-exclude-cidrs=x"]);
    let undecodable =
        format!("{HEAD}mode: iptables\nipvs: {{excludeCIDRs: x, strictARP: 1, tcpTimeout: often}}\n");
    assert_eq!(invalid(Some(&undecodable), &[]).len(), 3);
}
