//! Health check node ports: where a load balancer asks whether this node has endpoints of a Service (upstream's
//! `service_health.go`).
//!
//! One listener a Service, family and address. Those that cannot be opened are tried again; closing one ends its idle
//! connections too, so that no load balancer goes on asking a port that is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
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
    serve::Listener,
};
use serde_json::json;
use tokio::{
    io,
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
};

use super::{
    ProxyHealth,
    listen::{RETRY_AFTER, bind_one_family},
    routes::{NO_SNIFF, status},
};
use crate::{
    model::{HealthCheck, IpFamily, NamespacedName},
    node::NodeEvents,
};

/// On which addresses health check node ports are opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ListenOn {
    /// On all, those that come later included.
    #[default]
    EveryAddress,
    /// On these.
    Addresses(BTreeSet<IpAddr>),
}

/// All that is to be answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthChecks {
    /// The checks of each Service and family.
    pub checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
    /// Where.
    pub listen_on: ListenOn,
}

impl HealthChecks {
    fn listeners(&self) -> BTreeMap<Key, usize> {
        let mut listeners = BTreeMap::new();
        for ((service, family), check) in &self.checks {
            for address in self.addresses(*family) {
                let address = SocketAddr::new(address, check.port.get());
                listeners.insert(Key { service: service.clone(), address }, check.local_endpoints);
            }
        }
        listeners
    }

    fn addresses(&self, family: IpFamily) -> Vec<IpAddr> {
        match (&self.listen_on, family) {
            (ListenOn::EveryAddress, IpFamily::V4) => vec![Ipv4Addr::UNSPECIFIED.into()],
            (ListenOn::EveryAddress, IpFamily::V6) => vec![Ipv6Addr::UNSPECIFIED.into()],
            (ListenOn::Addresses(addresses), _) => {
                addresses.iter().copied().filter(|address| IpFamily::of(*address) == family).collect()
            }
        }
    }
}

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    service: NamespacedName,
    address: SocketAddr,
}

impl Key {
    fn port(&self) -> (NamespacedName, u16) {
        (self.service.clone(), self.address.port())
    }
}

/// Where it is told that a health check node port cannot be opened: on the Service, as upstream does (`SyncServices`).
#[derive(Clone, Debug)]
pub struct TellOf {
    /// Those who look at the Service.
    pub events: NodeEvents,
    /// Each node has its own reason.
    pub node_name: Arc<str>,
}

impl TellOf {
    /// Whether it waits to be written.
    fn refused(&self, key: &Key, error: &str) -> bool {
        let Key { service, address } = key;
        let note = format!(
            "node {} failed to start healthcheck \"{service}\" on port {}: {error}",
            self.node_name,
            address.port()
        );
        self.events.service_warning(service.clone(), "FailedToStartServiceHealthcheck", note)
    }
}

/// Keeps the listeners as the latest [`HealthChecks`] want them; ends when nobody can change these any more.
pub async fn answer_health_checks(
    mut wanted: watch::Receiver<HealthChecks>,
    health: ProxyHealth,
    tell_of: TellOf,
) {
    let (open, refused, told) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
    let mut listeners = Listeners { health, tell_of, open, refused, told };
    loop {
        let latest = wanted.borrow_and_update().listeners();
        listeners.reconcile(&latest).await;
        if listeners.refused.is_empty() {
            if wanted.changed().await.is_err() {
                return;
            }
        } else if let Ok(Err(_)) = tokio::time::timeout(RETRY_AFTER, wanted.changed()).await {
            return;
        }
    }
}

struct Listeners {
    health: ProxyHealth,
    tell_of: TellOf,
    open: BTreeMap<Key, Open>,
    /// Those that could not be opened and were warned of.
    refused: BTreeSet<Key>,
    /// Ports of such, of which there is an Event: one, whatever the number of addresses.
    told: BTreeSet<(NamespacedName, u16)>,
}

