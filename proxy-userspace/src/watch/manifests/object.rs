//! Objects of manifests, whatever their kind.

use std::{fmt, sync::Arc};

use crate::{
    model::{EndpointSlice, Interner, NamespacedName, Node, Service},
    watch::decode::Kind,
};

/// An object of one of the three kinds. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    Service(Arc<Service>),
    EndpointSlice(Arc<EndpointSlice>),
    Node(Arc<Node>),
}

impl Object {
    /// Replaces names by their one copy; those of an object that is shared itself are left as they are.
    pub(super) fn share_strings(&mut self, strings: &mut Interner<str>) {
        match self {
            Self::Service(service) => {
                if let Some(service) = Arc::get_mut(service) {
                    service.share_strings(strings);
                }
            }
            Self::EndpointSlice(slice) => {
                if let Some(slice) = Arc::get_mut(slice) {
                    slice.share_strings(strings);
                }
            }
            // There are few.
            Self::Node(_) => {}
        }
    }
}

/// Which of the three kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ObjectKind {
    Service,
    EndpointSlice,
    Node,
}

impl ObjectKind {
    /// The kind with this `kind` and API group, if it is one of the three.
    pub(super) fn of(kind: &str, group: &str) -> Option<Self> {
        [
            (Service::KIND, Service::GROUP, Self::Service),
            (EndpointSlice::KIND, EndpointSlice::GROUP, Self::EndpointSlice),
            (Node::KIND, Node::GROUP, Self::Node),
        ]
        .into_iter()
        .find_map(|(name, of_group, this)| (name == kind && of_group == group).then_some(this))
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Service => Service::KIND,
            Self::EndpointSlice => EndpointSlice::KIND,
            Self::Node => Node::KIND,
        }
    }
}

/// What tells objects apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: ObjectKind,
    pub(super) name: NamespacedName,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.name)
    }
}
