//! The known Services, and those that changed since they were last resolved.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    net::IpAddr,
};

use indexmap::map::Entry;

use super::{
    Delta, Forwarding, ListPart, LoadBalancerIngress, LoadBalancerIpMode, ModelSettings, NamespacedName,
    Service, UnservedReason, object_map::ObjectMap, unserved::UnservedServices,
};

/// The Services that changed, as they were before. None for a Service that is new.
pub(super) type ServiceChanges = BTreeMap<NamespacedName, Option<Box<Service>>>;

/// Upstream's `ServiceChangeTracker`. It merges the changes to one Service. A change that was
/// reverted does not count.
#[derive(Debug, Default)]
pub(super) struct ServiceChangeTracker {
    /// The Services that this proxy serves. Of others, only the names are stored.
    services: ObjectMap<Box<Service>>,
    unserved: UnservedServices,
    /// The Services that changed since [`Self::checkout_changes`], as they were at that time. None
    /// before its first call: every Service is new.
    changes: Option<ServiceChanges>,
    /// External IPs are dropped.
    ignores_external_ips: bool,
}

impl ServiceChangeTracker {
    /// Creates a tracker without Services.
    pub(super) fn new(settings: &ModelSettings) -> Self {
        Self { ignores_external_ips: settings.ignores_external_ips, ..Self::default() }
    }

    /// Applies a change from a source. Returns the number of Services that differ.
    pub(super) fn update(&mut self, delta: Delta<Service>) -> usize {
        self.unserved.begin(&delta);
        let (deleted, services) = delta.split(self.services.keys(), |service| &service.name);
        let deleted = deleted.into_iter().map(|name| self.set(name, None)).filter(|differs| *differs).count();
        let applied = services.into_iter().map(|service| self.apply(service));
        deleted + applied.filter(|differs| *differs).count()
    }

    /// Adds a part of the first list. Returns the number of Services that differ.
    pub(super) fn add(&mut self, part: ListPart<Service>) -> usize {
        self.unserved.begin_part(&part);
        if part.is_first {
            let earlier: Vec<_> = self.services.keys().cloned().collect();
            for name in earlier {
                self.set(name, None);
            }
        }
        let applied = part.objects.into_iter().map(|service| self.apply(service));
        applied.filter(|differs| *differs).count()
    }

    /// Returns the Service of this name, if this proxy serves it.
    pub(super) fn get(&self, name: &NamespacedName) -> Option<&Service> {
        self.services.get(name).map(Box::as_ref)
    }

    /// Returns why the Service of this name is not served, if the source sent it.
    pub(super) fn unserved(&self, name: &NamespacedName) -> Option<UnservedReason> {
        self.unserved.get(name)
    }

    /// Returns the number of Services.
    pub(super) fn len(&self) -> usize {
        self.services.len()
    }

    /// Returns all Services, sorted by name.
    pub(super) fn sorted(&self) -> Vec<&Service> {
        let mut services: Vec<_> = self.services.values().map(Box::as_ref).collect();
        // A stable sort finds the sorted parts: lists from the API server are almost sorted.
        services.sort_by(|service, other| service.name.cmp(&other.name));
        services
    }

    /// Returns the names of all Services.
    pub(super) fn names(&self) -> impl Iterator<Item = &NamespacedName> {
        self.services.keys()
    }

    /// Returns the names of the Services that have one of these cluster IPs. Looks at all Services:
    /// the addresses of links rarely change.
    pub(super) fn with_cluster_ip(
        &self,
        addresses: &BTreeSet<IpAddr>,
    ) -> impl Iterator<Item = &NamespacedName> {
        let has_one = |service: &Service| service.cluster_ips.iter().any(|ip| addresses.contains(ip));
        self.services.iter().filter(move |(_, service)| has_one(service)).map(|(name, _)| name)
    }

    /// Returns the Service with this load-balancer IP of this mode. Looks at all Services: only
    /// people ask.
    pub(super) fn with_load_balancer_ip(
        &self,
        address: IpAddr,
        ip_mode: LoadBalancerIpMode,
    ) -> Option<&NamespacedName> {
        let wanted = LoadBalancerIngress { ip: address, ip_mode };
        self.services.iter().find(|(_, it)| it.load_balancer_ingress.contains(&wanted)).map(|(name, _)| name)
    }

    /// Returns the names of the Services with this forwarding. Looks at all Services: nodes rarely
    /// come and go.
    pub(super) fn with_forwarding(&self, forwarding: Forwarding) -> impl Iterator<Item = &NamespacedName> {
        let services = self.services.iter();
        services.filter(move |(_, service)| service.forwarding == forwarding).map(|(name, _)| name)
    }

    /// Returns the Services that changed since the last call. The first call returns none.
    pub(super) fn checkout_changes(&mut self) -> ServiceChanges {
        self.changes.replace(ServiceChanges::new()).unwrap_or_default()
    }

    /// Returns true if the Service differs.
    fn apply(&mut self, mut service: Service) -> bool {
        if let Some(reason) = UnservedReason::of(&service) {
            self.unserved.insert(service.name.clone(), reason);
            return self.set(service.name, None);
        }
        if self.ignores_external_ips {
            service.external_ips = Vec::new();
        }
        compact(&mut service);
        self.set(service.name.clone(), Some(Box::new(service)))
    }

