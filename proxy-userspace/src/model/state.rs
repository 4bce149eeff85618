//! [`Model`]: applies events, and resolves what they changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Delta, Dirty, Forwarding, FrontendConflict, HealthCheck, IpFamily, ModelSettings, NamespacedName, Node,
    NodeFacts, ServiceCidr, ServicePortKey, Snapshot, TunnelView, UnixNanos, WatchEvent,
    endpoint_slice_cache::EndpointSliceCache,
    frontend_claims::FrontendClaims,
    local_detector,
    node_view::node_view,
    resolve::{ResolvedService, Resolver},
    service_change_tracker::ServiceChangeTracker,
    service_port::PortDefaults,
    topology::NodeLocation,
    tunnel::{self, OtherNodes},
};
use crate::parallel;

/// The known objects, and the Snapshot that was last resolved from them.
///
/// The model does not store Services that this proxy does not serve: headless, `ExternalName`,
/// without a cluster IP, or of other proxies. Of slices it stores the fields that resolution needs,
/// and of Nodes only this one.
#[derive(Debug, Default)]
pub struct Model {
    pub(super) settings: ModelSettings,
    facts: Option<NodeFacts>,
    pub(super) node: Option<Node>,
    other_nodes: OtherNodes,
    service_cidrs: BTreeMap<NamespacedName, ServiceCidr>,
    pub(super) services: ServiceChangeTracker,
    pub(super) slices: EndpointSliceCache,
    pub(super) claims: FrontendClaims,
    listed: ListedKinds,
    pending: PendingChanges,
    /// The first resolution is done.
    is_resolved: bool,
    pub(super) snapshot: Snapshot,
    health_checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
    /// The addresses of links, if cluster IPs among them are not served. Without those of
    /// [`LINK_OF_IPVS`].
    link_addresses: BTreeSet<IpAddr>,
    /// Computed again whenever the Node or the settings change.
    pod_cidrs_outside_cluster_cidr: Vec<IpNet>,
}

/// What an event changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The event may change something for this node. Not all do: every node has a heartbeat.
    pub is_relevant: bool,
    /// The number of objects: those of a list that differ, and 1 for any other event.
    pub objects: usize,
}

/// When something happened that changed the endpoints of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriggerTime {
    /// The family of the endpoints.
    pub family: IpFamily,
    /// The time.
    pub at: UnixNanos,
}

/// The link on which kube-proxy's ipvs mode has all cluster IPs.
const LINK_OF_IPVS: &str = "kube-ipvs0";

/// The kinds of which a complete list came. [`EndpointSliceCache`] stores this for EndpointSlices.
#[derive(Debug, Default)]
struct ListedKinds {
    services: bool,
    nodes: bool,
}

/// What the next resolution must resolve in addition to changed Services and slices.
#[expect(clippy::struct_excessive_bools, reason = "each is a cause of its own")]
#[derive(Debug, Default)]
struct PendingChanges {
    node: bool,
    /// This node's zone changed: resolve the Services whose endpoints have hints.
    hinted_services: bool,
    /// Other nodes of the tunnel changed: resolve the Services with direct server return.
    dsr_services: bool,
    /// This node's name changed: resolve all Services.
    all_services: bool,
    /// Addresses that links got or lost: resolve the Services with these cluster IPs.
    link_addresses: BTreeSet<IpAddr>,
}

impl Model {
    /// Creates a model without objects.
    pub fn new(settings: ModelSettings) -> Self {
        Self { services: ServiceChangeTracker::new(&settings), settings, ..Self::default() }
    }

    /// Ignores the trigger times of changes until this time.
    pub fn ignore_trigger_times_until(&mut self, start: UnixNanos) {
        self.slices.start = start;
    }

