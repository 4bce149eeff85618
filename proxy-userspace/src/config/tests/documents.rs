//! Generates the tables of flags and fields in docs/flags.md, and checks that they are current.

use std::{fmt::Write as _, fs, path::Path};

use super::*;
use crate::config::{
    flags::{FLAGS, Flag, Target, command, help},
    gates,
    schema::{self, UsedBy},
};

/// Every flag of kube-proxy 1.36 on Linux (`cmd/kube-proxy/app/options.go`,
/// `component-base/logs/api/v1/options.go`, and those of cobra and
/// `component-base/version/verflag`).
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

/// Flags that make shunt do one thing and exit. They set nothing.
const ONCE: &[(&str, &str)] = &[
    ("--cleanup", "Remove everything that shunt or kube-proxy wrote into the kernel, and exit"),
    (
        "--cleanup-own",
        "Wait until another proxy serves this node, hand connections over to it, remove only what is shunt's, and exit: \
         [migration](migration.md#going-back)",
    ),
    (
        "--init-only",
        "Set the sysctls of conntrack and of the ipvs mode, and exit; run it as root before a shunt that has fewer privileges",
    ),
    ("--write-config-to", "Write the configuration in effect to this file, and exit"),
    ("--version", "Print the version, and exit"),
    ("--help", "Print all flags, by group, and exit"),
];

fn document() -> String {
    let mut text = String::from("| flag | field | beside `--config` | description |\n|---|---|---|---|\n");
    let mut row = |flag: &str, field: &str, beside: &str, what: &str| {
        let _infallible = writeln!(text, "| `{flag}` | {field} | {beside} | {} |", what.replace('|', "\\|"));
    };
    row("--config", "", "", "The configuration file; shunt watches it for changes");
    for flag in FLAGS {
        let field = flag.path().map(|path| format!("`{path}`")).unwrap_or_default();
        let names =
            if flag.name == "mode" { "--mode`, `--proxy-mode".into() } else { format!("--{}", flag.name) };
        row(&names, &field, if flag.overrides_file { "overrides" } else { "" }, &description(flag));
    }
    for (flag, what) in ONCE {
        row(flag, "", "applies", what);
    }
    text.push_str(&subcommands());
    text.push_str(&feature_gates());
    text.push_str("\n## Fields\n\n| field | value | default | used by |\n|---|---|---|---|\n");
    for field in schema::fields() {
        let used_by = match field.used_by {
            UsedBy::AllModes if field.path.starts_with("shunt.ebpf.") => "ebpf".into(),
            UsedBy::AllModes => "all modes".into(),
            UsedBy::Modes(modes) => modes.iter().map(|mode| mode.name()).collect::<Vec<_>>().join(", "),
            UsedBy::Nothing(why) => format!("nothing: {why}"),
        };
        let (path, value) = (field.path, field.kind.allowed());
        let _infallible = writeln!(text, "| `{path}` | {value} | {} | {used_by} |", field.default);
    }
    text
}

fn subcommands() -> String {
    let mut text =
        String::from("\n## Subcommands\n\n| subcommand | argument | description |\n|---|---|---|\n");
    for subcommand in command().get_subcommands() {
        let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
        let _infallible = writeln!(text, "| `shunt {}` | | {about} |", subcommand.get_name());
        for argument in subcommand.get_arguments() {
            let value = argument.get_value_names().and_then(<[_]>::first).map(ToString::to_string);
            let name = match (argument.get_long(), value) {
                (Some(long), Some(value)) => format!("--{long}` `{value}"),
                (Some(long), None) => format!("--{long}"),
                (None, value) => value.unwrap_or_default(),
            };
            let what = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let _infallible = writeln!(text, "| | `{name}` | {what} |");
        }
    }
    text
}

fn feature_gates() -> String {
    let mut text = String::from("\n## Feature gates\n\n| gate | default | what it does |\n|---|---|---|\n");
    for gate in FeatureGate::ALL {
        let (name, default, what) = (gate.name(), gate.default(), gate.description());
        let _infallible = writeln!(text, "| `{name}` | {default} | {what} |");
    }
    let others: Vec<_> = gates::known().filter(|name| !gates::used().contains(name)).collect();
    let _infallible = writeln!(
        text,
        "\nThe other gates of Kubernetes 1.36 and 1.37 are accepted, and change nothing. shunt names those that are given in \
         one log line at start. It refuses all others.\n\n<details><summary>The other gates</summary>\n\n{}\n\n</details>",
        others.join(", ")
    );
    text
}

fn description(flag: &Flag) -> String {
    let field = flag.path().and_then(schema::field);
    let has_effect = field
        .map_or(matches!(flag.sets, Target::PortOf(_)), |field| !matches!(field.used_by, UsedBy::Nothing(_)));
    if has_effect { help(flag) } else { format!("No effect: {}", help(flag)) }
}

/// Writes the page if `SHUNT_WRITE_DOCS` is in the environment.
#[test]
fn the_page_of_flags_and_fields_is_current() {
    const BEGIN: &str = "## Flags\n\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/flags.md");
    let page = fs::read_to_string(&path).expect("docs/flags.md");
    let (head, table) = page.split_once(BEGIN).expect("a section Flags");
    if std::env::var_os("SHUNT_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{}", document())).unwrap();
    } else {
        assert!(table == document(), "docs/flags.md is out of date; write it with SHUNT_WRITE_DOCS=1");
    }
}

#[test]
fn every_flag_of_kube_proxy_is_accepted_and_documented() {
    let table = document();
    let help = Flags::parse(["shunt", "--help"]).unwrap_err().to_string();
    for flag in UPSTREAM.split_whitespace() {
        assert!(table.contains(&format!("`--{flag}`")), "--{flag} is not in the table");
        assert!(help.contains(&format!("--{flag}")), "--{flag} is not known");
    }
}
