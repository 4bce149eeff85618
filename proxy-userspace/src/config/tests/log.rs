//! Which log lines are written.

use super::*;

#[test]
fn ebpf_log_is_in_the_filter_unless_a_filter_is_given() {
    let config = |flags: &[&str]| load_with(None, flags, &environment()).expect("flags");
    assert_eq!(config(&[]).ebpf.log, LogLevel::Off);
    let asked = config(&["--ebpf-log=debug"]);
    assert_eq!((asked.ebpf.log, &*asked.log_filter), (LogLevel::Debug, "info,ebpf=debug"));
    assert_eq!(config(&["--ebpf-log=info"]).log_filter, "info", "it is that without being asked for");
    assert_eq!(config(&["--ebpf-log=debug", "--log-filter=warn"]).log_filter, "warn");
    let loud = load_with(None, &["--ebpf-log=loud"], &environment()).expect_err("there is no such level");
    assert!(loud.to_string().contains("--ebpf-log: \"loud\""), "{loud}");
}

#[test]
fn a_word_that_is_no_level_is_no_filter_and_a_variable_with_one_is_ignored() {
    let config = |flags: &[&str], variable: &str| {
        let environment = Environment { log_filter: Some(variable.into()), ..environment() };
        load_with(None, flags, &environment)
    };
    for filter in ["warn", "OFF", "proxy_userspace::sync", "shunt,ebpf", "hyper=debug", "info,kube=warn", "3"]
    {
        assert_eq!(config(&["--log-filter", filter], "").expect("a filter").log_filter, filter);
        assert_eq!(config(&[], filter).expect("a filter").log_filter, filter);
    }
    for filter in ["warning", "inof", "info,", ",info", "info,,ebpf=debug", "hyper", "shunt=loud"] {
        config(&["--log-filter", filter], "").expect_err(filter);
        let ignored = config(&["-v=4"], filter).expect("the variable is ignored");
        assert_eq!(ignored.log_filter, "info,shunt=debug,proxy_userspace=debug");
        assert_eq!(ignored.ineffective[0].setting, "RUST_LOG");
    }
}
