//! The Kubernetes API as a source: one list and watch for each kind.
//!
//! kube's own watcher is not used, for three reasons. It repeats a watch forever that the server
//! answers with HTTP 410. It waits five minutes for a dead connection. It loses a whole list
//! because of one object that it cannot decode.

mod announcement;
mod backoff;
mod breaker;
mod client;
mod connection;
mod credentials;
mod dial;
mod empty_values;
mod events;
mod failure;
mod gzip;
mod list_reader;
mod no_proxy;
mod object_reader;
mod pool;
mod proxy;
mod reflector;
mod report;
mod request;
mod requests;
mod response;
mod tls;
mod tunnel;
mod wire;

use std::time::Duration;

use tokio::sync::{mpsc::Sender, watch};

#[cfg(feature = "fuzzing")]
pub use self::client::describe_kubeconfig;
pub use self::{
    announcement::announce_dsr,
    client::kube_client,
    credentials::CredentialError,
    events::record_events,
    object_reader::{ObjectReader, PodError},
    proxy::ProxyUrlError,
    requests::{ApiRequest, OnApiRequest, ignore_api_requests},
};
use self::{reflector::Reflector, report::Reporter, request::RequestOptions};
use super::{
    WatchError,
    decode::Kind,
    status::{KindStatus, WatchStatus},
};
use crate::{
    model::{EndpointSlice, Node, Service, ServiceCidr, WatchEvent},
    net::ContentType,
};

/// The time limits of the API source. [`Timing::default`] is for production, tests use shorter
/// ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The limit for the head of a response, and for each part of a list.
    pub response: Duration,
    /// The limit between two lines of a watch. The server sends a bookmark about every minute.
    /// After the limit, the next watch continues from the last version.
    pub idle: Duration,
    /// After a watch was up for this long, the next one follows without a pause, and the next retry
    /// waits for the shortest time again.
    pub settled: Duration,
    /// How long lists are not streamed from a server that refused to.
    pub streaming_retry: Duration,
    /// The pause before the first retry. It doubles with each retry, and grows by a random part of
    /// itself.
    pub first_retry: Duration,
    /// The longest pause before a retry.
    pub last_retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            response: Duration::from_mins(1),
            idle: Duration::from_secs(150),
            settled: Duration::from_secs(10),
            streaming_retry: Duration::from_mins(10),
            // client-go's. A watch that ends as expected does not wait.
            first_retry: Duration::from_millis(800),
            last_retry: Duration::from_secs(30),
        }
    }
}

/// Services and EndpointSlices of all namespaces, and one Node or all, from the Kubernetes API.
pub struct ApiSource {
    client: kube::Client,
    node_name: String,
    timing: Timing,
    has_service_cidrs: bool,
    has_all_nodes: bool,
    content_types: Vec<ContentType>,
    status: watch::Sender<WatchStatus>,
}

impl ApiSource {
    /// Creates a source that uses `client` and watches the Node `node_name`.
    pub fn new(client: kube::Client, node_name: impl Into<String>) -> Self {
        Self {
            client,
            node_name: node_name.into(),
            timing: Timing::default(),
            has_service_cidrs: false,
            has_all_nodes: false,
            content_types: ContentType::ALL.to_vec(),
            status: watch::Sender::default(),
        }
    }

    /// Sets other time limits.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Makes the source watch ServiceCIDRs too, if the server has them and permits to read them.
    #[must_use]
    pub fn with_service_cidrs(mut self) -> Self {
        self.has_service_cidrs = true;
        self
    }

    /// Makes the source watch all Nodes, not only its own.
    #[must_use]
    pub fn with_all_nodes(mut self) -> Self {
        self.has_all_nodes = true;
        self
    }

    /// Asks for objects in these encodings, the preferred one first.
    #[must_use]
    pub fn with_content_types(mut self, content_types: Vec<ContentType>) -> Self {
        self.content_types = content_types;
        self
    }

    /// Returns the source's state.
    pub fn status(&self) -> watch::Receiver<WatchStatus> {
        self.status.subscribe()
    }

    /// Sends the cluster's objects, then their changes, until the receiver is gone. It never
    /// returns an error: whatever the server does, the source tries again.
    pub async fn run(self, tx: Sender<WatchEvent>) -> Result<(), WatchError> {
        // Headless Services have no VIP.
        let with_cluster_ip = Some("spec.clusterIP!=None".to_owned());
        let this_node = (!self.has_all_nodes).then(|| format!("metadata.name={}", self.node_name));
        let services = self.reflector::<Service>(with_cluster_ip, &tx, |status| &mut status.services);
        let slices = self.reflector::<EndpointSlice>(None, &tx, |status| &mut status.endpoint_slices);
        let nodes = self.reflector::<Node>(this_node, &tx, |status| &mut status.nodes);
        let service_cidrs = self
            .has_service_cidrs
            .then(|| self.reflector::<ServiceCidr>(None, &tx, |status| &mut status.service_cidrs).optional());
        drop(tx);
        let service_cidrs = async {
            if let Some(reflector) = service_cidrs {
                reflector.run().await;
            }
        };
        // Requests are sent in this order. The Node comes first, as with kube-proxy. The futures
        // are large, so they are boxed.
        let (nodes, services, slices) =
            (Box::pin(nodes.run()), Box::pin(services.run()), Box::pin(slices.run()));
        tokio::join!(biased; nodes, services, slices, service_cidrs);
        Ok(())
    }

    fn reflector<K: Kind>(
        &self,
        fields: Option<String>,
        tx: &Sender<WatchEvent>,
        status: fn(&mut WatchStatus) -> &mut KindStatus,
    ) -> Reflector<K> {
        let reporter = Reporter::new(K::PLURAL, self.status.clone(), status);
        let labels = K::EXCLUDING_LABEL.map(|label| format!("!{label}"));
        let options = RequestOptions { labels, fields, accept: ContentType::accept(&self.content_types) };
        Reflector::new(self.client.clone(), options, self.timing, tx.clone(), reporter)
    }
}
