//! The sources of Services, EndpointSlices and Nodes: a directory of manifests, or the Kubernetes
//! API.
//!
//! Both send the same [`WatchEvent`](crate::model::WatchEvent)s on a bounded channel: first the
//! list of each of the three kinds, a long one in parts, then changes. ServiceCIDRs, which not all
//! clusters have, may come at any time. No source removes objects because it cannot read them: the
//! last known state stays. There is one exception: an object from the API that cannot be decoded
//! keeps its last state during a watch, but the next list replaces all objects and lacks it.
#![forbid(unsafe_code)]

mod api;
mod decode;
mod manifests;
mod status;

use std::{io, path::PathBuf};

#[cfg(feature = "fuzzing")]
pub use self::{
    api::describe_kubeconfig,
    manifests::{Manifest, read_manifest},
};
pub use self::{
    api::{
        ApiRequest, ApiSource, CredentialError, ObjectReader, OnApiRequest, PodError, ProxyUrlError, Timing,
        announce_dsr, ignore_api_requests, kube_client, record_events,
    },
    manifests::{ManifestSource, find_pod},
    status::{KindStatus, WatchStatus},
};

/// Why a source cannot start. A source that runs reports errors in [`WatchStatus`] and the log, and
/// continues.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The manifests directory does not exist or cannot be watched.
    #[error("cannot read manifests directory {}", path.display())]
    ManifestDir {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kubeconfig file cannot be used.
    #[error("cannot use kubeconfig {}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<kube::config::KubeconfigError>,
    },
    /// The cluster of the kubeconfig has no server, and there is no `--master`.
    #[error(
        "cannot use kubeconfig {}: its cluster has no server; set it to a URL like https://192.0.2.1:6443, or set \
         --master",
        path.display()
    )]
    NoServer {
        /// The file.
        path: PathBuf,
    },
    /// The `proxy-url` of the kubeconfig cannot be used.
    #[error("cannot use proxy-url {url:?} of kubeconfig {}", path.display())]
    ProxyUrl {
        /// The file.
        path: PathBuf,
        /// The value, without credentials.
        url: String,
        /// The cause.
        source: ProxyUrlError,
    },
    /// Neither `--kubeconfig` nor `--master` is set, and the process does not run in a pod.
    #[error(
        "neither --kubeconfig nor --master is set, and the in-cluster configuration cannot be used, which needs the \
         variables KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, and the service account of a pod"
    )]
    InCluster(#[source] Box<kube::config::InClusterError>),
    /// `--master` is not a URL.
    #[error("cannot use --master {value:?}: not a URL like https://192.0.2.1:6443")]
    MasterUrl {
        /// The value of the flag.
        value: String,
        /// The cause.
        source: http::uri::InvalidUri,
    },
    /// There are no credentials for the API server.
    #[error("cannot get credentials for the Kubernetes API")]
    Credentials(#[source] CredentialError),
    /// The HTTP client cannot be created, because of certificates for example.
    #[error("cannot create a client for the Kubernetes API")]
    Client(#[source] Box<kube::Error>),
}