    /// Applies an event. [`Self::resolve`] resolves it later.
    pub fn apply(&mut self, event: WatchEvent) -> Applied {
        let mut applied = Applied { is_relevant: true, objects: 1 };
        match event {
            WatchEvent::Nodes(delta) => applied.is_relevant = self.apply_node(delta),
            WatchEvent::Services(delta) => {
                let is_list = matches!(delta, Delta::Replace(_));
                self.listed.services |= is_list;
                let differing = self.services.update(delta);
                applied.objects = if is_list { differing } else { 1 };
            }
            WatchEvent::EndpointSlices(delta) => {
                let is_list = matches!(delta, Delta::Replace(_));
                let differing = self.slices.update(delta);
                applied.objects = if is_list { differing } else { 1 };
            }
            WatchEvent::ServicePart(part) => {
                self.listed.services |= part.is_last;
                applied.objects = self.services.add(part);
            }
            WatchEvent::EndpointSlicePart(part) => {
                applied.objects = self.slices.add(part);
            }
            WatchEvent::ServiceCidrs(delta) => self.apply_service_cidrs(delta),
        }
        applied
    }

    /// Sets the kernel's facts about this node.
    pub fn set_node_facts(&mut self, facts: NodeFacts) {
        if self.facts.as_ref() != Some(&facts) {
            self.facts = Some(facts);
            self.pending.node = true;
            self.update_link_addresses();
        }
    }

    fn update_link_addresses(&mut self) {
        let facts = self.facts.iter().filter(|_| self.settings.leaves_cluster_ips_of_links);
        let entries = facts.flat_map(|facts| &facts.addresses).filter(|entry| &*entry.link != LINK_OF_IPVS);
        let now: BTreeSet<IpAddr> = entries.map(|entry| entry.address).collect();
        self.pending.link_addresses.extend(now.symmetric_difference(&self.link_addresses));
        self.link_addresses = now;
    }

    /// Sets the configuration. If the node name changes, Nodes must be listed again.
    pub fn set_settings(&mut self, settings: ModelSettings) {
        if settings == self.settings {
            return;
        }
        self.pending.node = true;
        self.pending.dsr_services |= settings.dsr_port != self.settings.dsr_port;
        if settings.node_name != self.settings.node_name {
            self.pending.all_services = true;
            self.node = None;
            self.other_nodes.forget_announced();
            self.listed.nodes = false;
        }
        self.settings = settings;
        self.update_link_addresses();
        self.update_pod_cidrs_outside_cluster_cidr();
    }

    /// Returns true if all kinds were listed and the kernel's facts are known. Then the Snapshot
    /// may be programmed.
    pub fn is_synced(&self) -> bool {
        self.listed.services && self.listed.nodes && self.slices.is_listed && self.facts.is_some()
    }

    /// Returns true if [`Self::snapshot`] is of all objects: [`Self::resolve`] ran after
    /// [`Self::is_synced`] became true.
    pub fn is_resolved(&self) -> bool {
        self.is_resolved
    }

    /// Resolves the changes since the last call, and returns the exact differences. Empty before
    /// [`Self::is_synced`].
    pub fn resolve(&mut self) -> Dirty {
        if !self.is_synced() {
            return Dirty::default();
        }
        let mut dirty = Dirty::default();
        let mut pending = mem::take(&mut self.pending);
        if pending.node || !self.is_resolved {
            dirty.node = self.resolve_node(&mut pending.dsr_services);
        }
        if self.is_resolved {
            for service in &self.affected_services(&pending) {
                self.resolve_service(service, &mut dirty.ports);
            }
        } else {
            self.resolve_first();
        }
        if mem::replace(&mut self.is_resolved, true) { dirty } else { Dirty::everything() }
    }

    /// Returns the Snapshot of the last [`Self::resolve`].
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Returns the health checks by Service and family, of the last [`Self::resolve`]. They can
    /// change without a dirty service port.
    pub fn health_checks(&self) -> &BTreeMap<(NamespacedName, IpFamily), HealthCheck> {
        &self.health_checks
    }

