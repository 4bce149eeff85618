//! Serves health check node ports, where a load balancer asks whether this node has endpoints of a
//! Service (upstream's `service_health.go`).
//!
//! There is one listener for each Service, family and address. As with upstream, a Service with a
//! check in one family is answered in both if its port is open on all addresses: Go listens so on
//! `0.0.0.0`. shunt retries listeners that it cannot open. When it closes a listener, it also
//! closes idle connections, so that no load balancer keeps using a port that is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::State,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    BindError, ProxyHealth,
    listen::{RETRY_AFTER, bind, bind_one_family},
    routes::{NO_SNIFF, status},
    server,
};
use crate::{
    model::{HealthCheck, IpFamily, NamespacedName},
    node::NodeEvents,
};

/// The addresses of one family on which health check node ports listen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ListenOn {
    /// All addresses, including those added later.
    #[default]
    EveryAddress,
    /// These addresses only.
    Addresses(BTreeSet<IpAddr>),
}

/// All health checks that shunt must answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthChecks {
    /// The check of each Service and family.
    pub checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
    /// The addresses to listen on, by family; all addresses of a family that is missing.
    pub listen_on: BTreeMap<IpFamily, ListenOn>,
}

impl HealthChecks {
    fn listeners(&self) -> BTreeMap<Key, usize> {
        let mut listeners = BTreeMap::new();
        for ((service, family), check) in &self.checks {
            let is_checked = |family| self.checks.contains_key(&(service.clone(), family));
            let is_alone = !IpFamily::ALL.into_iter().all(is_checked);
            for address in self.addresses(*family) {
                let both_families = is_alone && address.is_unspecified();
                // On a node without IPv6 only this one exists.
                let address = if both_families { IpFamily::V4.unspecified() } else { address };
                let address = SocketAddr::new(address, check.port.get());
                let key = Key { service: service.clone(), address, both_families };
                listeners.insert(key, check.local_endpoints);
            }
        }
        listeners
    }

    fn addresses(&self, family: IpFamily) -> Vec<IpAddr> {
        match self.listen_on.get(&family) {
            None | Some(ListenOn::EveryAddress) => vec![family.unspecified()],
            Some(ListenOn::Addresses(addresses)) => addresses.iter().copied().collect(),
        }
    }
}

/// Identifies one listener.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    service: NamespacedName,
    address: SocketAddr,
    /// The address is the wildcard, and stands for those of both families.
    both_families: bool,
}

impl Key {
    fn bind(&self) -> Result<TcpListener, BindError> {
        const SERVER: &str = "health check node port";
        if self.both_families { bind(SERVER, self.address) } else { bind_one_family(SERVER, self.address) }
    }

    fn service_and_port(&self) -> (NamespacedName, u16) {
        (self.service.clone(), self.address.port())
    }
}

/// Writes an Event on the Service if shunt cannot open a health check node port, as upstream does
/// (`SyncServices`).
#[derive(Clone, Debug)]
pub struct PortFailureEvents {
    /// Takes the Events.
    pub events: NodeEvents,
    /// The name of this node, which the Event names.
    pub node_name: Arc<str>,
}

impl PortFailureEvents {
    /// Returns true if the Event was queued.
    fn report(&self, key: &Key, error: &str) -> bool {
        let Key { service, address, .. } = key;
        let note = format!(
            "node {} failed to start healthcheck \"{service}\" on port {}: {error}",
            self.node_name,
            address.port()
        );
        self.events.service_warning(service.clone(), "FailedToStartServiceHealthcheck", "Listen", note)
    }
}

/// Opens and closes listeners so that they match the latest [`HealthChecks`]. Returns when the
/// sender of the checks is gone.
pub async fn serve_health_checks(
    mut checks: watch::Receiver<HealthChecks>,
    health: ProxyHealth,
    events: PortFailureEvents,
) {
    let (open, failed, reported) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
    let mut listeners = Listeners { health, events, open, failed, reported };
    loop {
        let latest = checks.borrow_and_update().listeners();
        listeners.reconcile(&latest).await;
        if listeners.failed.is_empty() {
            if checks.changed().await.is_err() {
                return;
            }
        } else if let Ok(Err(_)) = tokio::time::timeout(RETRY_AFTER, checks.changed()).await {
            return;
        }
    }
}

