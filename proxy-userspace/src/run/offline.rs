//! `shunt explain --manifests`: explains without a daemon and without a kernel.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, bail};
use proxy_userspace::{
    config::{Config, Environment, Flags},
    dataplane::Mode,
    explain::{Explanation, NamedQuestion, Situation, Unresolved, explain},
    inspect::OfflineNode,
    mode::BackstopPolicy,
    model::{Delta, LinkAddress, Model, NodeFacts, Protocol, WatchEvent},
    watch::{ManifestSource, find_pod},
};
use tokio::sync::mpsc;

use super::standard_error::tell;

/// More than the kinds of objects, of which the source sends a list each.
const LISTS: usize = 8;
/// The most Nodes that an error names.
const MOST_NAMES: usize = 10;
/// The link of the Node's addresses, whose real name does not matter.
const LINK: &str = "eth0";

/// Explains a connection on a node of which only manifests are known. What cannot be read in them
/// is said on standard error, and the rest counts.
pub(super) async fn explained(node: &OfflineNode, question: &NamedQuestion) -> anyhow::Result<Explanation> {
    let config = config(node)?;
    let mut model = Model::new(config.model.clone());
    let nodes = read(node, &mut model).await?;
    if let Some(name) = model.missing_node() {
        let (name, of) = (node.name.as_deref().unwrap_or(name), node.manifests.display());
        if nodes.is_empty() {
            bail!("no Node {name} in {of}, nor any other");
        }
        bail!("no Node {name} in {of}: name one of {} with --node", nodes.join(", "));
    }
    model.set_node_facts(facts(&model));
    model.resolve();
    let is_needed = match config.ebpf.backstop {
        BackstopPolicy::Never => false,
        BackstopPolicy::Always => true,
        // What else needs one is not in manifests.
        BackstopPolicy::Auto => model.snapshot().ports.keys().any(|key| key.name.protocol == Protocol::Sctp),
    };
    let has_backstop = config.mode == Mode::Ebpf && is_needed;
    let backstop = has_backstop.then_some(Mode::Nftables);
    let situation = Situation { model: &model, mode: config.mode, backstop };
    let question = match question.resolve(&model, None) {
        Err(Unresolved::Pod(name)) => {
            let pod = find_pod(&node.manifests, &name)?;
            let missing =
                || format!("no Pod {name} in {}: name its address instead", node.manifests.display());
            question.resolve(&model, Some(&pod.with_context(missing)?))?
        }
        resolved => resolved?,
    };
    Ok(explain(situation, &question))
}

fn config(node: &OfflineNode) -> anyhow::Result<Config> {
    let manifests = node.manifests.display().to_string();
    let mut words = vec!["shunt".to_owned(), "--manifests".to_owned(), manifests];
    words.extend(["--mode".to_owned(), node.mode.name().to_owned(), "--cgroup-root=/".to_owned()]);
    let named = node.name.iter().flat_map(|name| ["--hostname-override".to_owned(), name.clone()]);
    words.extend(named);
    let file = node.config.iter().flat_map(|file| ["--config".to_owned(), file.display().to_string()]);
    words.extend(file);
    Ok(Config::load(&Flags::parse(words)?, &Environment::of_this_process())?)
}

/// Reads the manifests. Returns the names of the Nodes.
async fn read(node: &OfflineNode, model: &mut Model) -> anyhow::Result<Vec<String>> {
    let source = ManifestSource::new(&node.manifests);
    let mut status = source.status();
    let (to_model, mut lists) = mpsc::channel(LISTS);
    let reading = tokio::spawn(source.run(to_model));
    if status.wait_for(|status| status.nodes.synced).await.is_err() {
        reading.await??;
        bail!("cannot read {}", node.manifests.display());
    }
    let mut names = Vec::new();
    while let Ok(list) = lists.try_recv() {
        if let WatchEvent::Nodes(Delta::Replace(nodes)) = &list {
            names.extend(nodes.iter().take(MOST_NAMES).map(|node| node.name.to_string()));
        }
        model.apply(list);
    }
    for error in &status.borrow().manifest_errors.texts {
        tell(format_args!("left out: {error}"));
    }
    reading.abort();
    Ok(names)
}

/// Returns the addresses of the Node, as those of a link.
fn facts(model: &Model) -> NodeFacts {
    let of_node =
        model.node().into_iter().flat_map(|node| &node.addresses).map(|(_, address)| (LINK, *address));
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let all = of_node.chain(loopback.map(|address| ("lo", address)));
    let mut addresses: Vec<LinkAddress> = all
        .map(|(link, address)| {
            let prefix_len = if address.is_ipv4() { 32 } else { 128 };
            LinkAddress { link: link.into(), address, prefix_len }
        })
        .collect();
    addresses.sort();
    NodeFacts { addresses, ..NodeFacts::default() }
}
