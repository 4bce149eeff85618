//! What the sync loop receives, and where it reports to.

use std::{sync::Arc, time::Duration};

use tokio::sync::{Notify, mpsc, watch};

use super::{Request, SyncSettings};
use crate::{
    health::{HealthChecks, ProxyHealth, Status},
    metrics::Metrics,
    model::{DsrAnnouncement, NodeFacts, WatchEvent},
    node::NodeEvents,
};

/// What the loop receives.
pub struct Inputs {
    /// Objects.
    pub events: mpsc::Receiver<WatchEvent>,
    /// The node's links and addresses; `None` until they were read once.
    pub node_facts: watch::Receiver<Option<NodeFacts>>,
    /// Notified when somebody else changed what the proxy wrote into the kernel.
    pub drift: Arc<Notify>,
    /// Settings that replace those the loop started with.
    pub settings: watch::Receiver<SyncSettings>,
    /// What others ask of the loop.
    pub requests: mpsc::Receiver<Request>,
}

/// Where the loop reports to.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Metrics.
    pub metrics: Metrics,
    /// Health.
    pub health: ProxyHealth,
    /// What `/statusz` shows. The loop also compares with it to find what changed.
    pub status: Status,
    /// Kubernetes Events on the Node.
    pub events: NodeEvents,
    /// Health check node ports.
    pub health_checks: watch::Sender<HealthChecks>,
    /// What [`announce_dsr`](crate::watch::announce_dsr) must write about this node. `None` if the
    /// Node has it already, or if nobody knows yet.
    pub dsr_announcement: watch::Sender<Option<DsrAnnouncement>>,
}

impl Outputs {
    /// Creates outputs that nothing was reported to. `/healthz` fails if a sync is due for longer
    /// than `health_timeout`.
    pub fn new(health_timeout: Duration, events: NodeEvents) -> Self {
        Self {
            metrics: Metrics::default(),
            health: ProxyHealth::new(health_timeout),
            status: Status::default(),
            events,
            health_checks: watch::Sender::default(),
            dsr_announcement: watch::Sender::default(),
        }
    }
}
