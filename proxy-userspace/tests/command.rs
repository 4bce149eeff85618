//! The command as a person or a script meets it: exit codes and what is said on standard error.

use std::process::{Command, Output};

#[expect(clippy::disallowed_methods, reason = "the command itself is under test, and ends at once")]
fn shunt(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shunt")).args(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_bad_configuration_ends_it_with_all_that_is_wrong() {
    let output = shunt(&["--mode=userspace", "--hostname-override=n", "--cgroup-root=/", "--log-format=xml"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert_eq!(
        said,
        "shunt: invalid configuration:\n  --mode: \"userspace\": must be one of auto, ebpf, nftables, iptables, ipvs\n  \
         --logging-format: \"xml\": must be one of text, json\n"
    );
}

#[test]
fn a_file_that_cannot_be_read_is_named_with_the_reason() {
    let output = shunt(&["--config=/nonexistent"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("/nonexistent") && said.contains("No such file"), "{said}");
}

#[test]
fn unknown_flags_end_it_and_version_and_help_are_answered() {
    assert_eq!(shunt(&["--no-such-flag"]).status.code(), Some(2));
    let version = shunt(&["--version"]);
    assert_eq!(
        (version.status.code(), text(&version.stdout)),
        (Some(0), format!("shunt {}\n", env!("CARGO_PKG_VERSION")))
    );
    assert!(text(&shunt(&["--help"]).stdout).contains("--manifests <DIR>"));
}

#[test]
fn probe_reports_every_mode_and_exits_by_what_auto_finds() {
    let table = shunt(&["probe"]);
    assert_eq!(table.status.code(), Some(0), "{}", text(&table.stderr));
    let said = text(&table.stdout);
    for word in ["programs on sockets", "ebpf", "nftables", "iptables", "ipvs", "auto: ebpf"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let json = text(&shunt(&["probe", "--output", "json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("one JSON document");
    assert_eq!(json["auto"], "ebpf");
    assert_eq!(json["modes"][3]["mode"], "ipvs");
    assert!(json["features"]["bpffs"]["present"].is_string(), "{json}");
    assert_eq!(shunt(&["probe", "--output=xml"]).status.code(), Some(2));
}

#[test]
fn the_configuration_in_effect_is_written_and_reading_it_changes_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let written = |from: &[&str], to: &str| {
        let output = shunt(&[from, &["--write-config-to", &path(to)]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        std::fs::read_to_string(path(to)).expect("written")
    };
    let flags =
        ["--hostname-override=n", "--conntrack-min=7", "--nodeport-addresses=10.0.0.0/8", "--mode=nftables"];
    let first = written(&flags, "first");
    for line in [
        "mode: nftables",
        "  min: 7",
        "- 10.0.0.0/8",
        "  tcpEstablishedTimeout: 24h0m0s",
        "oomScoreAdj: -999",
    ] {
        assert!(first.contains(line), "{line}: {first}");
    }
    assert_eq!(written(&["--config", &path("first")], "second"), first);
}