    /// Returns true if the Service differs.
    fn set(&mut self, name: NamespacedName, current: Option<Box<Service>>) -> bool {
        let recorded = self.changes.is_some().then(|| name.clone());
        let replaced = match (self.services.entry(name), current) {
            (Entry::Vacant(_), None) => return false,
            (Entry::Vacant(entry), Some(service)) => {
                entry.insert(service);
                None
            }
            (Entry::Occupied(entry), Some(service)) if *entry.get() == service => return false,
            (Entry::Occupied(mut entry), Some(service)) => Some(entry.insert(service)),
            (Entry::Occupied(entry), None) => Some(entry.swap_remove()),
        };
        if let Some(name) = recorded {
            self.record(name, replaced);
        }
        true
    }

    /// Records that a Service replaced another one.
    fn record(&mut self, name: NamespacedName, replaced: Option<Box<Service>>) {
        let Some(changes) = &mut self.changes else { return };
        let current = self.services.get(&name);
        match changes.entry(name) {
            btree_map::Entry::Vacant(change) => {
                change.insert(replaced);
            }
            btree_map::Entry::Occupied(change) if change.get().as_ref() == current => {
                change.remove();
            }
            btree_map::Entry::Occupied(_) => {}
        }
    }
}

/// Frees spare capacity.
fn compact(service: &mut Service) {
    service.cluster_ips.shrink_to_fit();
    service.external_ips.shrink_to_fit();
    service.load_balancer_ingress.shrink_to_fit();
    service.load_balancer_source_ranges.shrink_to_fit();
    service.ports.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ServiceType, testing::service};

    fn tracker(services: Vec<Service>) -> ServiceChangeTracker {
        let mut tracker = ServiceChangeTracker::default();
        tracker.update(Delta::Replace(services));
        tracker
    }

    fn apply(tracker: &mut ServiceChangeTracker, service: Service) {
        tracker.update(Delta::Apply(service));
    }

    #[test]
    fn an_unchanged_service_is_not_a_change() {
        let web = service("default/web", "10.96.0.1");
        let mut tracker = tracker(vec![web.clone()]);
        tracker.checkout_changes();
        apply(&mut tracker, web.clone());
        tracker.update(Delta::Replace(vec![web]));
        assert!(tracker.checkout_changes().is_empty());
    }

    #[test]
    fn a_reverted_change_does_not_count() {
        let web = service("default/web", "10.96.0.1");
        let mut tracker = tracker(vec![web.clone()]);
        tracker.checkout_changes();
        apply(&mut tracker, service("default/web", "10.96.0.2"));
        apply(&mut tracker, web);
        assert!(tracker.checkout_changes().is_empty());
    }

    #[test]
    fn a_change_contains_the_service_as_last_resolved() {
        let web = service("default/web", "10.96.0.1");
        let mut tracker = tracker(vec![web.clone()]);
        tracker.checkout_changes();
        apply(&mut tracker, service("default/web", "10.96.0.2"));
        apply(&mut tracker, service("default/web", "10.96.0.3"));
        let before = tracker.checkout_changes().into_values();
        assert_eq!(before.collect::<Vec<_>>(), [Some(Box::new(web))]);
    }

    #[test]
    fn headless_external_name_and_excluded_services_are_left_out() {
        let web = || service("default/web", "10.96.0.1");
        let headless = Service { cluster_ips: Vec::new(), ..web() };
        let external = Service { service_type: ServiceType::ExternalName, ..web() };
        let excluded = Service { excluded_by_label: true, ..web() };
        for (left_out, reason) in [
            (headless, UnservedReason::Headless),
            (external, UnservedReason::ExternalName),
            (excluded, UnservedReason::OtherProxy),
        ] {
            let mut tracker = tracker(Vec::new());
            tracker.checkout_changes();
            tracker.update(Delta::Replace(vec![left_out.clone()]));
            assert_eq!((tracker.len(), tracker.checkout_changes().len()), (0, 0), "{left_out:?}");
            assert_eq!(tracker.unserved(&web().name), Some(reason));
            apply(&mut tracker, web());
            assert_eq!(tracker.unserved(&web().name), None);
            tracker.checkout_changes();
            apply(&mut tracker, left_out.clone());
            assert_eq!((tracker.len(), tracker.checkout_changes().len()), (0, 1), "{left_out:?}");
            assert_eq!(tracker.unserved(&web().name), Some(reason));
            tracker.update(Delta::Delete(web().name));
            assert_eq!(tracker.unserved(&web().name), None);
        }
    }

    #[test]
    fn a_new_list_forgets_which_services_were_left_out() {
        let external =
            Service { service_type: ServiceType::ExternalName, ..service("default/web", "10.96.0.1") };
        let part = |objects| ListPart { objects, is_first: true, is_last: true };
        for list in [false, true] {
            let mut tracker = tracker(vec![external.clone()]);
            assert_eq!(tracker.unserved(&external.name), Some(UnservedReason::ExternalName));
            if list {
                tracker.update(Delta::Replace(Vec::new()));
            } else {
                tracker.add(part(Vec::new()));
            }
            assert_eq!(tracker.unserved(&external.name), None);
        }
    }

    #[test]
    fn a_service_that_a_new_list_lacks_is_deleted() {
        let mut tracker = tracker(vec![service("a/x", "10.96.0.1"), service("a/y", "10.96.0.2")]);
        tracker.checkout_changes();
        tracker.update(Delta::Replace(vec![service("a/y", "10.96.0.2")]));
        assert_eq!(
            tracker.checkout_changes().into_keys().collect::<Vec<_>>(),
            [NamespacedName::new("a", "x")]
        );
    }
}
