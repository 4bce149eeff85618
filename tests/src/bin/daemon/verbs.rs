//! Scenarios of `shunt get` and `shunt explain`, as people use them.

use std::{
    fs::{self, File},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::Deadline,
    small_cluster::{NODE, SERVICES, Slices},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: job-1, namespace: jobs}\n\
                   spec: {nodeName: node1}\nstatus: {podIPs: [{ip: 10.244.1.99}]}\n";
const UNSERVED: &str = "
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: default}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere, namespace: default}
spec: {type: ExternalName, externalName: elsewhere.example}
---
apiVersion: v1
kind: Service
metadata: {name: others, namespace: default, labels: {service.kubernetes.io/service-proxy-name: other}}
spec: {clusterIP: 10.96.0.82, ports: [{port: 80}]}
";
const NODE_PORT: &str = "192.168.57.11:30080";

/// A process of another user has the name of the socket before shunt starts.
pub(crate) fn an_answer_of_another_user_is_not_believed(setup: &Setup) -> Result<()> {
    const IMPOSTOR: &str = "use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0) or die; \
                            bind(S, pack_sockaddr_un(qq(\\0shunt/inspect))) or die; listen(S, 5) or die; sleep 15";
    let node = TestNode::new(setup, &setup.mode, "{}")?;
    let log = File::create(node.world.directory().join("impostor"))?;
    let line = format!("exec setpriv --reuid 65534 --clear-groups perl -e '{IMPOSTOR}'");
    let _impostor = node.world.spawn(Host::Node1, Path::new("/bin/sh"), &["-c".to_owned(), line], &log)?;
    let ask = format!("{} get services 2>&1 || true", setup.shunt.display());
    let is_refused = || {
        let text = node.world.run(Host::Node1, &ask).ok()?;
        text.contains("a process of the user 65534 has the socket").then_some(())
    };
    Deadline::after(TIMEOUT).poll(is_refused).context("the impostor was believed, or did not start")
}

pub(crate) fn get_and_explain_answer_on_the_node(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, &setup.mode, "{}")?;
    let shunt = setup.shunt.display().to_string();
    let fails = |node: &TestNode, arguments: &str, part: &str| {
        let text =
            node.world.run(Host::Node1, &format!("{shunt} {arguments} 2>&1 && echo no error; true"))?;
        ensure!(text.contains(part) && !text.contains("no error"), "{arguments}: {text}");
        anyhow::Ok(())
    };
    let says = |node: &TestNode, arguments: &str, parts: &[&str]| {
        let text = node.world.run(Host::Node1, &format!("{shunt} {arguments}"))?;
        let missing = parts.iter().find(|part| !text.contains(**part));
        missing.map_or(Ok(()), |part| Err(anyhow::anyhow!("{arguments}: no {part:?} in\n{text}")))
    };
    fails(&node, "get services", "no shunt runs in this network namespace")?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    says(&node, "get services", &["NAMESPACE", "10.96.0.80:80,*:30080", "2/2", "programmed"])?;
    says(&node, "get svc default/web -o wide", &["INTERNAL", "Cluster"])?;
    says(&node, "get services -o json", &["\"apiVersion\": \"shunt.dev/v1alpha1\"", "\"ServicePortList\""])?;
    says(&node, "get services -n default -o jsonpath='{.items[*].name}'", &["dns web"])?;
    says(&node, "get endpoints web", &["10.244.1.11:", "10.244.1.12:", "ready"])?;
    says(&node, "get links", &["eth0", "vetha1"])?;
    fails(&node, "get services nothing", "no services of a Service nothing")?;
    fails(&node, "get flows nothing", "no flows of a Service nothing")?;
    says(&node, "get left-out web 2>&1", &["no left-out of a Service web"])?;
    says(&node, "get left-out 2>&1", &["no left-out"])?;
    says(&node, "explain node 10.96.0.80:80", &["default/web", "+ 10.244.1.11:", "translated: one of 2"])?;
    says(&node, "explain 10.244.1.13 10.96.0.80:81 -o yaml", &["kind: Explanation", "verdict: "])?;
    says(&node, "explain pod/a1 web.default:80", &["10.244.1.11, default/a1, a pod of this", "(a2, node1"])?;
    fails(&node, "explain a1 web:81", "default/web:81 has no such port: it has 80/tcp")?;
    fails(&node, "explain a1 web:30080", "30080 is the node port")?;
    fails(&node, "explain fd57::50 web", "fd57::50 is IPv6, 10.96.0.80 is IPv4: no packet has both")?;
    fails(&node, "explain web-0 web", "there is no pod default/web-0")?;
    a_service_that_is_not_served_is_named_with_the_reason(&node, &shunt)?;
    if setup.mode == "ebpf" {
        says(&node, "explain node 0.0.0.0:30080", &["translated: one of 2"])?;
        node.world.run(Host::Node1, "bash -c '</dev/tcp/0.0.0.0/30080'").context("0.0.0.0 is translated")?;
    }
    let nobody = format!("setpriv --reuid 65534 --clear-groups {shunt} get links 2>&1 || true");
    let text = node.world.run(Host::Node1, &nobody)?;
    ensure!(text.contains("answers only processes of root"), "a stranger gets: {text}");
    fails(&node, "get links web", "NAME has no meaning for links")?;
    flows_are_listed(&mut node, &shunt)?;
    rows_that_change_are_printed(&node, &shunt)?;
    a_node_is_explained_by_manifests(&node, &shunt)?;
    flows_are_listed_while_no_shunt_runs(&mut node, &shunt)?;
    node.end()
}

