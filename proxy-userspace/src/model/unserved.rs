//! The reasons why Services are not served. Commands and pages show them.

use std::collections::BTreeMap;

use super::{Delta, ListPart, NamespacedName, Service, ServiceType};

/// Why a Service is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnservedReason {
    /// There is no such Service.
    NotThere,
    /// `type: ExternalName`.
    ExternalName,
    /// It has no cluster IP.
    Headless,
    /// It has the label `service.kubernetes.io/service-proxy-name`.
    OtherProxy,
    /// It should be served, but the source has not sent it.
    NotReceived,
}

impl UnservedReason {
    /// Returns why a Service is not served. `None` if it is. Upstream's `ShouldSkipService`, and
    /// the labels by which its informers select.
    pub(super) fn of(service: &Service) -> Option<Self> {
        if service.excluded_by_label {
            Some(Self::OtherProxy)
        } else if service.service_type == ServiceType::ExternalName {
            Some(Self::ExternalName)
        } else {
            service.cluster_ips.is_empty().then_some(Self::Headless)
        }
    }

    /// Says it of a Service.
    pub fn sentence(self, name: &NamespacedName) -> String {
        match self {
            Self::NotThere => format!("there is no Service {name}"),
            Self::ExternalName => format!(
                "the Service {name} is of type ExternalName, which no proxy serves: DNS answers with another name for it"
            ),
            Self::Headless => format!(
                "the Service {name} is headless, and no proxy serves it: DNS answers with the addresses of its \
                 endpoints; name one of them instead"
            ),
            Self::OtherProxy => format!(
                "the Service {name} is left to another proxy: it has the label service.kubernetes.io/service-proxy-name"
            ),
            Self::NotReceived => format!(
                "the Service {name} exists and should be served, but the API server has not sent it to this node: see \
                 shunt doctor"
            ),
        }
    }
}

/// The Services that the source sent and that are not served. The API server sends only those of
/// type `ExternalName`.
#[derive(Debug, Default)]
pub(super) struct UnservedServices(BTreeMap<NamespacedName, UnservedReason>);

impl UnservedServices {
    /// Forgets what a change replaces, before the change is applied.
    pub(super) fn begin(&mut self, delta: &Delta<Service>) {
        match delta {
            Delta::Apply(service) => drop(self.0.remove(&service.name)),
            Delta::Delete(name) => drop(self.0.remove(name)),
            Delta::Replace(_) => self.0.clear(),
        }
    }

    /// Forgets all reasons at the first part of a list. Later parts remove nothing: a list has each
    /// Service once.
    pub(super) fn begin_part(&mut self, part: &ListPart<Service>) {
        if part.is_first {
            self.0.clear();
        }
    }

    pub(super) fn insert(&mut self, name: NamespacedName, reason: UnservedReason) {
        self.0.insert(name, reason);
    }

    pub(super) fn get(&self, name: &NamespacedName) -> Option<UnservedReason> {
        self.0.get(name).copied()
    }
}
