//! docs/flags.md holds every flag and every field, as the code has them.

use std::{fmt::Write as _, fs, path::Path};

use super::*;
use crate::config::{
    flags::{FLAGS, Flag, help},
    schema::Effect,
};

/// Every flag of kube-proxy 1.36 on Linux (`cmd/kube-proxy/app/options.go`, `component-base/logs/api/v1/options.go`, and what cobra
/// and `component-base/version/verflag` add).
const UPSTREAM: &str = "
    bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period conntrack-max-per-core
    conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait conntrack-tcp-timeout-established
    conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode feature-gates healthz-bind-address healthz-port help
    hostname-override init-only iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period
    iptables-sync-period ipvs-exclude-cidrs ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period
    ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig
    log-flush-frequency log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream
    logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port nodeport-addresses oom-score-adj
    pod-bridge-interface pod-interface-name-prefix profiling proxy-mode show-hidden-metrics-for-version v version vmodule
    write-config-to";

/// Those that make the program do one thing, which set nothing.
const ONCE: &[(&str, &str)] = &[
    ("--cleanup", "Removes everything that this program or kube-proxy ever put into the kernel, and exits"),
    (
        "--init-only",
        "Sets the sysctls of conntrack and of the ipvs mode, which a process with few privileges cannot do later, and exits",
    ),
    ("--write-config-to", "Writes the configuration in effect to this file, and exits"),
    ("--version", "Prints the version, and exits"),
    ("--help", "Prints all flags, by what they are for, and exits"),
];

fn document() -> String {
    let mut text = String::from("| flag | sets | beside `--config` | what it is for |\n|---|---|---|---|\n");
    let mut row = |flag: &str, sets: &str, beside: &str, what: &str| {
        let _infallible = writeln!(text, "| `{flag}` | {sets} | {beside} | {} |", what.replace('|', "\\|"));
    };
    row("--config", "", "", "The configuration file; its changes are followed");
    for flag in FLAGS {
        let sets = flag.path().map(|path| format!("`{path}`")).unwrap_or_default();
        let names =
            if flag.name == "mode" { "--mode`, `--proxy-mode".into() } else { format!("--{}", flag.name) };
        row(&names, &sets, if flag.counts_beside_file { "counts" } else { "" }, &effect(flag));
    }
    for (flag, what) in ONCE {
        row(flag, "", "counts", what);
    }
    text.push_str("\n## Fields\n\n| field | what it holds | default | read by |\n|---|---|---|---|\n");
    for field in schema::fields() {
        let read_by = match field.effect {
            Effect::Everywhere if field.path.starts_with("shunt.ebpf.") => "ebpf".into(),
            Effect::Everywhere => "all modes".into(),
            Effect::In(modes) => modes.join(", "),
            Effect::Nowhere(why) => format!("nothing: {why}"),
        };
        let (path, holds) = (field.path, field.kind.allowed());
        let _infallible = writeln!(text, "| `{path}` | {holds} | {} | {read_by} |", field.default);
    }
    text
}

fn effect(flag: &Flag) -> String {
    let vain = flag.path().and_then(schema::field).is_some_and(|field| !field.is_read());
    if vain || matches!(flag.sets, flags::Sets::Nothing(_)) {
        format!("No effect: {}", help(flag))
    } else {
        help(flag)
    }
}

/// With `SHUNT_WRITE_DOCS` in the environment it is written anew instead.
#[test]
fn the_page_of_flags_and_fields_is_what_the_code_has() {
    const BEGIN: &str = "## Flags\n\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/flags.md");
    let page = fs::read_to_string(&path).expect("docs/flags.md");
    let (head, table) = page.split_once(BEGIN).expect("a section Flags");
    if std::env::var_os("SHUNT_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{}", document())).unwrap();
    } else {
        assert!(
            table == document(),
            "docs/flags.md is not what the code has; write it with SHUNT_WRITE_DOCS=1"
        );
    }
}

#[test]
fn every_flag_of_kube_proxy_is_accepted_and_stands_in_the_table() {
    let table = document();
    let help = Flags::parse(["shunt", "--help"]).unwrap_err().to_string();
    for flag in UPSTREAM.split_whitespace() {
        assert!(table.contains(&format!("`--{flag}`")), "--{flag} is not in the table");
        assert!(help.contains(&format!("--{flag}")), "--{flag} is not known");
    }
}
