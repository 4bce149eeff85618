//! API servers of all versions of Kubernetes that shunt supports. docs/differences.md has the
//! same table.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::{Model, ModelSettings, Snapshot, WatchEvent},
    net::{NodeFacts, ProxyVariables},
    watch::{ApiSource, ignore_api_requests, kube_client},
};
use serde_json::{Value, json};
use shunt_tests::apiserver::{ApiServer, KubernetesVersion, Request, Verb};
use tokio::{
    sync::mpsc::{self, Receiver},
    time::timeout,
};

use crate::scene::{DEADLINE, brief, patient};

/// What comes of [`objects`] from API servers of some versions.
struct Expected {
    /// The minor versions.
    minor: &'static [u32],
    /// Lists are streamed.
    streams: bool,
    /// The list of Services. Those without a cluster IP are left out where the server can.
    services: &'static str,
    /// The addresses of the Services, by `ipMode`.
    frontends: &'static [&'static str],
    /// The endpoints of the Services, by the hints for zones or for nodes.
    endpoints: &'static [&'static str],
    service_cidrs: &'static [&'static str],
}

const ALL_SERVICES: &str = "services = headless web";
const WITH_CLUSTER_IP: &str = "services = web";
const ALL_ADDRESSES: &[&str] = &["10.96.0.10", "192.0.2.1"];
const WITHOUT_PROXY: &[&str] = &["10.96.0.10"];
const IN_ZONE: &[&str] = &["10.244.0.1", "10.244.0.2"];
const ON_NODE: &[&str] = &["10.244.0.1"];
const RANGES: &[&str] = &["10.96.0.0/16"];

/// What comes of them from the newest API server.
const NEWEST: Expected = Expected {
    minor: &[37],
    streams: true,
    services: WITH_CLUSTER_IP,
    frontends: WITHOUT_PROXY,
    endpoints: ON_NODE,
    service_cidrs: RANGES,
};

const VERSIONS: [Expected; 7] = [
    Expected {
        minor: &[28, 29],
        streams: false,
        services: ALL_SERVICES,
        frontends: ALL_ADDRESSES,
        endpoints: IN_ZONE,
        service_cidrs: &[],
    },
    Expected {
        minor: &[30],
        streams: false,
        services: ALL_SERVICES,
        endpoints: IN_ZONE,
        service_cidrs: &[],
        ..NEWEST
    },
    Expected { minor: &[31], streams: false, endpoints: IN_ZONE, service_cidrs: &[], ..NEWEST },
    Expected { minor: &[32], endpoints: IN_ZONE, service_cidrs: &[], ..NEWEST },
    Expected { minor: &[33], streams: false, endpoints: IN_ZONE, ..NEWEST },
    Expected { minor: &[34, 35, 36], ..NEWEST },
    NEWEST,
];

/// Returns a Service whose load balancer is a proxy, a headless one, their slice, and what decides
/// about them.
fn objects() -> Vec<Value> {
    let endpoint = |address: &str, node: &str, zone: &str| {
        json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true},
            "hints": {"forZones": [{"name": zone}], "forNodes": [{"name": node}]}})
    };
    vec![
        json!({"kind": "Node", "apiVersion": "v1", "metadata": {
            "name": "node1", "labels": {"topology.kubernetes.io/zone": "z1"}}}),
        json!({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1", "metadata": {"name": "kubernetes"},
            "spec": {"cidrs": ["10.96.0.0/16"]}}),
        web(80),
        json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": "headless"},
            "spec": {"clusterIP": "None", "clusterIPs": ["None"], "ports": [{"port": 80}]}}),
        json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"port": 8080}], "endpoints": [
            endpoint("10.244.0.1", "node1", "z1"),
            endpoint("10.244.0.2", "node2", "z1"),
            endpoint("10.244.0.3", "node3", "z2"),
        ]}),
    ]
}

fn web(port: u16) -> Value {
    json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": "web"},
        "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.10", "ports": [{"port": port}]},
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "Proxy"}]}}})
}

/// A model that follows a source.
struct Follower {
    model: Model,
    events: Receiver<WatchEvent>,
    /// A summary of every event so far.
    log: Vec<String>,
}

impl Follower {
    async fn watching(server: &ApiServer) -> Result<Self> {
        let client =
            kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
        let source = ApiSource::new(client, "node1").with_timing(patient()).with_service_cidrs();
        let (tx, events) = mpsc::channel(16);
        tokio::spawn(source.run(tx));
        let mut model =
            Model::new(ModelSettings { node_name: Arc::from("node1"), ..ModelSettings::default() });
        model.set_node_facts(NodeFacts::default());
        Ok(Self { model, events, log: Vec::new() })
    }

    /// Applies events until the Snapshot is as expected.
    async fn until(&mut self, holds: impl Fn(&Snapshot) -> bool) -> Result<&Snapshot> {
        loop {
            self.model.resolve();
            if self.model.is_synced() && holds(self.model.snapshot()) {
                return Ok(self.model.snapshot());
            }
            let event = timeout(DEADLINE, self.events.recv()).await;
            let event = event.with_context(|| format!("{:#?}", self.model.snapshot()))?;
            let event = event.context("the source ended")?;
            self.log.push(brief(&event));
            self.model.apply(event);
        }
    }
}

/// Returns the addresses of the frontends and of the endpoints, in this order.
fn addresses(snapshot: &Snapshot) -> [Vec<String>; 2] {
    let ports = || snapshot.ports.values();
    let frontends = ports().flat_map(|port| &port.frontends).filter_map(|frontend| frontend.address);
    let endpoints = ports().flat_map(|port| &port.cluster_endpoints).map(|endpoint| endpoint.address.ip());
    [frontends.map(|ip| ip.to_string()).collect(), endpoints.map(|ip| ip.to_string()).collect()]
}

async fn check(version: KubernetesVersion, expected: &Expected) -> Result<()> {
    let server = ApiServer::start("127.0.0.1:0".parse()?).await?;
    server.speak_as(version);
    for object in objects() {
        server.put(object)?;
    }
    let mut follower = Follower::watching(&server).await?;
    let has_ranges = |snapshot: &Snapshot| {
        let ranges: Vec<_> = snapshot.node.service_cidrs.iter().map(ToString::to_string).collect();
        ranges == expected.service_cidrs
    };
    let snapshot = follower.until(has_ranges).await?;
    assert_eq!(addresses(snapshot), [expected.frontends, expected.endpoints]);
    assert!(follower.log.iter().any(|event| event == expected.services), "{:?}", follower.log);
    server.put(web(81))?;
    follower.until(|snapshot| snapshot.ports.values().any(|port| port.frontends[0].port.get() == 81)).await?;
    let needed = |request: &Request| request.plural != "servicecidrs";
    let is_list = |request: &Request| request.verb == Verb::List && needed(request);
    assert_eq!(server.requests().iter().any(is_list), !expected.streams, "a list that is not streamed");
    Ok(())
}

#[tokio::test]
async fn every_supported_version_is_listed_and_watched() -> Result<()> {
    for expected in &VERSIONS {
        for minor in expected.minor {
            println!("Kubernetes 1.{minor}");
            check(KubernetesVersion(*minor), expected).await.with_context(|| format!("1.{minor}"))?;
        }
    }
    Ok(())
}
