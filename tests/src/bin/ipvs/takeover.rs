//! Each mode of shunt takes over a node from kube-proxy in ipvs mode while connections continue.

use std::{
    fs::{self, File},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use proxy_userspace::{
    kernel::ipvs::{Change, VirtualKey, VirtualServer},
    model::Protocol,
};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, FailureKind, Protocol as Transport, SendRequest},
    deadline::{Deadline, scaled},
    runner::{Manifests, Proxy},
    slow_commands::{SLOW_FILE, STARTED_FILE, with_slow_commands},
    small_cluster::{CLUSTER_IP, DNS, NODE, NODE_PORT, SERVICES, Slices},
    world::Host,
};

use super::node::{self, Node};

/// A script that creates what kube-proxy leaves, except virtual servers.
const KUBE_PROXY: &str = include_str!("kube_proxy.sh");
/// A script that creates objects of other programs, which must stay.
const OTHERS: &str = "ipset create OTHERS hash:ip && ipset add OTHERS 192.0.2.1 && iptables -N OTHERS && \
                      iptables -A INPUT -j OTHERS && nft add table ip others";
const FIELDS: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}, \
                      ipvs: {syncPeriod: 1s, excludeCIDRs: [203.0.113.0/24]}}";
const IPVS: &str = "ipvs";
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_SIZE: usize = 100_000;
const CLIENTS: [Host; 3] = [Host::A3, Host::Node1, Host::Client];
const PODS: [&str; 2] = ["10.244.1.11", "10.244.1.12"];

/// A script that prints each object of the ipvs mode that still exists. `$mode` is the mode that
/// runs, and `$kept` are options of grep for addresses that may exist.
const REMAINING: &str = r"set +e
tail -n +4 /proc/net/ip_vs | grep -v -e C0A8390B:0019
ipset list -n | grep KUBE-
nft list tables | grep shunt-handover
for family in iptables ip6tables; do $family-nft-save; $family-legacy-save; done 2>&- | case $mode in
  iptables) grep -E '^:KUBE-(IPVS|LOAD-BALANCER|NODE-PORT|SOURCE-RANGES)' ;;
  *) grep '^:KUBE-' ;;
esac
ip -o addr show dev kube-ipvs0 2>&- | grep -v -e fe80:: $kept
true
";

/// A mode takes over. All connections continue, and kube-proxy's objects are removed.
pub(super) fn run(shunt: &Path, mode: &str) -> Result<()> {
    let mut node = Node::new()?;
    node.run(OTHERS)?;
    // Like kube-proxy, the ipvs mode removes all other virtual servers except those in
    // excludeCIDRs.
    let foreign = if mode == IPVS { "203.0.113.7:25" } else { "192.168.57.11:25" };
    let (foreign, server) = node::server_of(Protocol::Tcp, foreign);
    node.change(&[Change::AddServer(foreign, server)])?;
    let before = node.everything()?;
    create_objects(&node)?;
    open_connections(&mut node)?;
    with_proxy(&mut node, shunt, mode, &|node, proxy| take_over(node, proxy, mode))?;
    node.run("nft list table ip others")?;
    let after = node.everything()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    node.change(&[Change::RemoveServer(foreign)])
}

/// shunt ends during a takeover. IPVS keeps the connections, and the next process takes them over.
pub(super) fn run_interrupted(shunt: &Path) -> Result<()> {
    const MODE: &str = "nftables";
    let mut node = Node::new()?;
    create_objects(&node)?;
    open_connections(&mut node)?;
    let folder = node.world().directory().to_owned();
    // The command that creates the handover table creates it and then hangs.
    let is_hand_over = "[ \"$1\" = -f ] && input=$(cat) && [[ $input == *'shunt-handover {'* ]] && \
                        PATH=${PATH#*:} nft -f - <<<\"$input\"";
    let shunt = with_slow_commands(&folder, shunt, &["nft"], is_hand_over)?;
    with_proxy(&mut node, &shunt, MODE, &|node, proxy| {
        File::create(folder.join(SLOW_FILE))?;
        proxy.start(node.world())?;
        let has_begun = || folder.join(STARTED_FILE).exists().then_some(());
        Deadline::after(scaled(REMOVAL_TIMEOUT)).poll(has_begun).context("no handover began")?;
        proxy.stop()?;
        let left = node.run("nft list tables | grep handover || true")?;
        ensure!(left.is_empty(), "the handover table still exists: {left}");
        check_connections(node)?;
        fs::remove_file(folder.join(SLOW_FILE))?;
        take_over(node, proxy, MODE)
    })
}

