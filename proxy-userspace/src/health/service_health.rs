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
    Json, Router,
    extract::State,
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
use crate::model::{HealthCheck, IpFamily, NamespacedName};

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

/// Keeps the listeners as the latest [`HealthChecks`] want them; ends when nobody can change these any more.
pub async fn answer_health_checks(mut wanted: watch::Receiver<HealthChecks>, health: ProxyHealth) {
    let mut listeners = Listeners { health, open: BTreeMap::new(), refused: BTreeSet::new() };
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
    open: BTreeMap<Key, Open>,
    /// Those that could not be opened and were warned of.
    refused: BTreeSet<Key>,
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
                if self.refused.insert(key.clone()) {
                    let source =
                        std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
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
    let body = json!({
        "service": { "namespace": *check.service.namespace, "name": *check.service.name },
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": healthy,
    });
    let weight = [("X-Load-Balancing-Endpoint-Weight", local_endpoints.to_string())];
    (status(healthy && local_endpoints != 0), [NO_SNIFF], weight, Json(body)).into_response()
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
