//! What nodes know about each other for direct server return: all Nodes are watched, and each node
//! writes the annotation of its own.

use std::time::Duration;

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::DsrAnnouncement,
    net::ProxyVariables,
    watch::{ApiSource, announce_dsr, ignore_api_requests, kube_client},
};
use serde::Deserialize as _;
use serde_json::{Value, json};
use shunt_tests::apiserver::{ApiServer, Fault, Verb};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use crate::scene::{DEADLINE, Scene, node, objects, patient, server_with};

/// The manifests of the rights: the first object is the role.
const RIGHTS: &str = include_str!("../../../deploy/components/dsr/rbac.yaml");
const ADDRESSES: &str = "192.0.2.11:4790,[2001:db8::11]:4790";
const OTHERS: &str = "10.0.0.11,fd57::11";

fn announcing(name: &str, value: &str) -> Value {
    let mut node = node(name);
    node["metadata"]["annotations"] = json!({"shunt.dev/dsr": value});
    node
}

/// Returns where a Node takes packets of the tunnel, as the source sent it.
fn known(scene: &Scene, name: &str) -> Option<Vec<String>> {
    let node = scene.nodes.values().find(|node| *node.name == *name)?;
    Some(node.dsr.addresses.iter().map(ToString::to_string).collect())
}

#[tokio::test]
async fn all_nodes_are_watched_if_the_source_shall_know_them() -> Result<()> {
    let server = server_with(&objects()).await?;
    server.put(announcing("node2", ADDRESSES))?;
    let client =
        kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
    let source = ApiSource::new(client, "node1").with_timing(patient()).with_all_nodes();
    let mut scene = Scene::with_source(server, source);
    scene.synced().await?;
    assert_eq!(known(&scene, "node1"), Some(Vec::new()));
    assert_eq!(known(&scene, "node2").map(|known| known.join(",")).as_deref(), Some(ADDRESSES));
    for request in scene.requests("nodes", Verb::WatchList) {
        assert_eq!(request.query.get("fieldSelector"), None);
    }
    scene.server.put(announcing("node3", "192.0.2.13:4790"))?;
    scene.until(|scene| known(scene, "node3").is_some_and(|known| known == ["192.0.2.13:4790"])).await?;
    scene.server.put(node("node2"))?;
    scene.until(|scene| known(scene, "node2").is_some_and(|known| known.is_empty())).await?;
    scene.server.delete("Node", "", "node3")?;
    scene.until(|scene| known(scene, "node3").is_none()).await
}

/// A server with the Node node1, which a task announces.
struct Announcing {
    server: ApiServer,
    wanted: watch::Sender<Option<DsrAnnouncement>>,
    task: JoinHandle<()>,
}

impl Announcing {
    async fn start() -> Result<Self> {
        let mut node = node("node1");
        node["metadata"]["annotations"] = json!({"others.example/a": "1"});
        node["spec"] = json!({"podCIDR": "10.244.1.0/24"});
        let server = server_with(&[node]).await?;
        let client =
            kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
        let (wanted, receiver) = watch::channel(None);
        let task = tokio::spawn(async move { announce_dsr(&client, "node1", patient(), receiver).await });
        Ok(Self { server, wanted, task })
    }

    fn want(&self, addresses: &str) -> Result<()> {
        let mut announcement = DsrAnnouncement::default();
        for address in addresses.split(',').filter(|address| !address.is_empty()) {
            match address.parse() {
                Ok(end) => announcement.addresses.push(end),
                Err(_) => drop(announcement.others.insert(address.parse()?)),
            }
        }
        self.wanted.send_replace(Some(announcement));
        Ok(())
    }

    /// Waits until the Node has these annotations, and nothing else has changed.
    async fn has(&self, annotations: &Value) -> Result<()> {
        let written = async {
            while self.server.node("node1").is_none_or(|node| node["metadata"]["annotations"] != *annotations)
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, written).await.with_context(|| format!("{:?}", self.server.node("node1")))?;
        let node = self.server.node("node1").context("the Node")?;
        assert_eq!(node["spec"], json!({"podCIDR": "10.244.1.0/24"}));
        Ok(())
    }

    fn patches(&self) -> usize {
        self.server.requests().iter().filter(|request| request.verb == Verb::Patch).count()
    }
}

#[tokio::test]
async fn a_node_announces_itself_and_takes_that_back() -> Result<()> {
    let scene = Announcing::start().await?;
    scene.want(ADDRESSES)?;
    scene.has(&json!({"others.example/a": "1", "shunt.dev/dsr": ADDRESSES})).await?;
    scene.want("192.0.2.11:4791")?;
    scene.has(&json!({"others.example/a": "1", "shunt.dev/dsr": "192.0.2.11:4791"})).await?;
    let with_others = format!("{ADDRESSES},{OTHERS}");
    scene.want(&with_others)?;
    scene.has(&json!({"others.example/a": "1", "shunt.dev/dsr": with_others})).await?;
    scene.want("")?;
    scene.has(&json!({"others.example/a": "1"})).await?;
    assert_eq!(scene.patches(), 4);
    drop(scene.wanted);
    timeout(DEADLINE, scene.task).await.context("the task goes on")??;
    Ok(())
}

#[tokio::test]
async fn an_announcement_is_repeated_until_the_server_takes_it() -> Result<()> {
    let mut scene = Announcing::start().await?;
    scene.server.inject_fault(Some("nodes"), Some(Verb::Patch), Fault::InternalError, 2);
    scene.server.down().await;
    scene.want(ADDRESSES)?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    scene.server.up().await?;
    scene.has(&json!({"others.example/a": "1", "shunt.dev/dsr": ADDRESSES})).await?;
    assert_eq!(scene.patches(), 3);
    Ok(())
}

/// Returns the role of the component that a cluster with direct server return applies.
fn role_of_the_component() -> Result<Value> {
    let first = serde_yaml_ng::Deserializer::from_str(RIGHTS).next().context("no object")?;
    let role = Value::deserialize(first)?;
    assert_eq!(role["kind"], "ClusterRole");
    Ok(role)
}

#[tokio::test]
async fn an_announcement_needs_the_right_of_the_component_and_no_other() -> Result<()> {
    let scene = Announcing::start().await?;
    let others = json!({"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["watch"]}]});
    scene.server.grant_only(&others)?;
    scene.want(ADDRESSES)?;
    let refused = async {
        while scene.server.refused_requests().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(DEADLINE, refused).await.context("nothing was refused")?;
    assert_eq!(scene.server.refused_requests()[0], "patch nodes of \"\": node1");
    scene.server.grant_only(&role_of_the_component()?)?;
    scene.has(&json!({"others.example/a": "1", "shunt.dev/dsr": ADDRESSES})).await?;
    assert_eq!(scene.server.refused_requests(), Vec::<String>::new());
    assert_eq!(scene.server.unused_rights(), Vec::<String>::new());
    Ok(())
}