/// The watches send only the Service of type `ExternalName`.
fn a_service_that_is_not_served_is_named_with_the_reason(node: &TestNode, shunt: &str) -> Result<()> {
    node.cluster.apply_all(UNSERVED)?;
    for (name, reason) in [
        ("headless", "the Service default/headless is headless, and no proxy serves it"),
        ("elsewhere", "the Service default/elsewhere is of type ExternalName, which no proxy serves"),
        ("others", "the Service default/others is left to another proxy"),
        ("nothing", "there is no Service default/nothing"),
    ] {
        for command in [format!("explain node {name}:80"), format!("get services {name} -n default")] {
            let text = node.world.run(Host::Node1, &format!("{shunt} {command} 2>&1 || true"))?;
            ensure!(text.contains(reason), "{command}: {text}");
        }
    }
    Ok(())
}

/// A client outside connects to the node port.
fn flows_are_listed(node: &mut TestNode, shunt: &str) -> Result<()> {
    let request = ConnectRequest::new(NODE_PORT.parse()?, Protocol::Tcp, 1).with_timeout(TIMEOUT);
    let answers = node.world.agent(Host::Client)?.connect(request)?;
    ensure!(matches!(answers[..], [Attempt::Answered(_)]), "{answers:?}");
    let list = |filter: &str| {
        let line = format!("{shunt} get flows {filter} -o wide 2>&1 || true");
        node.world.run(Host::Node1, &line)
    };
    let text = list("--client 192.168.57.50 --vip 192.168.57.11")?;
    let is_flow = |line: &str| line.contains("default/web") && line.contains("192.168.57.50:");
    ensure!(text.lines().any(is_flow), "{text}");
    let nothing = list("--client 192.0.2.99")?;
    ensure!(nothing.contains("no flows"), "{nothing}");
    Ok(())
}

/// The kernel knows them, but not their Services.
fn flows_are_listed_while_no_shunt_runs(node: &mut TestNode, shunt: &str) -> Result<()> {
    node.proxy.stop()?;
    let line = format!("{shunt} get flows --client 192.168.57.50 --bpf-pin-dir $PINS 2>&1");
    let text = node.world.run(Host::Node1, &line)?;
    ensure!(text.contains("nobody knows the Services") && text.contains("192.168.57.50:"), "{text}");
    let named = node.world.run(Host::Node1, &format!("{shunt} get flows web 2>&1 || true"))?;
    ensure!(named.contains("no shunt runs in this network namespace:"), "{named}");
    node.proxy.start(&mut node.world)
}

/// `-w` prints the endpoint that comes, and not again the one that stays.
fn rows_that_change_are_printed(node: &TestNode, shunt: &str) -> Result<()> {
    let file = node.world.directory().join("watched");
    let arguments = ["get", "endpoints", "web", "-w"].map(ToOwned::to_owned);
    let _watch = node.world.spawn(Host::Node1, Path::new(shunt), &arguments, &File::create(&file)?)?;
    let read = || fs::read_to_string(&file).unwrap_or_default();
    let wait = |address: &str| {
        let is_there = || read().contains(address).then_some(());
        let shown = Deadline::after(TIMEOUT).poll(is_there);
        shown.with_context(|| format!("no {address} in {}", read()))
    };
    wait("10.244.1.12:")?;
    node.set_endpoints(&[Host::A1, Host::A3])?;
    wait("10.244.1.13:")?;
    let text = read();
    ensure!(text.matches("10.244.1.11:").count() == 1, "{text}");
    Ok(())
}

/// Needs neither a daemon nor a kernel.
fn a_node_is_explained_by_manifests(node: &TestNode, shunt: &str) -> Result<()> {
    let directory = node.world.directory().join("manifests");
    fs::create_dir(&directory)?;
    fs::write(directory.join("node.yaml"), NODE)?;
    fs::write(directory.join("services.yaml"), SERVICES)?;
    fs::write(directory.join("slices.yaml"), Slices::for_all_services(&[Host::A1]).text())?;
    fs::write(directory.join("pod.yaml"), POD)?;
    let ask_about = |from: &str, more: &str| {
        let of = format!("--manifests {} {more}", directory.display());
        node.world.run(Host::Client, &format!("{shunt} explain {from} 192.168.57.11:30080 {of} 2>&1 || true"))
    };
    let ask = |more: &str| ask_about("192.168.57.50", more);
    let text = ask("--node node1 --mode nftables")?;
    ensure!(text.contains("the rules of the nftables mode") && text.contains("one of 1 endpoints"), "{text}");
    let text = ask("--node node9")?;
    let parts = ["no Node node9 in", ": name one of node1 with --node"];
    ensure!(parts.iter().all(|part| text.contains(part)), "{text}");
    let text = ask_about("jobs/job-1", "--node node1")?;
    ensure!(text.contains("10.244.1.99, jobs/job-1, a pod of this node"), "{text}");
    let text = ask_about("job-1", "--node node1")?;
    ensure!(text.contains("no Pod default/job-1 in"), "{text}");
    Ok(())
}
