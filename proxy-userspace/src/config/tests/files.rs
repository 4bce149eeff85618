//! Whole files: those of distributions, one with everything, and forty that are wrong, each with what is said of it beside it.

use std::{fs, path::Path};

use super::*;

const K3S: &str = include_str!("good/k3s.yaml");
const EVERY_FIELD: &str = include_str!("good/every-field.yaml");

fn names(config: &Config) -> Vec<&str> {
    config.notes.iter().map(|note| note.setting.as_str()).collect()
}

#[test]
fn k3s_file_is_accepted_and_the_kernels_conntrack_is_left_alone() {
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
fn a_file_with_every_field_set_is_accepted_and_each_that_has_no_effect_is_named_once() {
    let yaml: serde_yaml_ng::Value = serde_yaml_ng::from_str(EVERY_FIELD).unwrap();
    for field in schema::fields() {
        let value = field.path.split('.').try_fold(&yaml, |yaml, name| yaml.get(name));
        // Objects come from one place.
        assert!(value.is_some() || field.path == "shunt.master", "{} is not set", field.path);
    }
    let config = load(EVERY_FIELD, &["--config=unread"]);
    insta::assert_snapshot!(config.notes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
}

#[test]
fn unknown_fields_are_named_and_ignored_as_kube_proxy_does() {
    let config = load(&format!("{HEAD}iptables: {{speed: 3}}\nudpIdleTimeout: 250ms\nmode: ebpf\n"), &[]);
    assert_eq!(names(&config), ["iptables.speed", "udpIdleTimeout"]);
    assert!(config.notes[0].why.starts_with("unknown field, ignored; known here: localhostNodePorts"));
}

#[test]
fn of_each_bad_file_is_said_what_is_wrong_with_which_value_and_what_is_allowed() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config/tests/bad");
    let mut files: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert!(files.len() >= 40, "{} files", files.len());
    for path in files {
        let flags = Flags::parse(["shunt".as_ref(), "--config".as_ref(), path.as_os_str()]).unwrap();
        let error = Config::load(&flags, &environment()).expect_err(&path.display().to_string());
        let said = crate::causes::with_causes(&error).replace(&*directory.to_string_lossy(), "DIR");
        let settings = insta::Settings::clone_current();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let mut settings = settings;
        settings.set_snapshot_path(&directory);
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!(name, said));
    }
}
