//! Applies events to the model while the dataplane is created: the kernel checks programs meanwhile.

use std::pin::pin;

use tokio::sync::mpsc;

use super::SyncSettings;
use crate::{
    metrics::{Metrics, WatchedKind},
    model::{Model, WatchEvent},
};

/// A model of what came before the loop.
pub struct EarlyEvents {
    pub(super) model: Model,
    metrics: Metrics,
}

impl EarlyEvents {
    /// Creates a model without objects, for a loop with these settings.
    pub fn new(settings: &SyncSettings, metrics: Metrics) -> Self {
        Self { model: Model::new(settings.model.clone()), metrics }
    }

    /// Waits for `created`, and meanwhile applies events.
    pub async fn until<T>(
        &mut self,
        created: impl Future<Output = T>,
        events: &mut mpsc::Receiver<WatchEvent>,
    ) -> T {
        let mut created = pin!(created);
        loop {
            tokio::select! {
                biased;
                created = &mut created => return created,
                // The loop reports a source that ends.
                Some(event) = events.recv() => {
                    apply(&mut self.model, event, &self.metrics);
                }
            }
        }
    }
}

/// Applies and counts an event. Returns true if it changed something.
pub(super) fn apply(model: &mut Model, event: WatchEvent, metrics: &Metrics) -> bool {
    let kind = match event {
        WatchEvent::Services(_) => Some(WatchedKind::Service),
        WatchEvent::EndpointSlices(_) => Some(WatchedKind::EndpointSlice),
        WatchEvent::Nodes(_) => Some(WatchedKind::Node),
        WatchEvent::ServiceCidrs(_) => None,
    };
    if let Some(kind) = kind {
        metrics.event_received(kind);
    }
    model.apply(event)
}