/// Runs `check` with a shunt in this mode. Then stops shunt and removes its objects.
fn with_proxy(
    node: &mut Node,
    shunt: &Path,
    mode: &str,
    check: &dyn Fn(&mut Node, &mut Proxy) -> Result<()>,
) -> Result<()> {
    let manifests = Manifests::create(node.world().directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
    Slices::for_all_services(&[Host::A1, Host::A2]).place(&manifests)?;
    let fields: Mapping = serde_yaml_ng::from_str(FIELDS)?;
    let mut proxy = Proxy::new(Host::Node1, node.world(), shunt, mode, &manifests, &fields)?;
    let result = check(node, &mut proxy);
    result.with_context(|| format!("the end of the proxy's log:\n{}", proxy.log_tail(15)))?;
    proxy.stop()?;
    proxy.clean_up(node.world())
}

fn take_over(node: &mut Node, proxy: &mut Proxy, mode: &str) -> Result<()> {
    proxy.start(node.world())?;
    // This address is the source of the node's own connections.
    if mode != IPVS {
        wait_until_gone(node, mode, "-e 10.96.0.80/32")?;
    }
    check_connections(node)?;
    for host in CLIENTS {
        let mut seen = Vec::new();
        for to in [CLUSTER_IP, NODE_PORT] {
            let attempts = node.agent(host)?.connect(ConnectRequest {
                timeout: scaled(ANSWER_TIMEOUT),
                ..ConnectRequest::new(to.parse()?, Transport::Tcp, 20)
            })?;
            for one in attempts {
                match one {
                    Attempt::Answered(answer) => seen.push(answer.host),
                    Attempt::Failed(failure) => bail!("{host} to {to}: {failure:?}"),
                }
            }
        }
        seen.sort_unstable();
        seen.dedup();
        ensure!(seen == ["a1", "a2"], "{host} reaches {seen:?}");
    }
    node.agent(Host::Node1)?.close()?;
    if mode == IPVS { Ok(()) } else { wait_until_gone(node, mode, "") }
}

/// Creates what kube-proxy leaves.
fn create_objects(node: &Node) -> Result<()> {
    let tcp =
        ["10.96.0.80:80", "10.244.1.1:30080", "192.168.57.11:30080"].map(|to| (Protocol::Tcp, to, 8080));
    let mut changes = Vec::new();
    for (protocol, address, port) in tcp.into_iter().chain([(Protocol::Udp, DNS, 5353)]) {
        let key = VirtualKey { protocol, address: address.parse()? };
        changes.push(Change::AddServer(key, VirtualServer::new("rr", key.address.ip())));
        for pod in PODS {
            changes.push(Change::AddReal(key, format!("{pod}:{port}").parse()?, 1));
        }
    }
    node.change(&changes)?;
    let created = node.run(KUBE_PROXY);
    // The error message begins with the whole script.
    created.map(drop).map_err(|error| anyhow!("{}", error.to_string().lines().last().unwrap_or_default()))
}

/// Opens the connections that must continue.
fn open_connections(node: &mut Node) -> Result<()> {
    for host in CLIENTS {
        for to in [CLUSTER_IP, NODE_PORT] {
            let held = ConnectRequest {
                hold: Some(to.into()),
                timeout: scaled(ANSWER_TIMEOUT),
                ..ConnectRequest::new(to.parse()?, Transport::Tcp, 1)
            };
            let attempts = node.agent(host)?.connect(held)?;
            ensure!(
                matches!(attempts[..], [Attempt::Answered(_)]),
                "{host} cannot connect to {to} through kube-proxy's virtual servers: {attempts:?}"
            );
        }
    }
    let held =
        ConnectRequest { hold: Some(DNS.into()), ..ConnectRequest::new(DNS.parse()?, Transport::Udp, 1) };
    let attempts = node.agent(Host::A3)?.connect(held)?;
    ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "{attempts:?}");
    Ok(())
}

/// Checks that each connection still reaches its endpoint. An agent answers only on connections
/// that it accepted itself.
fn check_connections(node: &mut Node) -> Result<()> {
    let tcp =
        CLIENTS.iter().flat_map(|host| [(*host, CLUSTER_IP, ANSWER_SIZE), (*host, NODE_PORT, ANSWER_SIZE)]);
    for (host, to, answer) in tcp.chain([(Host::A3, DNS, 0)]) {
        let send = SendRequest { id: to.into(), size: 1, answer, timeout: scaled(ANSWER_TIMEOUT) };
        let answer = node.agent(host)?.send(send)?;
        let continues = match &answer {
            Attempt::Answered(_) => true,
            // A UDP flow may move to another endpoint.
            Attempt::Failed(failure) => to == DNS && failure.kind == FailureKind::Moved,
        };
        ensure!(continues, "{host}'s connection to {to} has ended: {answer:?}");
    }
    Ok(())
}

fn wait_until_gone(node: &Node, mode: &str, kept: &str) -> Result<()> {
    let remaining = || node.run(&format!("mode={mode} kept='{kept}'\n{REMAINING}"));
    let mut left = String::new();
    let gone = Deadline::after(scaled(REMOVAL_TIMEOUT)).poll(|| {
        left = remaining().unwrap_or_else(|error| format!("{error:#}"));
        left.is_empty().then_some(())
    });
    gone.with_context(|| format!("these objects still exist:\n{left}"))
}
