//! Where Services, EndpointSlices and Nodes come from: a directory of manifests, or the Kubernetes API.
//!
//! Both end in the same [`WatchEvent`](crate::model::WatchEvent)s on a bounded channel: one `Replace` for each of the
//! three kinds first, then changes; of ServiceCIDRs, which not all clusters have, whenever they come. Neither ever takes objects away because of an error: the last known state stays.
#![forbid(unsafe_code)]

mod api;
mod decode;
mod manifests;
mod status;

use std::{io, path::PathBuf};

pub use self::{
    api::{ApiSource, Timing, kube_client, record_events},
    manifests::ManifestSource,
    status::{KindStatus, WatchStatus},
};

/// What keeps a source from starting. Once it runs, it reports through [`WatchStatus`] and the log, and goes on.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The manifests directory is not there or cannot be watched.
    #[error("cannot read manifests directory {}", path.display())]
    ManifestDir {
        /// The directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The kubeconfig file cannot be used.
    #[error("cannot use kubeconfig {}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<kube::config::KubeconfigError>,
    },
    /// Neither `--kubeconfig` nor `--master` were given, and this is not a pod.
    #[error("no --kubeconfig or --master given, and the in-cluster configuration cannot be used")]
    InCluster {
        /// Why.
        source: Box<kube::config::InClusterError>,
    },
    /// `--master` is not a URL.
    #[error("--master {value:?} is not a URL like https://192.0.2.1:6443")]
    MasterUrl {
        /// What was given.
        value: String,
        /// What is wrong with it.
        source: http::uri::InvalidUri,
    },
    /// The HTTP client could not be made, from certificates or credentials for example.
    #[error("cannot make a client for the Kubernetes API")]
    Client {
        /// Why.
        source: Box<kube::Error>,
    },
}
