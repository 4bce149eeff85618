//! A node on which kube-proxy ran in ipvs mode, taken over by the proxy in each of its modes while connections last.

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

/// The rest of what upstream leaves.
const UPSTREAM: &str = include_str!("leftovers.sh");
/// Others' things, which have to stay.
const OTHERS: &str = "ipset create OTHERS hash:ip && ipset add OTHERS 192.0.2.1 && iptables -N OTHERS && \
                      iptables -A INPUT -j OTHERS && nft add table ip others";
const FIELDS: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}, \
                      ipvs: {syncPeriod: 1s, excludeCIDRs: [203.0.113.0/24]}}";
const IPVS: &str = "ipvs";
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
const GONE_WITHIN: Duration = Duration::from_secs(30);
const ANSWER: usize = 100_000;
const CALLERS: [Host; 3] = [Host::A3, Host::Node1, Host::Client];
const PODS: [&str; 2] = ["10.244.1.11", "10.244.1.12"];

/// What is left of upstream's ipvs mode and of ours, a line each; `$mode` is the mode that runs.
const LEFT: &str = r"set +e
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

/// All connections that were made by upstream's virtual servers go on, and nothing of them is left.
pub(super) fn are_taken_over(shunt: &Path, mode: &str) -> Result<()> {
    let mut node = Node::new()?;
    node.run(OTHERS)?;
    // The ipvs mode takes all virtual servers for its own but for those in excludeCIDRs, as upstream's.
    let foreign = if mode == IPVS { "203.0.113.7:25" } else { "192.168.57.11:25" };
    let (foreign, server) = node::server_of(Protocol::Tcp, foreign);
    node.change(&[Change::AddServer(foreign, server)])?;
    let before = node.everything()?;
    put(&node)?;
    hold(&mut node)?;
    with_proxy(&mut node, shunt, mode, &|node, proxy| take_over(node, proxy, mode))?;
    node.run("nft list table ip others")?;
    let after = node.everything()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    node.change(&[Change::RemoveServer(foreign)])
}

/// One that is told to end while it takes over leaves connections with what carries them, and the next one takes them along.
pub(super) fn are_left_by_one_that_ends(shunt: &Path) -> Result<()> {
    const MODE: &str = "nftables";
    let mut node = Node::new()?;
    put(&node)?;
    hold(&mut node)?;
    let folder = node.world().directory().to_owned();
    // It does what it is to do, and does not end.
    let is_hand_over = "[ \"$1\" = -f ] && input=$(cat) && [[ $input == *'shunt-handover {'* ]] && \
                        PATH=${PATH#*:} nft -f - <<<\"$input\"";
    let shunt = with_slow_commands(&folder, shunt, &["nft"], is_hand_over)?;
    with_proxy(&mut node, &shunt, MODE, &|node, proxy| {
        File::create(folder.join(SLOW_FILE))?;
        proxy.start(node.world())?;
        let has_begun = || folder.join(STARTED_FILE).exists().then_some(());
        Deadline::after(scaled(GONE_WITHIN)).poll(has_begun).context("nothing is handed over")?;
        proxy.stop()?;
        let left = node.run("nft list tables | grep handover || true")?;
        ensure!(left.is_empty(), "packets are kept back: {left}");
        answer(node)?;
        fs::remove_file(folder.join(SLOW_FILE))?;
        take_over(node, proxy, MODE)
    })
}

/// Tries something of a proxy in this mode; it is stopped then and its things are removed.
fn with_proxy(
    node: &mut Node,
    shunt: &Path,
    mode: &str,
    what: &dyn Fn(&mut Node, &mut Proxy) -> Result<()>,
) -> Result<()> {
    let manifests = Manifests::create(node.world().directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
    Slices::for_all_services(&[Host::A1, Host::A2]).place(&manifests)?;
    let fields: Mapping = serde_yaml_ng::from_str(FIELDS)?;
    let mut proxy = Proxy::new(node.world(), shunt, mode, &manifests, &fields)?;
    let ended = what(node, &mut proxy);
    ended.with_context(|| format!("the end of the proxy's log:\n{}", proxy.log_tail(15)))?;
    proxy.stop()?;
    proxy.clean_up(node.world())
}

fn take_over(node: &mut Node, proxy: &mut Proxy, mode: &str) -> Result<()> {
    proxy.start(node.world())?;
    // From these the node's own connections come.
    if mode != IPVS {
        wait_until_gone(node, mode, "-e 10.96.0.80/32")?;
    }
    answer(node)?;
    for host in CALLERS {
        let mut seen = Vec::new();
        for to in [CLUSTER_IP, NODE_PORT] {
            let attempts = node.agent(host)?.connect(ConnectRequest {
                timeout: scaled(ANSWERED_WITHIN),
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

/// Upstream's virtual servers and the rest.
fn put(node: &Node) -> Result<()> {
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
    let put = node.run(UPSTREAM);
    // The error begins with the whole script.
    put.map(drop).map_err(|error| anyhow!("{}", error.to_string().lines().last().unwrap_or_default()))
}

fn hold(node: &mut Node) -> Result<()> {
    for host in CALLERS {
        for to in [CLUSTER_IP, NODE_PORT] {
            let held = ConnectRequest {
                hold: Some(to.into()),
                timeout: scaled(ANSWERED_WITHIN),
                ..ConnectRequest::new(to.parse()?, Transport::Tcp, 1)
            };
            let attempts = node.agent(host)?.connect(held)?;
            ensure!(
                matches!(attempts[..], [Attempt::Answered(_)]),
                "{host} cannot dial {to} by upstream's: {attempts:?}"
            );
        }
    }
    let held =
        ConnectRequest { hold: Some(DNS.into()), ..ConnectRequest::new(DNS.parse()?, Transport::Udp, 1) };
    let attempts = node.agent(Host::A3)?.connect(held)?;
    ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "{attempts:?}");
    Ok(())
}

/// What is held is answered, by the endpoint that it was made to: an agent answers what is held only for its own connections.
fn answer(node: &mut Node) -> Result<()> {
    let tcp = CALLERS.iter().flat_map(|host| [(*host, CLUSTER_IP, ANSWER), (*host, NODE_PORT, ANSWER)]);
    for (host, to, answer) in tcp.chain([(Host::A3, DNS, 0)]) {
        let send = SendRequest { id: to.into(), size: 1, answer, timeout: scaled(ANSWERED_WITHIN) };
        let answer = node.agent(host)?.send(send)?;
        let goes_on = match &answer {
            Attempt::Answered(_) => true,
            // A conversation may be placed anew.
            Attempt::Failed(failure) => to == DNS && failure.kind == FailureKind::Moved,
        };
        ensure!(goes_on, "{host}'s connection to {to} has ended: {answer:?}");
    }
    Ok(())
}

fn wait_until_gone(node: &Node, mode: &str, kept: &str) -> Result<()> {
    let look = || node.run(&format!("mode={mode} kept='{kept}'\n{LEFT}"));
    let mut left = String::new();
    let gone = Deadline::after(scaled(GONE_WITHIN)).poll(|| {
        left = look().unwrap_or_else(|error| format!("{error:#}"));
        left.is_empty().then_some(())
    });
    gone.with_context(|| format!("left of upstream's:\n{left}"))
}
