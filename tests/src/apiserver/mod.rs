//! An API server for tests: real HTTP lists and watches of the objects that a test stores, and
//! faults that it injects.
//!
//! It follows the recordings of a kube-apiserver 1.36 in `recordings/`: consistent pages, watches
//! with selectors, bookmarks, streaming lists, expired history, and the bodies of errors. Answers
//! are JSON or protobuf, as the client prefers. It has one user, whose rights may be those of a
//! role, no defaulting and no admission. Only Events can be created, and only Nodes patched.

mod encoding;
mod faults;
mod kept_list;
mod list;
mod patch;
mod protobuf;
mod request;
mod responses;
mod rights;
mod routes;
mod selectors;
mod store;
mod stored;
mod version;
mod watch;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context as _, Result};
use http::HeaderValue;
use serde_json::Value;
use tokio::{
    net::TcpListener,
    sync::{broadcast, watch as channel},
    task::JoinHandle,
};

pub use self::{
    encoding::Encoding,
    faults::{Fault, Interruption, Verb, WrongVersion},
    request::{Query, Request},
    store::Resource,
    version::KubernetesVersion,
};
use self::{faults::FaultRule, rights::Rights, routes::serve, store::Store};

/// A running server. It stops when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: Option<JoinHandle<()>>,
}

/// The data of a server at some time.
#[derive(Clone, Debug)]
pub struct Backup(Store);

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    faults: Mutex<Vec<FaultRule>>,
    requests: Mutex<Vec<Request>>,
    events: Mutex<Vec<Value>>,
    changed: channel::Sender<u64>,
    interruptions: broadcast::Sender<Interruption>,
    down: channel::Sender<bool>,
    has_no_cache: AtomicBool,
    version: Mutex<KubernetesVersion>,
    /// The only token that is accepted.
    token: Mutex<Option<String>>,
    /// The rights of the client. `None` for all.
    rights: Mutex<Option<Rights>>,
    /// The `Date` of answers. `None` for the time of this machine.
    date: Mutex<Option<HeaderValue>>,
}

impl ApiServer {
    /// Starts a server without objects. With port 0, the kernel picks a free port.
    pub async fn start(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
        Self::start_on(listener)
    }

    /// Starts a server on a listening socket, for example one in a network namespace.
    pub fn start_on(listener: TcpListener) -> Result<Self> {
        let shared = Arc::new(Shared {
            store: Mutex::new(Store::new()),
            faults: Mutex::default(),
            requests: Mutex::default(),
            events: Mutex::default(),
            changed: channel::Sender::new(0),
            interruptions: broadcast::Sender::new(16),
            down: channel::Sender::new(false),
            has_no_cache: AtomicBool::new(false),
            version: Mutex::default(),
            token: Mutex::default(),
            rights: Mutex::default(),
            date: Mutex::default(),
        });
        let address = listener.local_addr().context("local address")?;
        let serving = Some(serve(listener, Arc::clone(&shared)));
        Ok(Self { address, shared, serving })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the server's URL, for `--master`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Creates or replaces an object, and returns its version. The object needs `kind`,
    /// `apiVersion` and a name.
    pub fn put(&self, mut object: Value) -> Result<u64> {
        self.shared.version().drop_fields(&mut object);
        self.change_store(|store| store.put(object))
    }

    /// Deletes an object, and returns the version of the deletion. For cluster-scoped kinds, the
    /// namespace is ignored.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<u64> {
        self.change_store(|store| store.delete(kind, namespace, name))
    }

    /// Stores a recorded object with its version, without an event for watches.
    pub fn insert_recorded(&self, object: Value) -> Result<()> {
        self.shared.store().insert_recorded(object)
    }

    /// Raises the current version, as changes of other resources do.
    pub fn advance_to(&self, version: u64) {
        self.shared.store().advance_to(version);
    }

    /// Deletes all history, so that older versions and continue tokens have expired.
    pub fn compact(&self) {
        self.shared.store().compact();
    }

    /// Answers lists by pages from now on, as a server with `--watch-cache=false` does.
    pub fn disable_cache(&self) {
        self.shared.has_no_cache.store(true, Ordering::Relaxed);
    }

    /// Answers as this version of Kubernetes from now on, and stores objects as it does.
    pub fn speak_as(&self, version: KubernetesVersion) {
        *lock(&self.shared.version) = version;
    }

    /// Accepts only this bearer token from now on.
    pub fn require_token(&self, token: &str) {
        *lock(&self.shared.token) = Some(token.to_owned());
    }

    /// Answers with this `Date` from now on; `None` for the time of this machine.
    pub fn set_date(&self, date: Option<HeaderValue>) {
        *lock(&self.shared.date) = date;
    }

    /// Injects a fault into the next `times` requests for this resource (None: all) and verb (None:
    /// any).
    pub fn inject_fault(
        &self,
        plural: Option<&'static str>,
        verb: Option<Verb>,
        faults: Fault,
        times: usize,
    ) {
        lock(&self.shared.faults).push(FaultRule { plural, verb, faults, times });
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        lock(&self.shared.faults).clear();
    }

    /// Interrupts the watches that are open now.
    pub fn interrupt(&self, interruption: Interruption) {
        // An error means that no watch is open.
        let _ = self.shared.interruptions.send(interruption);
    }

    /// Returns a copy of all data.
    pub fn backup(&self) -> Backup {
        Backup(self.shared.store().clone())
    }

    /// Restores older data with its versions, as in a cluster that is restored from a backup. The
    /// server should be down.
    pub fn restore_backup(&self, backup: Backup) {
        *self.shared.store() = backup.0;
    }

    /// Returns the Events that were created so far.
    pub fn events(&self) -> Vec<Value> {
        lock(&self.shared.events).clone()
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.shared.requests).clone()
    }

    /// Stops the server: connections break and new ones are refused. The objects stay.
    pub async fn down(&mut self) {
        self.shared.down.send_replace(true);
        if let Some(serving) = self.serving.take() {
            let _ = serving.await;
        }
    }

    /// Starts the server again at the same address.
    pub async fn up(&mut self) -> Result<()> {
        let listener = TcpListener::bind(self.address).await.context("listen again")?;
        self.up_on(listener);
        Ok(())
    }

    /// Starts the server again on a socket that listens at the same address.
    pub fn up_on(&mut self, listener: TcpListener) {
        self.shared.down.send_replace(false);
        self.serving = Some(serve(listener, Arc::clone(&self.shared)));
    }

    /// Returns a Node.
    pub fn node(&self, name: &str) -> Option<Value> {
        self.shared.store().get("nodes", format!("/{name}")).map(|node| node.value().clone())
    }

    fn change_store<T>(&self, change: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        self.shared.change_store(change)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.shared.down.send_replace(true);
    }
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    fn change_store<T>(&self, change: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        let result = change(&mut self.store());
        self.changed.send_modify(|changes| *changes += 1);
        result
    }

    fn version(&self) -> KubernetesVersion {
        *lock(&self.version)
    }

    fn accepts_token(&self, request: &Request) -> bool {
        let sent = request.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
        lock(&self.token).as_deref().is_none_or(|token| sent == Some(token))
    }

    fn fault(&self, request: &Request) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let fault = faults.iter_mut().find(|fault| fault.matches(request))?;
        fault.times -= 1;
        Some(fault.faults)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