struct Listeners {
    health: ProxyHealth,
    events: PortFailureEvents,
    open: BTreeMap<Key, OpenListener>,
    /// Listeners that shunt could not open and has logged.
    failed: BTreeSet<Key>,
    /// Failed ports for which an Event was queued: one Event for each port, whatever the number of
    /// addresses.
    reported: BTreeSet<(NamespacedName, u16)>,
}

struct OpenListener {
    local_endpoints: Arc<AtomicUsize>,
    /// Stops the server when it is dropped.
    stop: DropGuard,
    /// Ends when the listener is closed.
    server: JoinHandle<()>,
}

impl Listeners {
    async fn reconcile(&mut self, latest: &BTreeMap<Key, usize>) {
        self.failed.retain(|key| latest.contains_key(key));
        let obsolete: Vec<_> = self.open.extract_if(.., |key, _| !latest.contains_key(key)).collect();
        // All obsolete listeners close first, because a port may move from one Service to another.
        for (key, open) in obsolete {
            tracing::debug!(service = %key.service, address = %key.address, "closing health check node port");
            drop(open.stop);
            let _ = open.server.await;
        }
        for (key, local_endpoints) in latest {
            match self.open.get(key) {
                Some(open) => open.local_endpoints.store(*local_endpoints, Ordering::Relaxed),
                None => self.open(key, *local_endpoints),
            }
        }
        let failed: BTreeSet<_> = self.failed.iter().map(Key::service_and_port).collect();
        self.reported.retain(|port| failed.contains(port));
    }

    fn open(&mut self, key: &Key, local_endpoints: usize) {
        match key.bind() {
            Ok(listener) => {
                tracing::debug!(service = %key.service, address = %key.address, "opened health check node port");
                self.failed.remove(key);
                self.open.insert(
                    key.clone(),
                    OpenListener::serve(key, listener, local_endpoints, self.health.clone()),
                );
            }
            Err(error) => {
                let source = error.source.to_string();
                // If the queue of Events has no room, the Event is queued at the next retry.
                if !self.reported.contains(&key.service_and_port()) && self.events.report(key, &source) {
                    self.reported.insert(key.service_and_port());
                }
                if self.failed.insert(key.clone()) {
                    tracing::warn!(service = %key.service, error = source, "{error}; shunt tries again every {} s", RETRY_AFTER.as_secs());
                }
            }
        }
    }
}

impl OpenListener {
    fn serve(key: &Key, listener: TcpListener, local_endpoints: usize, health: ProxyHealth) -> Self {
        let local_endpoints = Arc::new(AtomicUsize::new(local_endpoints));
        let check =
            CheckState { service: key.service.clone(), local_endpoints: local_endpoints.clone(), health };
        let routes = Router::new().fallback(answer).with_state(Arc::new(check));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let server = tokio::spawn(async move {
            let server = server::run(listener, routes, server::HEALTH_CHECK_NODE_PORT);
            stopped.run_until_cancelled(server).await;
        });
        Self { local_endpoints, stop: stop.drop_guard(), server }
    }
}

struct CheckState {
    service: NamespacedName,
    local_endpoints: Arc<AtomicUsize>,
    health: ProxyHealth,
}

/// Upstream answers every path and method in the same way.
async fn answer(State(check): State<Arc<CheckState>>) -> Response {
    let local_endpoints = check.local_endpoints.load(Ordering::Relaxed);
    let healthy = check.health.is_healthy();
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (HeaderName::from_static("x-load-balancing-endpoint-weight"), local_endpoints.to_string()),
    ];
    let body = body(&check.service, local_endpoints, healthy);
    (status(healthy && local_endpoints != 0), [NO_SNIFF], headers, body).into_response()
}

/// Returns the body, byte by byte as upstream's, with fields in its order and tabs in the same
/// places: a health check may search for a word in it.
fn body(service: &NamespacedName, local_endpoints: usize, healthy: bool) -> String {
    let (namespace, name) = (json!(*service.namespace), json!(*service.name));
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace},\n\t\t\"name\": {name}\n\t}},\n\
         \t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    )
}
