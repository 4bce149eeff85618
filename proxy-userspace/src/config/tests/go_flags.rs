//! Command lines in the syntax of Go's flags, which a `DaemonSet` may rely on.

use std::collections::BTreeSet;

use clap::error::ErrorKind;

use super::invalid;
use crate::config::{
    Flags,
    flags::FLAGS,
    go, schema,
    settings::Settings,
    value::{Kind, Value},
};

const TRUE: [&str; 6] = ["1", "t", "T", "true", "TRUE", "True"];
const FALSE: [&str; 6] = ["0", "f", "F", "false", "FALSE", "False"];

/// Returns the boolean flags that set a field, with the field's path.
fn switches() -> Vec<(&'static str, &'static str)> {
    let is_switch = |path: &&str| schema::field(path).is_some_and(|field| matches!(field.kind, Kind::Bool));
    FLAGS.iter().filter_map(|flag| Some((flag.name, flag.path().filter(is_switch)?))).collect()
}

fn given(arguments: &[&str], path: &str) -> Option<Value> {
    let flags = Flags::parse([&["shunt"], arguments].concat());
    let flags = flags.unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
    let mut settings = Settings::default();
    flags.add_to(&mut settings);
    settings.given(path).cloned()
}

#[test]
fn boolean_flags_accept_all_boolean_words_of_go() {
    let names: BTreeSet<&str> = switches().iter().map(|(name, _)| *name).collect();
    for name in [
        "bind-address-hard-fail",
        "conntrack-tcp-be-liberal",
        "ipvs-strict-arp",
        "iptables-localhost-nodeports",
        "log-json-split-stream",
        "log-text-split-stream",
        "masquerade-all",
        "profiling",
    ] {
        assert!(names.contains(name), "--{name} is missing");
    }
    for (name, path) in switches() {
        for (words, meant) in [(TRUE, true), (FALSE, false)] {
            for word in words {
                assert_eq!(go::bool(word), Some(meant));
                assert_eq!(
                    given(&[&format!("--{name}={word}")], path),
                    Some(Value::Bool(meant)),
                    "{name} {word}"
                );
                let underscored = format!("--{}={word}", name.replace('-', "_"));
                assert_eq!(given(&[&underscored], path), Some(Value::Bool(meant)), "{underscored}");
            }
        }
        assert_eq!(given(&[&format!("--{name}")], path), Some(Value::Bool(true)), "{name} alone");
        let wrong = invalid(None, &[&format!("--{name}=yes")]);
        assert!(wrong[0].contains(&format!("--{name}: \"yes\"")), "{wrong:?}");
    }
}

#[test]
fn init_only_and_cleanup_accept_all_boolean_words_of_go() {
    for (word, meant) in TRUE.map(|word| (word, true)).into_iter().chain(FALSE.map(|word| (word, false))) {
        for name in ["init-only", "init_only"] {
            let flags = Flags::parse(["shunt", &format!("--{name}={word}")]).expect("it is accepted");
            assert_eq!((flags.init_only, flags.cleanup), (meant, false), "--{name}={word}");
        }
        let flags = Flags::parse(["shunt", &format!("--cleanup={word}")]).expect("it is accepted");
        assert_eq!((flags.init_only, flags.cleanup), (false, meant), "--cleanup={word}");
    }
    let wrong = Flags::parse(["shunt", "--cleanup=yes"]).expect_err("Go does not accept it").to_string();
    assert!(wrong.contains("'yes'") && wrong.contains("--cleanup"), "{wrong}");
}

#[test]
fn each_subcommand_has_a_help() {
    for subcommand in crate::config::flags::command().get_subcommands() {
        for help in ["--help", "-h"] {
            let printed = Flags::parse(["shunt", subcommand.get_name(), help]).expect_err("it is no error");
            assert_eq!(printed.kind(), ErrorKind::DisplayHelp, "{}", subcommand.get_name());
        }
    }
}

#[test]
fn version_and_help_accept_a_value() {
    for (name, kind) in [("version", ErrorKind::DisplayVersion), ("help", ErrorKind::DisplayHelp)] {
        for word in TRUE {
            let shown = Flags::parse(["shunt", &format!("--{name}={word}")]).expect_err("it is shown");
            assert_eq!(shown.kind(), kind, "--{name}={word}");
        }
        for word in FALSE {
            Flags::parse(["shunt", &format!("--{name}={word}"), "--v=2"]).expect("it means nothing");
        }
        let wrong = Flags::parse(["shunt", &format!("--{name}=maybe")]).expect_err("Go does not accept it");
        assert!(wrong.to_string().contains("maybe") && wrong.exit_code() != 0, "{wrong}");
    }
    let raw = Flags::parse(["shunt", "--version=raw"]).expect_err("it is shown");
    assert_eq!(raw.kind(), ErrorKind::DisplayVersion);
}

