//! The objects of a source after some events, without the model's change tracking.

use std::collections::BTreeMap;

use super::THIS_NODE;
use crate::model::{
    Delta, EndpointSlice, ListPart, Model, ModelSettings, NamespacedName, Node, NodeFacts, Service,
    WatchEvent,
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
            WatchEvent::ServicePart(part) => part.apply_to(&mut self.services, |object| object.name.clone()),
            WatchEvent::EndpointSlicePart(part) => {
                part.apply_to(&mut self.slices, |object| object.name.clone());
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

    /// Returns the lists of Services and EndpointSlices in parts of this size.
    pub fn parts(&self, size: usize) -> Vec<WatchEvent> {
        let services = parts(&self.services, size).map(WatchEvent::ServicePart);
        services.chain(parts(&self.slices, size).map(WatchEvent::EndpointSlicePart)).collect()
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
        for list in self.lists() {
            model.apply(list);
        }
        model.set_node_facts(facts.clone());
        model.resolve();
        model
    }
}

/// Splits a list. The last part is empty.
fn parts<T: Clone>(objects: &BTreeMap<NamespacedName, T>, size: usize) -> impl Iterator<Item = ListPart<T>> {
    let objects: Vec<T> = objects.values().cloned().collect();
    let chunks: Vec<Vec<T>> = objects.chunks(size).map(<[T]>::to_vec).chain([Vec::new()]).collect();
    let count = chunks.len();
    let part = move |(number, objects)| {
        let (is_first, is_last) = (number == 0, number + 1 == count);
        ListPart { is_first, is_last, objects }
    };
    chunks.into_iter().enumerate().map(part)
}
