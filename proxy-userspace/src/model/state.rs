//! [`Model`]: takes events in, tracks what they touch, and resolves just that.

use super::{Dirty, ModelSettings, NodeFacts, Snapshot, WatchEvent};

/// The objects known so far and the Snapshot last resolved from them.
#[derive(Debug)]
pub struct Model {
    settings: ModelSettings,
    snapshot: Snapshot,
}

impl Model {
    /// A model that knows no object yet.
    pub fn new(settings: ModelSettings) -> Self {
        Self {
            settings,
            snapshot: Snapshot::default(),
        }
    }

    /// Takes in what a source said. Nothing is resolved yet.
    pub fn apply(&mut self, event: WatchEvent) {
        let _ = event;
    }

    /// Takes in what the kernel says of this node.
    pub fn set_node_facts(&mut self, facts: NodeFacts) {
        let _ = facts;
    }

    /// Takes in a changed configuration.
    pub fn set_settings(&mut self, settings: ModelSettings) {
        self.settings = settings;
    }

    /// All kinds were listed once, and the kernel's facts are known: the Snapshot may be programmed.
    pub fn is_synced(&self) -> bool {
        false
    }

    /// Resolves what changed since the last call and says exactly what differs. Empty before [`Self::is_synced`].
    pub fn resolve(&mut self) -> Dirty {
        Dirty::default()
    }

    /// The Snapshot as of the last [`Self::resolve`].
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}
