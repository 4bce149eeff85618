//! An API server, a source that watches it, and the source's events.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::{Delta, EndpointSlice, ListPart, NamespacedName, Node, Service, WatchEvent},
    net::{ContentType, ProxyVariables},
    watch::{ApiSource, Timing, WatchStatus, ignore_api_requests, kube_client},
};
use serde_json::{Value, json};
use shunt_tests::apiserver::{ApiServer, Interruption, Request, Verb};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};

/// The longest wait in these tests.
pub(crate) const DEADLINE: Duration = Duration::from_mins(1);

/// Returns a timing that soon gives up on a silent server.
pub(crate) fn quick() -> Timing {
    Timing {
        response: Duration::from_millis(500),
        idle: Duration::from_millis(400),
        settled: Duration::from_millis(100),
        streaming_retry: DEADLINE,
        first_retry: Duration::from_millis(10),
        last_retry: Duration::from_millis(100),
    }
}

/// Returns a timing that retries soon, but waits for a silent server.
pub(crate) fn patient() -> Timing {
    Timing { idle: DEADLINE, response: DEADLINE, ..quick() }
}

/// An API server, a source that watches it, and the source's events.
pub(crate) struct Scene {
    pub(crate) server: ApiServer,
    pub(crate) events: mpsc::Receiver<WatchEvent>,
    pub(crate) status: watch::Receiver<WatchStatus>,
    source: JoinHandle<()>,
    pub(crate) services: BTreeMap<NamespacedName, Service>,
    pub(crate) slices: BTreeMap<NamespacedName, EndpointSlice>,
    pub(crate) nodes: BTreeMap<NamespacedName, Node>,
    /// A summary of every event so far.
    pub(crate) log: Vec<String>,
}

impl Scene {
    /// Starts a source that watches `server`, which may be down.
    pub(crate) async fn watching(server: ApiServer, timing: Timing) -> Result<Self> {
        Self::watching_as(ContentType::Protobuf, server, timing).await
    }

    /// Starts a source that watches `server`, which may be down, in this encoding.
    pub(crate) async fn watching_as(
        encoding: ContentType,
        server: ApiServer,
        timing: Timing,
    ) -> Result<Self> {
        let client =
            kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
        let source = ApiSource::new(client, "node1").with_timing(timing);
        Ok(Self::with_source(server, source.with_content_types(vec![encoding])))
    }

