//! The objects a source knows: what a list says after some events, without any of the model's bookkeeping.

use std::collections::BTreeMap;

use crate::model::{
    Delta, EndpointSlice, Model, ModelSettings, NamespacedName, Node, NodeFacts, Service, WatchEvent,
};

/// Every object by name.
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
    /// Does what an event says.
    pub fn apply(&mut self, event: WatchEvent) {
        match event {
            WatchEvent::Services(delta) => delta.apply_to(&mut self.services, |object| object.name.clone()),
            WatchEvent::EndpointSlices(delta) => {
                delta.apply_to(&mut self.slices, |object| object.name.clone());
            }
            WatchEvent::Nodes(delta) => {
                delta.apply_to(&mut self.nodes, |object| NamespacedName::new("", object.name.clone()));
            }
            // No generated history has any.
            WatchEvent::ServiceCidrs(_) => {}
        }
    }

    /// The complete list of each kind.
    pub fn lists(&self) -> [WatchEvent; 3] {
        [
            WatchEvent::Services(Delta::Replace(self.services.values().cloned().collect())),
            WatchEvent::EndpointSlices(Delta::Replace(self.slices.values().cloned().collect())),
            WatchEvent::Nodes(Delta::Replace(self.nodes.values().cloned().collect())),
        ]
    }

    /// Each object as an event of its own.
    pub fn single_events(&self) -> Vec<WatchEvent> {
        let services =
            self.services.values().cloned().map(|object| WatchEvent::Services(Delta::Apply(object)));
        let slices =
            self.slices.values().cloned().map(|object| WatchEvent::EndpointSlices(Delta::Apply(object)));
        let nodes = self.nodes.values().cloned().map(|object| WatchEvent::Nodes(Delta::Apply(object)));
        services.chain(slices).chain(nodes).collect()
    }

    /// A model that has listed just this, resolved.
    pub fn model(&self, settings: &ModelSettings, facts: &NodeFacts) -> Model {
        let mut model = Model::new(settings.clone());
        self.lists().into_iter().for_each(|list| model.apply(list));
        model.set_node_facts(facts.clone());
        model.resolve();
        model
    }
}
