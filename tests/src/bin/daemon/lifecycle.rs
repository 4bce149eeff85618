//! Scenarios of the daemon's life: what it sets on the node, its start, its Events and its end.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{deadline::Deadline, process::write_script, small_cluster::NODE, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);

const CONNTRACK_MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// Returns fields with a size of conntrack's table that differs from the current one and needs no
/// more buckets, which could be set.
fn other_conntrack_size() -> Result<String> {
    let read = |path| anyhow::Ok(fs::read_to_string(path)?.trim().parse::<u32>()?);
    let (now, buckets) = (read(CONNTRACK_MAX)?, read("/sys/module/nf_conntrack/parameters/hashsize")?);
    let size = if buckets == now { now / 2 } else { buckets };
    Ok(format!("{{conntrack: {{maxPerCore: 1, min: {size}}}}}"))
}

pub(crate) fn the_nodes_settings_are_made(setup: &Setup) -> Result<()> {
    // A value above zero: a lower one would need CAP_SYS_RESOURCE, which not every machine gives
    // its containers.
    let fields = "{oomScoreAdj: 300, conntrack: {tcpEstablishedTimeout: 2h, tcpCloseWaitTimeout: 10m, udpTimeout: 40s, \
                  udpStreamTimeout: 50s, tcpBeLiberal: true}}";
    let node = TestNode::started(setup, &setup.mode, fields)?;
    for (name, value) in [
        ("tcp_timeout_established", "7200"),
        ("tcp_timeout_close_wait", "600"),
        ("udp_timeout", "40"),
        ("udp_timeout_stream", "50"),
        ("tcp_be_liberal", "1"),
    ] {
        let path = format!("/proc/sys/net/netfilter/nf_conntrack_{name}");
        let seen = node.world.run(Host::Node1, &format!("cat {path}"))?;
        ensure!(seen.trim() == value, "{path} is {seen:?}, not {value}");
    }
    let process = node.proxy.process_id().unwrap_or_default();
    let score = fs::read_to_string(format!("/proc/{process}/oom_score_adj"))?;
    ensure!(score.trim() == "300", "oom_score_adj is {score}");
    node.end()
}

/// The size of the table applies to all namespaces, and cannot be set from one of them.
pub(crate) fn settings_that_cannot_be_made_are_logged(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, &other_conntrack_size()?)?;
    node.wait_for_log(CONNTRACK_MAX, TIMEOUT)?;
    node.wait_for_log("cannot change a kernel setting", TIMEOUT)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.end()
}

/// The API server of this test also answers requests for other hosts, as a proxy does. An unusable
/// variable does not matter, also not to the library that reads the kubeconfig.
pub(crate) fn the_proxy_of_the_environment_is_used(setup: &Setup) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [script, kubeconfig] = ["shunt", "kubeconfig"].map(|name| folder.path().join(name));
    let text = "{current-context: c, contexts: [{name: c, context: {cluster: c}}], \
                clusters: [{name: c, cluster: {server: 'http://api.test'}}]}";
    fs::write(&kubeconfig, text)?;
    let fields = format!("{{clientConnection: {{kubeconfig: {}}}}}", kubeconfig.display());
    let of_script = Setup { shunt: script.clone(), mode: setup.mode.clone() };
    let mut node = TestNode::new(&of_script, &setup.mode, &fields)?;
    let (proxy, shunt) = (node.cluster.server().address(), setup.shunt.display());
    let variables = format!("HTTP_PROXY=user:secret@{proxy} HTTPS_PROXY='no URL' NO_PROXY=127.0.0.0/8,.svc");
    write_script(&script, &format!("#!/bin/sh\n{variables} exec '{shunt}' \"$@\"\n"))?;
    node.proxy.set_flag("--master", "http://api.test:6443");
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.wait_for_log(&format!("proxy=http://***@{proxy} setting=\"HTTP_PROXY\""), Duration::ZERO)?;
    ensure!(!node.proxy.log().contains("secret"), "the log shows the password:\n{}", node.proxy.log());
    node.end()
}

pub(crate) fn sigterm_does_not_affect_traffic(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.proxy.stop()?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.under_load(|node| node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT))?;
    node.wait_for_log("Services keep working", Duration::ZERO)?;
    node.end()
}

/// Milliseconds after the change of the configuration that leads to a restart: before the new
/// process exists, while it starts, and afterwards.
const AFTER_MS: [u64; 8] = [0, 1, 2, 4, 8, 16, 64, 256];