#[test]
fn whole_numbers_accept_a_base_and_underscores() {
    let numbers = [
        ("31", 31),
        ("+31", 31),
        ("-7", -7),
        ("0x1F", 31),
        ("0X1f", 31),
        ("0o37", 31),
        ("037", 31),
        ("0b1_1111", 31),
        ("0x_1f", 31),
        ("131_072", 131_072),
        ("0", 0),
        ("-0x7", -7),
    ];
    for (text, number) in numbers {
        assert_eq!(go::integer(text), Some(number), "{text}");
    }
    for wrong in
        ["", "-", "0x", "1__0", "_1", "1_", "08", "0b2", "0x+1", "--1", "1e3", " 1", "9223372036854775808"]
    {
        assert_eq!(go::integer(wrong), None, "{wrong}");
    }
    let cores = given(&["--conntrack-max-per-core=0x8000"], "conntrack.maxPerCore");
    assert_eq!(cores, Some(Value::Integer(32_768)));
    let port = given(&["--healthz-bind-address=10.0.0.1", "--healthz-port=0x2800"], "healthzBindAddress");
    assert!(matches!(port, Some(Value::BindAddress(address)) if address.port() == 0x2800), "{port:?}");
}

#[test]
fn flags_that_kube_proxy_deprecates_are_named_with_their_replacement() {
    let deprecated = |arguments: &[&str]| {
        let settings = super::load_with(None, arguments, &super::environment()).expect("valid").deprecated;
        settings.into_iter().map(|flag| (flag.setting, flag.instead)).collect::<Vec<_>>()
    };
    assert_eq!(deprecated(&["--healthz-bind-address=0.0.0.0:1"]), []);
    let expected =
        ["healthz", "metrics"].map(|server| (format!("--{server}-port"), format!("--{server}-bind-address")));
    assert_eq!(deprecated(&["--metrics-port=0", "--healthz_port=10256"]), expected);
}

#[test]
fn one_dash_takes_one_letter() {
    for verbosity in [["-v=4"].as_slice(), &["-v4"], &["-v", "4"], &["--v=4"], &["--v", "4"]] {
        assert_eq!(given(verbosity, "logging.verbosity"), Some(Value::Integer(4)), "{verbosity:?}");
    }
    let wrong = Flags::parse(["shunt", "-profiling=true"]).expect_err("pflag rejects it too");
    assert!(wrong.to_string().contains("-p"), "{wrong}");
}

#[test]
fn an_empty_word_means_nothing_unless_it_is_a_value() {
    let parse = |words: &[&str]| Flags::parse([&["shunt"], words].concat()).expect("valid").values();
    assert_eq!(parse(&["--mode=nftables", "", "--v", "4", ""]), parse(&["--mode=nftables", "-v", "4"]));
    assert_eq!(parse(&["", "--cleanup", ""])["cleanup"], "true");
    assert_eq!(parse(&["--cluster-cidr", "", "--mode", "ipvs"])["mode"], "ipvs");
    assert_eq!(parse(&["--proxy_mode", "", "-v", "2"])["v"], "2");
    assert_eq!(Flags::parse(["shunt", "--config=", "--write-config-to", ""]).expect("no files").config, None);
    Flags::parse(["shunt", "", "nonsense"]).expect_err("no subcommand");
    Flags::parse(["shunt", "get", ""]).expect_err("no resource");
}

#[test]
fn flags_of_which_one_would_be_ignored_are_refused() {
    for (words, message) in [
        (&["--cleanup", "--cleanup-own"][..], "--cleanup and --cleanup-own exclude each other"),
        (&["--cleanup-own", "--init-only"], "--cleanup-own and --init-only exclude each other"),
        (&["--write-config-to", "x", "--cleanup"], "--cleanup and --write-config-to exclude each other"),
        (&["--cleanup", "get", "services"], "--cleanup has no meaning before the subcommand get"),
        (&["--bpf-pin-dir=/x", "doctor"], "--bpf-pin-dir has no meaning before the subcommand doctor"),
    ] {
        let error = Flags::parse([&["shunt"], words].concat()).expect_err("refused");
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(message), "{words:?}: {error}");
    }
    for words in [&["--cleanup", "--cleanup-own=false"][..], &["get", "services", "--bpf-pin-dir", "/x"]] {
        Flags::parse([&["shunt"], words].concat()).expect("nothing is ignored");
    }
}