    /// Returns the frontends that several service ports claim, of the last [`Self::resolve`].
    pub fn conflicts(&self) -> impl Iterator<Item = FrontendConflict> {
        self.claims.conflicts()
    }

    /// Returns the name of this node if its Node object was never seen.
    pub fn missing_node(&self) -> Option<&str> {
        self.node.is_none().then_some(&*self.settings.node_name)
    }

    /// Returns this node's Node object as it was last seen.
    pub fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// Returns the pod CIDRs of this node that `clusterCIDR` should contain and does not.
    pub fn pod_cidrs_outside_cluster_cidr(&self) -> &[IpNet] {
        &self.pod_cidrs_outside_cluster_cidr
    }

    fn update_pod_cidrs_outside_cluster_cidr(&mut self) {
        let outside = |node| local_detector::pod_cidrs_outside_cluster_cidr(&self.settings, node);
        self.pod_cidrs_outside_cluster_cidr = self.node.as_ref().map(outside).unwrap_or_default();
    }

    /// Returns the number of Services that this proxy serves.
    pub fn service_count(&self) -> usize {
        self.services.len()
    }

    /// Returns the number of endpoints in all EndpointSlices, used or not.
    pub fn endpoint_count(&self) -> usize {
        self.slices.endpoint_count
    }

    /// Returns the last-change-trigger-times of slices that changed since the last call, for the
    /// metric of the network programming latency. Deleted slices do not count. Call this after each
    /// [`Self::resolve`].
    pub fn take_trigger_times(&mut self) -> Vec<TriggerTime> {
        self.slices.checkout_trigger_times()
    }

    fn apply_node(&mut self, delta: Delta<Node>) -> bool {
        let is_of_others = match &delta {
            Delta::Apply(node) => *node.name != *self.settings.node_name,
            Delta::Delete(name) => *name.name != *self.settings.node_name,
            Delta::Replace(_) => false,
        };
        let differs = self.other_nodes.apply(&delta, &self.settings.node_name);
        self.pending.node |= differs;
        self.pending.dsr_services |= differs;
        match delta {
            Delta::Apply(node) if !is_of_others => self.set_node(node),
            // As upstream, the last known facts of a deleted Node stay. The kubelet may create it
            // again, and node ports stay on the same addresses meanwhile.
            Delta::Apply(_) | Delta::Delete(_) => {}
            Delta::Replace(nodes) => {
                self.listed.nodes = true;
                if let Some(node) = nodes.into_iter().rfind(|node| *node.name == *self.settings.node_name) {
                    self.set_node(node);
                }
            }
        }
        differs || !is_of_others
    }

    fn apply_service_cidrs(&mut self, delta: Delta<ServiceCidr>) {
        delta.apply_to(&mut self.service_cidrs, |object| object.name.clone().into());
        self.pending.node = true;
    }

    fn set_node(&mut self, node: Node) {
        let before = self.node.replace(node);
        if before == self.node {
            return;
        }
        let zone_of = |node: Option<&Node>| node.and_then(|node| node.zone.clone());
        self.pending.hinted_services |= zone_of(before.as_ref()) != zone_of(self.node.as_ref());
        self.pending.node = true;
        self.update_pod_cidrs_outside_cluster_cidr();
    }

    /// Returns all Services whose ports may differ. Updates the claims, so that Services that get
    /// or lose a frontend are among them.
    fn affected_services(&mut self, pending: &PendingChanges) -> BTreeSet<NamespacedName> {
        let mut affected = self.slices.checkout_changes();
        let changed = self.services.checkout_changes();
        for (name, previous) in &changed {
            affected.extend(self.claims.update(previous.as_deref(), self.services.get(name)));
        }
        affected.extend(changed.into_keys());
        if pending.hinted_services {
            affected.extend(self.slices.services_with_hints());
        }
        if pending.dsr_services {
            affected.extend(self.services.with_forwarding(Forwarding::Dsr).cloned());
        }
        if pending.all_services {
            affected.extend(self.services.names().cloned());
        }
        if !pending.link_addresses.is_empty() {
            affected.extend(self.services.with_cluster_ip(&pending.link_addresses).cloned());
        }
        affected
    }

