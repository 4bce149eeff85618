//! A scenario of `shunt doctor --bundle`: what is in the archive, and that no secret is.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{deadline::Deadline, process::write_script, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);
/// A part of each secret of this test.
const HIDDEN: &str = "hidden-value";
/// Files that each archive has, whatever the mode is.
const EXPECTED: [&str; 17] = [
    "README.txt",
    "errors.txt",
    "version.txt",
    "doctor.json",
    "probe.json",
    "node.json",
    "configz.json",
    "statusz.txt",
    "metrics.txt",
    "healthz.txt",
    "get/services.jsonl",
    "get/endpoints.jsonl",
    "network/links.txt",
    "network/addresses.txt",
    "network/routes4.txt",
    "network/sysctls.txt",
    "system/mounts.txt",
];

/// Secrets wherever shunt reads some: in the kubeconfig, in files that it names, in the
/// environment, in proxy URLs; and in a rule of another program.
pub(crate) fn a_bug_report_has_everything_but_secrets(setup: &Setup) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [script, kubeconfig, token, key] =
        ["shunt", "kubeconfig", "token", "key"].map(|name| folder.path().join(name));
    fs::write(&token, "token-file-hidden-value")?;
    fs::write(&key, "-----BEGIN PRIVATE KEY-----\nkey-file-hidden-value\n-----END PRIVATE KEY-----\n")?;
    fs::write(&kubeconfig, kubeconfig_text(&token, &key))?;
    let fields = format!("{{clientConnection: {{kubeconfig: {}}}}}", kubeconfig.display());
    let of_script = Setup { shunt: script.clone(), mode: setup.mode.clone() };
    let mut node = TestNode::new(&of_script, &setup.mode, &fields)?;
    let (proxy, shunt) = (node.cluster.server().address(), setup.shunt.display());
    let variables = format!(
        "HTTP_PROXY=user:proxy-hidden-value@{proxy} MY_API_TOKEN=env-hidden-value NO_PROXY=127.0.0.0/8"
    );
    write_script(&script, &format!("#!/bin/sh\n{variables} exec '{shunt}' \"$@\"\n"))?;
    node.cluster.server().require_token("current-hidden-value");
    node.proxy.set_flag("--master", "http://api.test:6443");
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    for comment in ["password=rule-hidden-value", "the token is current-hidden-value"] {
        let line = format!("nft 'add chain ip other c{} {{ comment \"{comment}\" ; }}'", comment.len());
        node.world.run(Host::Node1, &format!("nft add table ip other\n{line}"))?;
    }
    check(&node, setup, "with a daemon", &EXPECTED)?;
    // The error of the API server's answer is in the report.
    node.cluster.server().require_token("another-hidden-value");
    node.cluster.server().interrupt(shunt_tests::apiserver::Interruption::BreakMidEvent);
    node.cluster.server().interrupt(shunt_tests::apiserver::Interruption::End);
    let fails = || node.proxy.log().contains("401").then_some(());
    Deadline::after(TIMEOUT).poll(fails).context("the server refuses the token, and nothing says so")?;
    check(&node, setup, "without access", &EXPECTED)?;
    node.proxy.stop()?;
    // Without a daemon nobody says which kubeconfig has the secret of the comment.
    node.world.run(Host::Node1, "nft delete table ip other")?;
    let of_system = EXPECTED.iter().copied().filter(|name| {
        let is_of_daemon = ["node.", "configz", "statusz", "metrics", "healthz", "get/"];
        !is_of_daemon.iter().any(|prefix| name.starts_with(prefix))
    });
    check(&node, setup, "without a daemon", &of_system.collect::<Vec<_>>())?;
    node.proxy.clean_up(&node.world)
}

fn kubeconfig_text(token: &Path, key: &Path) -> String {
    let (token, key) = (token.display(), key.display());
    format!(
        "current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters:\n- {{name: c, cluster: {{server: 'http://api.test'}}}}\n\
         - {{name: d, cluster: {{server: 'http://api.test', proxy-url: 'http://user:url-hidden-value@192.0.2.1:1'}}}}\n\
         users:\n- {{name: u, user: {{token: current-hidden-value}}}}\n\
         - {{name: v, user: {{username: admin, password: password-hidden-value, client-key-data: data-hidden-value}}}}\n\
         - {{name: w, user: {{tokenFile: '{token}', client-key: '{key}'}}}}\n\
         - {{name: x, user: {{exec: {{apiVersion: client.authentication.k8s.io/v1, command: x, interactiveMode: Never, \
         env: [{{name: SECRET, value: plugin-hidden-value}}]}}}}}}\n"
    )
}

/// Writes an archive, unpacks it, and searches it.
fn check(node: &TestNode, setup: &Setup, when: &str, expected: &[&str]) -> Result<()> {
    let directory = node.world.directory().join(when.replace(' ', "-"));
    fs::create_dir(&directory)?;
    let archive = directory.join("bundle.tar.zst");
    let (shunt, archive) = (setup.shunt.display(), archive.display());
    let pins = node.world.pin_directory();
    let line = format!("{shunt} doctor --bundle {archive} --bpf-pin-dir {} 2>&1", pins.display());
    let printed = node.world.run(Host::Node1, &format!("{line} || true"))?;
    ensure!(printed.contains("README.txt") && printed.contains("Wrote "), "{when}: {printed}");
    let again = node.world.run(Host::Node1, &format!("set +e\n{line}; echo $?"))?;
    ensure!(again.contains("exists already") && again.trim_end().ends_with('3'), "{when}: {again}");
    let piped = format!("{shunt} doctor --bundle - --bpf-pin-dir {} | zstd -qdc | tar -t", pins.display());
    let piped = node.world.run(Host::Node1, &piped)?;
    ensure!(piped.contains("shunt-bundle/README.txt"), "{when}: {piped}");
    let mode = node.world.run(Host::Node1, &format!("stat -c %a {archive}"))?;
    ensure!(mode.trim() == "600", "{when}: mode {mode}");
    let unpack = format!("cd {} && zstd -qdc {archive} | tar -x", directory.display());
    node.world.run(Host::Node1, &unpack)?;
    for name in expected {
        let file = directory.join("shunt-bundle").join(name);
        let text = fs::read_to_string(&file).with_context(|| format!("{when}: {name}: {printed}"))?;
        let may_be_empty = name.starts_with("get/") || *name == "errors.txt";
        ensure!(!text.is_empty() || may_be_empty, "{when}: {name} is empty");
        let is_health = *name != "healthz.txt" || text.contains("nodeEligible");
        ensure!(is_health, "{when}: {name} says nothing about the node: {text}");
    }
    let search = format!("grep -rl {HIDDEN} {}/shunt-bundle || true", directory.display());
    let redacted = fs::read_to_string(directory.join("shunt-bundle/netfilter/nft.txt"))?;
    let has_rules = !redacted.contains("table ip other") || redacted.contains("the token is REDACTED");
    ensure!(has_rules, "{when}: {redacted}");
    let found = node.world.run(Host::Node1, &search)?;
    ensure!(found.trim().is_empty(), "{when}: secrets are in {found}");
    Ok(())
}
