//! Objects of manifests, whatever their kind.

use std::{fmt, sync::Arc};

use crate::{
    model::{EndpointSlice, Interner, NamespacedName, Node, Service, ServiceCidr},
    watch::decode::Kind,
};

/// An object of one of the kinds. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    Service(Arc<Service>),
    EndpointSlice(Arc<EndpointSlice>),
    Node(Arc<Node>),
    ServiceCidr(Arc<ServiceCidr>),
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
            Self::Node(_) | Self::ServiceCidr(_) => {}
        }
    }
}

/// Which of the kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ObjectKind {
    Service,
    EndpointSlice,
    Node,
    ServiceCidr,
}

impl ObjectKind {
    /// The kind with this `kind` and API group, if it is one of these.
    pub(super) fn of(kind: &str, group: &str) -> Option<Self> {
        [
            (Service::KIND, Service::GROUP, Self::Service),
            (EndpointSlice::KIND, EndpointSlice::GROUP, Self::EndpointSlice),
            (Node::KIND, Node::GROUP, Self::Node),
            (ServiceCidr::KIND, ServiceCidr::GROUP, Self::ServiceCidr),
        ]
        .into_iter()
        .find_map(|(name, of_group, this)| (name == kind && of_group == group).then_some(this))
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Service => Service::KIND,
            Self::EndpointSlice => EndpointSlice::KIND,
            Self::Node => Node::KIND,
            Self::ServiceCidr => ServiceCidr::KIND,
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