pub(crate) fn sigterm_ends_the_proxy_during_a_restart(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, &setup.mode, "{}")?;
    for (round, pause) in (0..).zip(AFTER_MS) {
        node.proxy.start(&mut node.world)?;
        node.proxy.clear_log()?;
        // Smaller than before, so that the maps and the process are replaced.
        let flows = 65_536 >> round;
        let fields = format!("{{shunt: {{ebpf: {{mapSizes: {{flows: {flows}}}}}}}}}");
        node.proxy.configure(&setup.mode, &serde_yaml_ng::from_str(&fields)?)?;
        node.wait_for_log("has changed: restarting", TIMEOUT)?;
        thread::sleep(Duration::from_millis(pause));
        node.proxy.stop().with_context(|| format!("{pause} ms after the restart began"))?;
    }
    node.end()
}

pub(crate) fn the_proxy_waits_for_the_node_object(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, &setup.mode, "{}")?;
    node.cluster.server().delete("Node", "", "node1")?;
    node.proxy.spawn(&node.world)?;
    node.wait_for_log("waiting for the Node before the first sync", TIMEOUT)?;
    ensure!(
        node.wait_until_served(&[Host::A1, Host::A2], Duration::ZERO).is_err(),
        "the proxy does not wait"
    );
    node.cluster.apply_all(NODE)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.end()
}

/// A Service whose health check node port is in use by the proxy's own health server.
const TAKEN: &str = "
apiVersion: v1
kind: Service
metadata: {name: taken, namespace: shop}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 10256
  clusterIP: 10.96.0.81
  ports:
  - {port: 80, nodePort: 30081}
";

pub(crate) fn events_report_the_start_and_refused_settings(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, &setup.mode, &other_conntrack_size()?)?;
    node.cluster.apply_all(TAKEN)?;
    node.world.run(Host::Node1, "sysctl -q net.ipv4.ip_forward=0")?;
    node.proxy.start(&mut node.world)?;
    let reasons = || {
        let events = node.cluster.server().events();
        let reason = |event: &serde_json::Value| event["reason"].as_str().unwrap_or_default().to_owned();
        events.iter().map(reason).collect::<Vec<_>>()
    };
    let expected = ["SettingsRefused", "NotForwarding", "Starting", "FailedToStartServiceHealthcheck"];
    let has_all =
        || expected.iter().all(|reason| reasons().iter().any(|found| found == reason)).then_some(());
    Deadline::after(TIMEOUT).poll(has_all).with_context(|| format!("events: {:?}", reasons()))?;
    for event in node.cluster.server().events() {
        let regarding =
            ["kind", "namespace", "name"].map(|field| event["regarding"][field].as_str().unwrap_or("-"));
        let is_about_service = event["reason"] == "FailedToStartServiceHealthcheck";
        let expected = if is_about_service { ["Service", "shop", "taken"] } else { ["Node", "-", "node1"] };
        ensure!(regarding == expected && event["type"].is_string(), "{event}");
    }
    let forwards = node.world.run(Host::Node1, "sysctl -n net.ipv4.ip_forward")?;
    ensure!(forwards.trim() == "0", "ip_forward, which kube-proxy leaves alone too, is {forwards}");
    node.end()
}

/// The servers of health and metrics have the same address. One of them is the first. If the kernel
/// is programmed meanwhile, the proxy may be healthy for a moment.
pub(crate) fn an_address_that_cannot_be_used_ends_the_proxy_after_an_event(setup: &Setup) -> Result<()> {
    let fields = "{bindAddressHardFail: true, metricsBindAddress: '0.0.0.0:10256'}";
    let mut node = TestNode::new(setup, &setup.mode, fields)?;
    node.proxy.spawn(&node.world)?;
    let status = node.proxy.wait().with_context(|| node.proxy.log_tail(30))?;
    ensure!(!status.success(), "it ended with {status}");
    node.wait_for_log("cannot listen on 0.0.0.0:10256 for ", Duration::ZERO)?;
    let events = node.cluster.server().events();
    let reasons = ["FailedToStartMetricServer", "FailedToStartProxierHealthcheck"];
    let event = events.iter().find(|event| reasons.iter().any(|reason| event["reason"] == *reason));
    let event = event.with_context(|| format!("no Event: {events:?}"))?;
    ensure!(event["regarding"]["kind"] == "Node" && event["type"] == "Warning", "{event}");
    Ok(())
}
