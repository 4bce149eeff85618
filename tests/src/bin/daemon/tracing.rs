//! A scenario of `shunt trace`: it prints what clients did, and the programs trace only meanwhile.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::loaded_maps;
use proxy_userspace::trace::{TraceRecord, TracedEvent};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::Deadline,
    process::ChildProcess,
    small_cluster::{CLUSTER_IP, DNS, NODE_PORT},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection without an answer lasts.
const SILENT_TIMEOUT: Duration = Duration::from_secs(5);

/// A command that traces on the node.
struct Trace {
    process: ChildProcess,
    output: PathBuf,
}

impl Trace {
    /// Starts it, and waits until everything is traced.
    fn start(node: &TestNode, setup: &Setup, name: &str, arguments: &[&str]) -> Result<Self> {
        let output = node.world.directory().join(name);
        let all = ["trace", "-o", "json"].iter().chain(arguments).map(|word| (*word).to_owned());
        let arguments: Vec<String> = all.collect();
        let process = node.world.spawn(Host::Node1, &setup.shunt, &arguments, &File::create(&output)?)?;
        let trace = Self { process, output };
        let started = || trace.text().contains("traces until interrupted").then_some(());
        let started = Deadline::after(TIMEOUT).poll(started);
        started.with_context(|| format!("it does not trace: {}", trace.text()))?;
        Ok(trace)
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// Waits for these events, written as [`what`] writes them, and no others. Ends the command.
    fn end_with(self, expected: &[&str]) -> Result<()> {
        let mut expected: Vec<String> = expected.iter().map(|event| (*event).to_owned()).collect();
        expected.sort_unstable();
        let output = self.output.clone();
        let read = || -> Result<Vec<String>> {
            let mut seen: Vec<String> = events(&output)?.iter().map(what).collect();
            seen.sort_unstable();
            Ok(seen)
        };
        let all_are_there = || Ok::<_, anyhow::Error>((read()?.len() >= expected.len()).then_some(()));
        let _or_too_few = Deadline::after(TIMEOUT).try_poll(all_are_there)?;
        let status = self.process.terminate(TIMEOUT)?;
        ensure!(status.success(), "{status}: {}", fs::read_to_string(&output)?);

        let seen = read()?;
        ensure!(seen == expected, "traced:\n{}\nexpected:\n{}", seen.join("\n"), expected.join("\n"));
        Ok(())
    }
}

/// Reads the events that were printed so far.
fn events(output: &Path) -> Result<Vec<TracedEvent>> {
    let text = fs::read_to_string(output)?;
    let documents = text.lines().filter(|line| line.starts_with('{'));
    let records = documents.map(|line| serde_json::from_str(line).with_context(|| line.to_owned()));
    let records: Vec<TraceRecord> = records.collect::<Result<_>>()?;
    let event = |record| match record {
        TraceRecord::TraceEvent(event) => Some(event),
        _ => None,
    };
    Ok(records.into_iter().filter_map(event).collect())
}

/// Writes what is the same in each run of a script: no times, ports of clients, or chosen
/// endpoints.
fn what(event: &TracedEvent) -> String {
    let TracedEvent { verdict, reason, protocol, client, from, vip, service, endpoint, link, .. } = event;
    let client = client.map(|client| client.ip().to_string());
    let client = client.or_else(|| from.clone()).unwrap_or_default();
    let service = service.as_deref().unwrap_or("-");
    let why = reason.as_deref().unwrap_or("-");
    let endpoint = endpoint.map_or(0, |endpoint| endpoint.port());
    let link = link.as_deref().unwrap_or("-");
    format!("{} {why} {protocol} {client} {vip} {service} {endpoint} {link}", verdict.name())
}

/// Makes connections one after the other, all of which end alike.
fn connect(node: &mut TestNode, from: Host, to: &str, protocol: Protocol, is_answered: bool) -> Result<()> {
    let timeout = if is_answered { ANSWER_TIMEOUT } else { SILENT_TIMEOUT };
    let request = ConnectRequest::new(to.parse()?, protocol, 2).with_timeout(timeout);
    let attempts = node.world.agent(from)?.connect(request)?;
    let is_expected = |attempt: &Attempt| attempt.is_answered() == is_answered;
    ensure!(attempts.len() == 2 && attempts.iter().all(is_expected), "{from} to {to}: {attempts:?}");
    Ok(())
}

/// Returns true while programs that trace are loaded: only they have so large a ring buffer.
fn are_loaded() -> bool {
    // A map may be removed while they are listed.
    let mut maps = loaded_maps().flatten();
    maps.any(|map| map.name_as_str() == Some("trace_events") && map.max_entries() > 1 << 20)
}

fn wait_until_nobody_traces() -> Result<()> {
    let is_over = || (!are_loaded()).then_some(());
    Deadline::after(TIMEOUT).poll(is_over).context("the programs that trace stay loaded")
}

/// What [`what`] writes for the clients of [`use_services`], in this order: the node, a pod, a
/// pod's datagrams, and a client outside.
fn lines_of_clients(is_ebpf: bool) -> [String; 4] {
    // In netfilter, sockets have addresses, and packets of pods come in on links.
    let (node, link) = if is_ebpf { ("node", "-") } else { ("192.168.57.11", "vetha3") };
    let pod = "10.244.1.13";
    [
        format!("translated - TCP {node} 10.96.0.80:80 default/web 8080 -"),
        format!("translated - TCP {pod} 10.96.0.80:80 default/web 8080 {link}"),
        format!("translated - UDP {pod} 10.96.0.53:53 default/dns 5353 {link}"),
        "translated - TCP 192.168.57.50 192.168.57.11:30080 default/web 8080 eth0".to_owned(),
    ]
}

/// Each client connects twice.
fn use_services(node: &mut TestNode) -> Result<()> {
    connect(node, Host::Node1, CLUSTER_IP, Protocol::Tcp, true)?;
    connect(node, Host::A3, CLUSTER_IP, Protocol::Tcp, true)?;
    connect(node, Host::A3, DNS, Protocol::Udp, true)?;
    connect(node, Host::Client, NODE_PORT, Protocol::Tcp, true)
}

pub(crate) fn a_trace_is_what_clients_did_and_costs_nothing_otherwise(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, "ebpf", "{shunt: {ebpf: {log: debug}}}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    ensure!(!are_loaded(), "nobody traces");
    let trace = Trace::start(&node, setup, "all", &[])?;
    let only_dns = Trace::start(&node, setup, "dns", &["default/dns"])?;
    ensure!(are_loaded(), "somebody traces");
    use_services(&mut node)?;
    let [of_node, of_pod, of_dns, of_client] = &lines_of_clients(true);
    only_dns.end_with(&[of_dns, of_dns])?;
    trace.end_with(&[of_node, of_node, of_pod, of_pod, of_dns, of_dns, of_client, of_client])?;
    // --ebpf-log goes on.
    node.wait_for_log(&format!(" vip={NODE_PORT} "), TIMEOUT)?;
    packets_are_captured_before_and_after(&mut node, setup)?;
    node.under_load(|node| {
        for name in ["first", "second", "third"] {
            let trace = Trace::start(node, setup, name, &["192.0.2.99"])?;
            trace.end_with(&[])?;
        }
        Ok(())
    })?;
    let unknown = node.world.run(Host::Node1, &format!("{} trace default/wbe", setup.shunt.display()));
    let error = unknown.expect_err("no such Service").to_string();
    ensure!(error.contains("this node serves no Service default/wbe"), "{error}");
    // A trace that begins before the last one has ended shares its events.
    wait_until_nobody_traces()?;
    remove_endpoints(&mut node)?;
    let refused = Trace::start(&node, setup, "refused", &["--verdict", "refused"])?;
    connect(&mut node, Host::Node1, CLUSTER_IP, Protocol::Tcp, false)?;
    connect(&mut node, Host::Client, NODE_PORT, Protocol::Tcp, false)?;
    let of_node = "refused refused TCP node 10.96.0.80:80 default/web 0 -";
    let of_client = "refused refused TCP 192.168.57.50 192.168.57.11:30080 default/web 0 eth0";
    refused.end_with(&[of_node, of_node, of_client, of_client])?;
    wait_until_nobody_traces()?;
    node.end()
}

pub(crate) fn netfilter_is_traced_by_rules_that_are_removed(setup: &Setup) -> Result<()> {
    for (mode, refused_by) in
        [("nftables", "kube-proxy nodeport-endpoints-check"), ("iptables", "filter KUBE-EXTERNAL-SERVICES")]
    {
        netfilter_is_traced(setup, mode, refused_by).with_context(|| format!("mode {mode}"))?;
    }
    Ok(())
}

fn netfilter_is_traced(setup: &Setup, mode: &str, refused_by: &str) -> Result<()> {
    let mut node = TestNode::started(setup, mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let trace = Trace::start(&node, setup, "all", &[])?;
    let only_dns = Trace::start(&node, setup, "dns", &["default/dns"])?;
    use_services(&mut node)?;
    let [of_node, of_pod, of_dns, of_client] = &lines_of_clients(false);
    only_dns.end_with(&[of_dns, of_dns])?;
    trace.end_with(&[of_node, of_node, of_pod, of_pod, of_dns, of_dns, of_client, of_client])?;
    if mode == "nftables" {
        port_without_a_service_is_traced(&mut node, setup)?;
    }
    remove_endpoints(&mut node)?;
    let refused = Trace::start(&node, setup, "refused", &["--verdict", "refused,dropped"])?;
    connect(&mut node, Host::Client, NODE_PORT, Protocol::Tcp, false)?;
    let of_client = format!("refused {refused_by} TCP 192.168.57.50 192.168.57.11:30080 default/web 0 eth0");
    refused.end_with(&[&of_client, &of_client])?;
    tables_are_removed(&node)?;
    let _killed = Trace::start(&node, setup, "killed", &[])?;
    // Every program of the node lists tables as JSON.
    node.world.run(Host::Node1, "nft -j list tables")?;
    node.proxy.kill()?;
    node.proxy.start(&mut node.world)?;
    tables_are_removed(&node)?;
    let _ended = Trace::start(&node, setup, "ended", &[])?;
    node.proxy.stop()?;
    tables_are_removed(&node)?;
    node.proxy.start(&mut node.world)?;
    node.end()
}

/// Rules of a trace are shunt's own, so they are no reason to translate in netfilter.
pub(crate) fn a_trace_leaves_links_on_their_path(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, "ebpf", "{shunt: {backstop: always}}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let list = format!("{} get links --output jsonpath='{{.items[*].path}}'", setup.shunt.display());
    let links = |node: &TestNode| node.world.run(Host::Node1, &list);
    let are_direct = || links(&node).ok().filter(|text| text.contains("direct"));
    let before = Deadline::after(TIMEOUT).poll(are_direct).with_context(|| format!("{:?}", links(&node)))?;
    let trace = Trace::start(&node, setup, "links", &[])?;
    let tables = node.world.run(Host::Node1, "nft list tables")?;
    ensure!(tables.contains("shunt-trace-1"), "the backstop is not traced: {tables}");
    // shunt judges at most a second after a change.
    let until = Deadline::after(Duration::from_secs(3));
    while !until.passed() {
        let now = links(&node)?;
        ensure!(now == before, "the links change from {before} to {now}");
        thread::sleep(Duration::from_millis(200));
    }
    trace.end_with(&[])?;
    node.end()
}

/// The rules refuse ports of cluster IPs that no Service has.
fn port_without_a_service_is_traced(node: &mut TestNode, setup: &Setup) -> Result<()> {
    let trace = Trace::start(node, setup, "port", &["10.96.0.80"])?;
    connect(node, Host::A3, "10.96.0.80:81", Protocol::Tcp, false)?;
    let of_pod = "refused kube-proxy cluster-ips-check TCP 10.244.1.13 10.96.0.80:81 - 0 vetha3";
    trace.end_with(&[of_pod, of_pod])
}

fn tables_are_removed(node: &TestNode) -> Result<()> {
    let is_over = || {
        let tables = node.world.run(Host::Node1, "nft list tables")?;
        Ok::<_, anyhow::Error>((!tables.contains("shunt-trace")).then_some(()))
    };
    Deadline::after(TIMEOUT).try_poll(is_over)?.context("the rules that trace stay")
}

/// Removes all endpoints, and waits until connections fail.
fn remove_endpoints(node: &mut TestNode) -> Result<()> {
    node.set_endpoints(&[])?;
    let is_refused = || connect(node, Host::Node1, CLUSTER_IP, Protocol::Tcp, false).ok();
    Deadline::after(TIMEOUT).poll(is_refused).context("connections are still answered")
}

/// A client outside connects, and tshark reads the packets of the handshake.
fn packets_are_captured_before_and_after(node: &mut TestNode, setup: &Setup) -> Result<()> {
    let file = node.world.directory().join("packets.pcapng");
    let path = file.display().to_string();
    let trace = Trace::start(node, setup, "packets", &["192.168.57.50", "--pcap", &path])?;
    connect(node, Host::Client, NODE_PORT, Protocol::Tcp, true)?;
    let of_client = "translated - TCP 192.168.57.50 192.168.57.11:30080 default/web 8080 eth0";
    trace.end_with(&[of_client; 2])?;
    let fields = "-T fields -E separator=' ' -e frame.interface_name -e ip.src -e tcp.srcport -e ip.dst -e tcp.dstport -e frame.comment";
    let handshake = "tcp.flags.syn == 1";
    let text = node.world.run(Host::Node1, &format!("tshark -r {path} -Y '{handshake}' {fields} 2>&1"))?;
    let count =
        |parts: &[&str]| text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count();
    for (what, packets) in [
        ("SYN before", count(&["eth0 192.168.57.50 ", " 192.168.57.11 30080 before shunt_in_eth"])),
        (
            "SYN after",
            count(&["eth0 192.168.57.50 ", " 8080 after shunt_in_eth: translated for default/web"]),
        ),
        ("SYN-ACK before", count(&["eth0 10.244.1.", " 8080 192.168.57.50 ", "before shunt_out_eth"])),
        (
            "SYN-ACK after",
            count(&["eth0 192.168.57.11 30080 192.168.57.50 ", "after shunt_out_eth: translated"]),
        ),
    ] {
        ensure!(packets == 2, "{packets} {what} of 2 connections:\n{text}");
    }
    packets_go_to_standard_output_alone(node, setup)
}

fn packets_go_to_standard_output_alone(node: &TestNode, setup: &Setup) -> Result<()> {
    let (shunt, lines) = (setup.shunt.display(), node.world.directory().join("lines"));
    let trace = format!("{shunt} trace --for 1s --pcap - 2> {}", lines.display());
    // The rest is read too: packets that come later must not meet a closed pipe.
    let read = "{ od -An -tx1 -N4; cat > /dev/null; }";
    let head = node.world.run(Host::Node1, &format!("{trace} | {read}"))?;
    ensure!(head.trim() == "0a 0d 0d 0a", "no section header of pcapng: {head}");
    let lines = fs::read_to_string(lines)?;
    ensure!(lines.contains("packets written to standard output"), "{lines}");
    Ok(())
}