    /// Starts a source that reaches `server` somehow.
    pub(crate) fn with_source(server: ApiServer, source: ApiSource) -> Self {
        let status = source.status();
        let (tx, events) = mpsc::channel(16);
        let source = tokio::spawn(async move { source.run(tx).await.expect("sources retry forever") });
        let (services, slices, nodes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { server, events, status, source, services, slices, nodes, log: Vec::new() }
    }

    /// Starts a server with these objects, and a source that has listed them.
    pub(crate) async fn start(objects: &[Value], timing: Timing) -> Result<Self> {
        Self::start_as(ContentType::Protobuf, objects, timing).await
    }

    /// Starts a server with these objects, and a source that has listed them in this encoding.
    pub(crate) async fn start_as(encoding: ContentType, objects: &[Value], timing: Timing) -> Result<Self> {
        let mut scene = Self::watching_as(encoding, server_with(objects).await?, timing).await?;
        scene.synced().await?;
        Ok(scene)
    }

    pub(crate) async fn event(&mut self) -> Result<()> {
        let event = timeout(DEADLINE, self.events.recv()).await;
        let event = event.with_context(|| format!("no event; so far {:?}", self.log))?;
        let event = event.context("the source ended")?;
        self.log.push(brief(&event));
        match event {
            WatchEvent::Services(delta) => delta.apply_to(&mut self.services, |object| object.name.clone()),
            WatchEvent::EndpointSlices(delta) => {
                delta.apply_to(&mut self.slices, |object| object.name.clone());
            }
            WatchEvent::Nodes(delta) => {
                delta.apply_to(&mut self.nodes, |node| node.name.clone().into());
            }
            WatchEvent::ServicePart(part) => part.apply_to(&mut self.services, |object| object.name.clone()),
            WatchEvent::EndpointSlicePart(part) => {
                part.apply_to(&mut self.slices, |object| object.name.clone());
            }
            WatchEvent::ServiceCidrs(_) => {}
        }
        Ok(())
    }

    /// Receives events until `done`.
    pub(crate) async fn until(&mut self, done: impl Fn(&Self) -> bool) -> Result<()> {
        while !done(self) {
            self.event().await?;
        }
        Ok(())
    }

    /// Receives events until each kind was listed.
    pub(crate) async fn synced(&mut self) -> Result<()> {
        let listed = |scene: &Self, start: &str| scene.log.iter().any(|event| event.starts_with(start));
        self.until(|scene| ["services =", "slices =", "nodes ="].iter().all(|start| listed(scene, start)))
            .await?;
        self.status(WatchStatus::synced).await?;
        Ok(())
    }

    pub(crate) async fn status(&mut self, holds: impl FnMut(&WatchStatus) -> bool) -> Result<WatchStatus> {
        let status = timeout(DEADLINE, self.status.wait_for(holds))
            .await
            .context("the status did not change in time")??;
        Ok(status.clone())
    }

    /// Receives events until the Service's first port is `port`.
    pub(crate) async fn port(&mut self, name: &str, port: u16) -> Result<()> {
        self.until(|scene| scene.port_of(name) == Some(port)).await
    }

    pub(crate) fn port_of(&self, name: &str) -> Option<u16> {
        Some(self.services.get(&NamespacedName::parse("default", name).ok()?)?.ports.first()?.port.get())
    }

    pub(crate) fn requests(&self, plural: &str, verb: Verb) -> Vec<Request> {
        let requests = self.server.requests().into_iter();
        requests.filter(|request| request.plural == plural && request.verb == verb).collect()
    }

    /// Waits for a number of requests.
    pub(crate) async fn requested(&self, plural: &str, verb: Verb, times: usize) -> Result<()> {
        let reached = async {
            while self.requests(plural, verb).len() < times {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, reached)
            .await
            .with_context(|| format!("requests: {:?}", self.requests(plural, verb)))
    }

    /// Ends the watches, and waits until each kind was requested by `times` watches in total.
    pub(crate) async fn watch_again(&self, times: usize) -> Result<()> {
        self.server.interrupt(Interruption::End);
        for kind in ["services", "endpointslices", "nodes"] {
            self.requested(kind, Verb::Watch, times).await?;
        }
        Ok(())
    }

    /// Returns the events about Services after the first `skip`.
    pub(crate) fn service_log(&self, skip: usize) -> Vec<&str> {
        let events = self.log.iter().map(String::as_str);
        events.filter(|event| event.starts_with("services")).skip(skip).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.source.abort();
    }
}

/// Summarises an event: `services = a b` for a list, `services + a` for a change, `services - a`
/// for a deletion.
pub(crate) fn brief(event: &WatchEvent) -> String {
    fn text<T>(kind: &str, delta: &Delta<T>, name: impl Fn(&T) -> String) -> String {
        match delta {
            Delta::Replace(list) => {
                format!("{kind} = {}", list.iter().map(name).collect::<Vec<_>>().join(" "))
            }
            Delta::Apply(object) => format!("{kind} + {}", name(object)),
            Delta::Delete(name) => format!("{kind} - {}", name.name),
        }
    }
    fn text_of_part<T>(kind: &str, part: &ListPart<T>) -> String {
        // The last part makes the list complete.
        let sign = if part.is_last { "=" } else { ".." };
        format!("{kind} {sign} {} objects", part.objects.len())
    }
    match event {
        WatchEvent::Services(delta) => text("services", delta, |service| service.name.name.to_string()),
        WatchEvent::EndpointSlices(delta) => text("slices", delta, |slice| slice.name.name.to_string()),
        WatchEvent::Nodes(delta) => text("nodes", delta, |node| node.name.to_string()),
        WatchEvent::ServicePart(part) => text_of_part("services", part),
        WatchEvent::EndpointSlicePart(part) => text_of_part("slices", part),
        WatchEvent::ServiceCidrs(delta) => text("servicecidrs", delta, |object| object.name.to_string()),
    }
}

pub(crate) async fn server_with(objects: &[Value]) -> Result<ApiServer> {
    let server = ApiServer::start("127.0.0.1:0".parse()?).await?;
    for object in objects {
        server.put(object.clone())?;
    }
    Ok(server)
}

pub(crate) fn service(name: &str, port: u16) -> Value {
    json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": name},
        "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": port}]}})
}

pub(crate) fn many_services(number: usize) -> Vec<Value> {
    (0..number).map(|i| service(&format!("s{i:04}"), 80)).collect()
}

pub(crate) fn slice(name: &str) -> Value {
    json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {"name": name},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"port": 80}]})
}

pub(crate) fn node(name: &str) -> Value {
    json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}})
}

pub(crate) fn labelled(mut object: Value, label: &str) -> Value {
    object["metadata"]["labels"] = json!({label: "x"});
    object
}

/// Returns one object of each kind.
pub(crate) fn objects() -> [Value; 3] {
    [service("web", 80), slice("web-1"), node("node1")]
}
