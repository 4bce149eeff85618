//! The load of the scenarios: connections to Services, and endpoints that change.

use std::{thread, time::Duration};

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Order, Protocol},
    apiserver::Interruption,
    small_cluster::{CLUSTER_IP, DNS, NODE_PORT, Slices},
    world::Host,
};

use crate::test_node::TestNode;

/// A Service without endpoints.
const EMPTY: &str = "{apiVersion: v1, kind: Service, metadata: {name: empty, namespace: default}, \
                     spec: {clusterIP: 10.96.0.90, ports: [{port: 80}]}}";
const EMPTY_IP: &str = "10.96.0.90:80";
const PAUSE: Duration = Duration::from_millis(300);

/// Adds a Service whose connections are refused.
pub(super) fn prepare(node: &TestNode) -> Result<()> {
    node.cluster.apply_all(EMPTY)
}

/// Changes the endpoints, then connects from a pod and from outside. The number of connections
/// differs from round to round.
pub(super) fn round(node: &mut TestNode, number: usize) -> Result<()> {
    let pods = [[Host::A1, Host::A2], [Host::A2, Host::A3], [Host::A1, Host::A3]][number % 3];
    change_endpoints(node, &pods)?;
    if number == 0 {
        // The watches begin again, with requests to the API server.
        node.cluster.server().interrupt(Interruption::End);
    }
    thread::sleep(PAUSE);
    let wave = 10 + 8 * (number % 20).min(20 - number % 20);
    for (host, to, protocol, attempts) in [
        (Host::A1, CLUSTER_IP, Protocol::Tcp, wave),
        (Host::A2, DNS, Protocol::Udp, 20),
        (Host::Client, NODE_PORT, Protocol::Tcp, wave / 2),
    ] {
        let attempts = connect(node, host, to, protocol, attempts)?;
        ensure!(attempts.iter().all(Attempt::is_answered), "{to}: {attempts:?}");
    }
    let refused = connect(node, Host::A1, EMPTY_IP, Protocol::Tcp, number % 4)?;
    ensure!(!refused.iter().any(Attempt::is_answered), "{refused:?}");
    thread::sleep(PAUSE);
    Ok(())
}

fn connect(
    node: &mut TestNode,
    host: Host,
    to: &str,
    protocol: Protocol,
    attempts: usize,
) -> Result<Vec<Attempt>> {
    let request = ConnectRequest::new(to.parse()?, protocol, attempts);
    node.world.agent(host)?.connect(ConnectRequest { order: Order::Sequential, ..request })
}

/// Makes these pods the endpoints. The slices carry the time of the change, as those of the
/// endpoints controller do.
fn change_endpoints(node: &TestNode, pods: &[Host]) -> Result<()> {
    let now = node.world.run(Host::Node1, "date --utc +%FT%T.%6NZ")?;
    let changed = format!(
        "namespace: default, annotations: {{endpoints.kubernetes.io/last-change-trigger-time: '{}'}}",
        now.trim()
    );
    node.cluster.apply_all(&Slices::for_all_services(pods).text().replace("namespace: default", &changed))
}
