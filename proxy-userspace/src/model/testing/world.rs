//! The objects of a source after some events, without the model's change tracking.

use std::collections::BTreeMap;

use super::THIS_NODE;
use crate::model::{
    Delta, EndpointSlice, Model, ModelSettings, NamespacedName, Node, NodeFacts, Service, WatchEvent,
};

/// All objects by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct World {
    /// Services.
    pub services: BTreeMap<NamespacedName, Service>,
    /// EndpointSlices.
    pub slices: BTreeMap<NamespacedName, EndpointSlice>,
    /// Nodes.
    pub nodes: BTreeMap<NamespacedName, Node>,
}

impl World {
    /// Applies an event.
    pub fn apply(&mut self, event: WatchEvent) {
        match event {
            WatchEvent::Services(delta) => delta.apply_to(&mut self.services, |object| object.name.clone()),
            WatchEvent::EndpointSlices(delta) => {
                delta.apply_to(&mut self.slices, |object| object.name.clone());
            }
            WatchEvent::Nodes(delta) => {
                // As in the model, the Node of this node stays if it is deleted.
                let this = self.nodes.values().find(|node| &*node.name == THIS_NODE).cloned();
                delta.apply_to(&mut self.nodes, |object| object.name.clone().into());
                if let Some(this) = this {
                    self.nodes.entry(this.name.clone().into()).or_insert(this);
                }
            }
            // Generated events contain no ServiceCIDRs.
            WatchEvent::ServiceCidrs(_) => {}
        }
    }

    /// Returns the complete list of each kind.
    pub fn lists(&self) -> [WatchEvent; 3] {
        [
            WatchEvent::Services(Delta::Replace(self.services.values().cloned().collect())),
            WatchEvent::EndpointSlices(Delta::Replace(self.slices.values().cloned().collect())),
            WatchEvent::Nodes(Delta::Replace(self.nodes.values().cloned().collect())),
        ]
    }

    /// Returns one event for each object.
    pub fn single_events(&self) -> Vec<WatchEvent> {
        let services =
            self.services.values().cloned().map(|object| WatchEvent::Services(Delta::Apply(object)));
        let slices =
            self.slices.values().cloned().map(|object| WatchEvent::EndpointSlices(Delta::Apply(object)));
        let nodes = self.nodes.values().cloned().map(|object| WatchEvent::Nodes(Delta::Apply(object)));
        services.chain(slices).chain(nodes).collect()
    }

    /// Returns a resolved model of these objects.
    pub fn model(&self, settings: &ModelSettings, facts: &NodeFacts) -> Model {
        let mut model = Model::new(settings.clone());
        self.lists().into_iter().for_each(|list| model.apply(list));
        model.set_node_facts(facts.clone());
        model.resolve();
        model
    }
}
