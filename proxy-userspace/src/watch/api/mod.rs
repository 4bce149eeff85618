//! The Kubernetes API as a source: one list-and-watch for each kind.
//!
//! kube's own watcher is not used: it repeats a watch that the server answers with HTTP 410 for ever, waits five minutes
//! for a dead connection, and one object that does not decode costs it the list.

mod client;
mod failure;
mod kind;
mod lines;
mod record;
mod reflector;
mod report;
mod retries;
mod wire;

use std::time::Duration;

use tokio::sync::{mpsc::Sender, watch};

pub use self::{client::kube_client, record::record_events};
use self::{kind::Selectors, reflector::Reflector, report::Reporter};
use super::{
    WatchError,
    decode::Kind,
    status::{self, KindStatus, WatchStatus},
};
use crate::model::{EndpointSlice, Node, Service, WatchEvent};

/// How long the API source waits for what. [`Timing::default`] is for production; tests hurry it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// For the head of a response, and between two parts of a list.
    pub response: Duration,
    /// Between two lines of a watch, bookmarks included, which the server sends about every minute. After it the watch
    /// is started anew from where it stopped.
    pub idle: Duration,
    /// Once a watch has been up for so long, retries begin with the shortest wait again.
    pub settled: Duration,
    /// The wait before the first retry. It doubles with each, and up to as much again is added at random.
    pub first_retry: Duration,
    /// The longest wait before a retry.
    pub last_retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            response: Duration::from_mins(1),
            idle: Duration::from_secs(150),
            settled: Duration::from_secs(10),
            first_retry: Duration::from_millis(250),
            last_retry: Duration::from_secs(30),
        }
    }
}

/// Services and EndpointSlices of all namespaces, and one Node, from the Kubernetes API.
#[derive(Debug)]
pub struct ApiSource {
    client: DebuggableClient,
    node_name: String,
    timing: Timing,
    status: watch::Sender<WatchStatus>,
}

impl ApiSource {
    /// A source that uses `client` and watches the Node `node_name`.
    pub fn new(client: kube::Client, node_name: impl Into<String>) -> Self {
        Self {
            client: DebuggableClient(client),
            node_name: node_name.into(),
            timing: Timing::default(),
            status: status::channel(),
        }
    }

    /// The same source with other waiting times.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// The source's state.
    pub fn status(&self) -> watch::Receiver<WatchStatus> {
        self.status.subscribe()
    }

    /// Sends the cluster's objects and then their changes until the receiver is gone. Whatever the server does, it goes
    /// on trying; nothing is an error here.
    pub async fn run(self, tx: Sender<WatchEvent>) -> Result<(), WatchError> {
        let by_label =
            Selectors::labels("!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name");
        let this_node = Selectors::fields(format!("metadata.name={}", self.node_name));
        let services = self.reflector::<Service>(by_label.clone(), &tx, |status| &mut status.services);
        let slices = self.reflector::<EndpointSlice>(by_label, &tx, |status| &mut status.endpoint_slices);
        let nodes = self.reflector::<Node>(this_node, &tx, |status| &mut status.nodes);
        drop(tx);
        tokio::join!(services.run(), slices.run(), nodes.run());
        Ok(())
    }

    fn reflector<K: Kind>(
        &self,
        selectors: Selectors,
        tx: &Sender<WatchEvent>,
        status: fn(&mut WatchStatus) -> &mut KindStatus,
    ) -> Reflector<K> {
        let reporter = Reporter::new(K::PLURAL, self.status.clone(), status);
        Reflector::new(self.client.0.clone(), selectors, self.timing, tx.clone(), reporter)
    }
}

/// kube's client has no `Debug`.
struct DebuggableClient(kube::Client);

impl std::fmt::Debug for DebuggableClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}