struct Open {
    local_endpoints: Arc<AtomicUsize>,
    stop: oneshot::Sender<Infallible>,
    closed: oneshot::Receiver<Infallible>,
}

impl Listeners {
    async fn reconcile(&mut self, wanted: &BTreeMap<Key, usize>) {
        self.refused.retain(|key| wanted.contains_key(key));
        let gone: Vec<_> = self.open.extract_if(.., |key, _| !wanted.contains_key(key)).collect();
        // Closed before any is opened: a port may go from one Service to another.
        for (key, open) in gone {
            tracing::debug!(service = %key.service, address = %key.address, "closing health check node port");
            drop(open.stop);
            let _ = open.closed.await;
        }
        for (key, local_endpoints) in wanted {
            match self.open.get(key) {
                Some(open) => open.local_endpoints.store(*local_endpoints, Ordering::Relaxed),
                None => self.open(key, *local_endpoints),
            }
        }
        let refused: BTreeSet<_> = self.refused.iter().map(Key::port).collect();
        self.told.retain(|port| refused.contains(port));
    }

    fn open(&mut self, key: &Key, local_endpoints: usize) {
        match bind_one_family("health check node port", key.address) {
            Ok(listener) => {
                tracing::debug!(service = %key.service, address = %key.address, "opened health check node port");
                self.refused.remove(key);
                self.open
                    .insert(key.clone(), Open::serve(key, listener, local_endpoints, self.health.clone()));
            }
            Err(error) => {
                let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                // What is not told for want of room is told when it is tried again.
                if !self.told.contains(&key.port()) && self.tell_of.refused(key, &source) {
                    self.told.insert(key.port());
                }
                if self.refused.insert(key.clone()) {
                    tracing::warn!(service = %key.service, error = source, "{error}; trying again");
                }
            }
        }
    }
}

impl Open {
    fn serve(key: &Key, listener: TcpListener, local_endpoints: usize, health: ProxyHealth) -> Self {
        let local_endpoints = Arc::new(AtomicUsize::new(local_endpoints));
        let (stop, stopped) = oneshot::channel();
        let (closing, closed) = oneshot::channel();
        let check = Check { service: key.service.clone(), local_endpoints: local_endpoints.clone(), health };
        let routes = Router::new().fallback(answer).with_state(Arc::new(check));
        let listener = Telling { listener, _closing: closing };
        let server = axum::serve(listener, routes).with_graceful_shutdown(async {
            // Dropping the other end is the signal.
            let _ = stopped.await;
        });
        // Ends when `stop` is dropped.
        tokio::spawn(server.into_future());
        Self { local_endpoints, stop, closed }
    }
}

struct Check {
    service: NamespacedName,
    local_endpoints: Arc<AtomicUsize>,
    health: ProxyHealth,
}

/// Upstream answers any path and method alike.
async fn answer(State(check): State<Arc<Check>>) -> Response {
    let local_endpoints = check.local_endpoints.load(Ordering::Relaxed);
    let healthy = check.health.is_live();
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (HeaderName::from_static("x-load-balancing-endpoint-weight"), local_endpoints.to_string()),
    ];
    let body = body(&check.service, local_endpoints, healthy);
    (status(healthy && local_endpoints != 0), [NO_SNIFF], headers, body).into_response()
}

/// Byte by byte upstream's, fields in its order and tabs where it has them: somebody's health check may look for a word in it.
fn body(service: &NamespacedName, local_endpoints: usize, healthy: bool) -> String {
    let (namespace, name) = (json!(*service.namespace), json!(*service.name));
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace},\n\t\t\"name\": {name}\n\t}},\n\
         \t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    )
}

/// A listener that tells when it is closed; fields are dropped in order.
struct Telling {
    listener: TcpListener,
    _closing: oneshot::Sender<Infallible>,
}

impl Listener for Telling {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        Listener::accept(&mut self.listener).await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