    fn resolver(&self) -> Resolver<'_> {
        let zone = self.node.as_ref().and_then(|node| node.zone.as_deref()).unwrap_or_default();
        let node = NodeLocation { node_name: &self.settings.node_name, zone };
        let (slices, claims, link_addresses) = (&self.slices, &self.claims, &self.link_addresses);
        let defaults = PortDefaults { balance: self.settings.balance, dsr_port: self.settings.dsr_port };
        Resolver { slices, claims, node, link_addresses, defaults, other_nodes: &self.other_nodes }
    }

    /// Resolves all Services. Nothing was resolved before, so nothing is compared, and the maps are
    /// built as a whole.
    fn resolve_first(&mut self) {
        self.slices.checkout_changes();
        self.services.checkout_changes();
        let services = self.services.sorted();
        let resolver = self.resolver();
        let halves = parallel::in_parts(&services, |half| resolver.resolve_all(half));
        let (mut ports, mut health_checks) = (Vec::with_capacity(services.len()), BTreeMap::new());
        let mut claims = Vec::with_capacity(services.len());
        for half in halves {
            ports.extend(half.ports);
            claims.extend(half.claims);
            health_checks.extend(half.health_checks);
        }
        self.claims.fill(claims);
        let resolver = self.resolver();
        if !resolver.serves_all_claims() {
            for (key, port) in &mut ports {
                resolver.keep_served(key, Arc::make_mut(port));
            }
        }
        self.snapshot.ports = ports.into_iter().collect();
        self.health_checks = health_checks;
    }

    fn resolve_service(&mut self, name: &NamespacedName, dirty: &mut BTreeSet<ServicePortKey>) {
        let resolver = self.resolver();
        let ResolvedService { ports, health_checks } =
            self.services.get(name).map(|service| resolver.resolve(service)).unwrap_or_default();
        let is_there = |key: &ServicePortKey| ports.binary_search_by(|(port, _)| port.cmp(key)).is_ok();
        let removed: Vec<_> = self.ports_of(name).filter(|key| !is_there(key)).collect();
        for key in removed {
            self.snapshot.ports.remove(&key);
            dirty.insert(key);
        }
        for (key, port) in ports {
            if self.snapshot.ports.get(&key).is_none_or(|previous| **previous != port) {
                self.snapshot.ports.insert(key.clone(), Arc::new(port));
                dirty.insert(key);
            }
        }
        for family in IpFamily::ALL {
            self.health_checks.remove(&(name.clone(), family));
        }
        self.health_checks.extend(health_checks);
    }

    /// Returns the keys of a Service in the Snapshot, which are adjacent.
    fn ports_of(&self, service: &NamespacedName) -> impl Iterator<Item = ServicePortKey> {
        self.ports_of_service(service).map(|(key, _)| key.clone())
    }

    /// Resolves this node. Returns true if it differs. Sets `tunnel_differs` if the node sends
    /// packets of the tunnel from other addresses than before.
    fn resolve_node(&mut self, tunnel_differs: &mut bool) -> bool {
        let Some(facts) = &self.facts else { return false };
        let ranges: BTreeSet<_> = self.service_cidrs.values().flat_map(|object| &object.cidrs).collect();
        let service_cidrs = ranges.into_iter().copied().collect();
        let mut node = node_view(&self.settings, self.node.as_ref(), facts);
        let own = tunnel::ends(facts, &node.primary_addresses);
        *tunnel_differs |= self.other_nodes.set_own(&own);
        let tunnel = TunnelView::resolve(&self.settings, facts, &own, &self.other_nodes);
        (node.service_cidrs, node.tunnel) = (service_cidrs, tunnel);
        mem::replace(&mut self.snapshot.node, node) != self.snapshot.node
    }
}
