//! The command line: exit codes, standard output and standard error.

use std::process::{Command, Output};

#[expect(clippy::disallowed_methods, reason = "the command itself is under test, and exits at once")]
fn shunt(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shunt")).args(arguments).output().expect("the command runs")
}

/// Runs the command in a shell, which sets up its standard output and standard error.
#[expect(clippy::disallowed_methods, reason = "the command itself is under test, and exits at once")]
fn in_shell(arguments: &str) -> Output {
    let line = format!("exec {} {arguments}", env!("CARGO_BIN_EXE_shunt"));
    Command::new("/bin/sh").args(["-c", &line]).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn all_invalid_settings_are_printed() {
    let output = shunt(&["--mode=userspace", "--hostname-override=n", "--cgroup-root=/", "--log-format=xml"]);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stderr);
    assert_eq!(
        printed,
        "shunt: invalid configuration:\n  --mode: \"userspace\": must be one of auto, ebpf, nftables, iptables, ipvs\n  \
         --log-format: \"xml\": must be one of text, json\n"
    );
}

#[test]
fn an_unreadable_file_is_named_with_the_reason() {
    let output = shunt(&["--config=/nonexistent"]);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stderr);
    assert!(printed.contains("/nonexistent") && printed.contains("No such file"), "{printed}");
}

#[test]
fn unknown_flags_fail_and_version_and_help_are_printed() {
    assert_eq!(shunt(&["--no-such-flag"]).status.code(), Some(2));
    let version = shunt(&["--version"]);
    assert_eq!(
        (version.status.code(), text(&version.stdout)),
        (Some(0), format!("shunt {}\n", env!("CARGO_PKG_VERSION")))
    );
    assert!(text(&shunt(&["--help"]).stdout).contains("--manifests <DIR>"));
}

#[test]
fn probe_reports_every_mode() {
    let table = shunt(&["probe"]);
    assert_eq!(table.status.code(), Some(0), "{}", text(&table.stderr));
    let printed = text(&table.stdout);
    for word in ["programs on sockets", "ebpf", "nftables", "iptables", "ipvs", "auto: ebpf"] {
        assert!(printed.contains(word), "{word}: {printed}");
    }
    let json = text(&shunt(&["probe", "--output", "json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("one JSON document");
    assert_eq!(json["auto"], "ebpf");
    assert_eq!(json["modes"][3]["mode"], "ipvs");
    assert!(json["features"]["bpffs"]["present"].is_string(), "{json}");
    assert_eq!(shunt(&["probe", "--output=xml"]).status.code(), Some(2));
}

#[test]
fn a_written_configuration_is_the_same_when_it_is_read() {
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

#[test]
fn nothing_panics_if_an_output_is_full_or_closed() {
    for (arguments, code) in [
        ("probe >/dev/full", 1),
        ("probe -o json >/dev/full", 1),
        ("probe >/dev/full 2>&1", 1),
        ("--mode=none 2>/dev/full", 1),
        ("get services 2>/dev/full", 1),
        ("get links web 2>/dev/full", 2),
        ("top 2>/dev/full", 2),
        ("--mode=nftables --write-config-to=/nonexistent/file 2>/dev/full", 1),
        ("--mode=nftables --write-config-to=/nonexistent/file --log-filter=off 2>/dev/full", 1),
    ] {
        assert_eq!(in_shell(arguments).status.code(), Some(code), "{arguments}");
    }
}

#[test]
fn a_fatal_error_is_printed_whatever_the_log_filter_leaves_out() {
    for filter in ["off", "kube=info", "info"] {
        let output = in_shell(&format!("--write-config-to=/nonexistent/file --log-filter={filter}"));
        let printed = text(&output.stderr);
        assert_eq!(printed.matches("cannot write the configuration").count(), 1, "{filter}: {printed}");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the command itself is under test, and exits at once")]
fn a_cleanup_without_capabilities_removes_nothing_and_says_why_once() {
    for flag in ["--cleanup", "--cleanup-own"] {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", env!("CARGO_BIN_EXE_shunt"), flag]);
        let output = command.output().expect("the command runs");
        let printed = text(&output.stderr);
        assert_eq!((output.status.code(), printed.lines().count()), (Some(1), 1), "{printed}");
        assert!(printed.contains("nothing was removed: every mode needs root"), "{printed}");
    }
}
