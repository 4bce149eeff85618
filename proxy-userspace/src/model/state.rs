//! [`Model`]: takes events in, tracks what they touch, and resolves just that.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
};

use super::{
    Delta, Dirty, FrontendConflict, HealthCheck, IpFamily, ModelSettings, NamespacedName, Node, NodeFacts,
    Protocol, ServicePortKey, ServicePortName, Snapshot, UnixNanos, WatchEvent,
    endpoint_slice_cache::EndpointSliceCache,
    frontend_claims::FrontendClaims,
    intern::Interner,
    node_view::node_view,
    resolve::{ResolvedService, Resolver},
    service_change_tracker::ServiceChangeTracker,
    topology::Topology,
};

/// The objects known so far and the Snapshot last resolved from them.
///
/// Services left out (headless, `ExternalName`, without a cluster IP, of other proxies) are not kept, of slices only what
/// resolution reads, of Nodes only this one.
#[derive(Debug)]
pub struct Model {
    settings: ModelSettings,
    facts: Option<NodeFacts>,
    node: Option<Node>,
    services: ServiceChangeTracker,
    slices: EndpointSliceCache,
    claims: FrontendClaims,
    strings: Interner<str>,
    listed: Listed,
    pending: Pending,
    /// Something was resolved before, so that what is dirty can be told.
    resolved: bool,
    snapshot: Snapshot,
    health_checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
}

/// The kinds of which a complete list came; EndpointSlices keep it themselves.
#[derive(Debug, Default)]
struct Listed {
    services: bool,
    nodes: bool,
}

/// What the next resolution has to look at, besides changed Services and slices.
#[derive(Debug, Default)]
struct Pending {
    node: bool,
    /// This node's zone changed: the Services whose endpoints have hints.
    hinted_services: bool,
    /// This node's name changed.
    all_services: bool,
}

impl Model {
    /// A model that knows no object yet.
    pub fn new(settings: ModelSettings) -> Self {
        Self {
            settings,
            facts: None,
            node: None,
            services: ServiceChangeTracker::default(),
            slices: EndpointSliceCache::default(),
            claims: FrontendClaims::default(),
            strings: Interner::default(),
            listed: Listed::default(),
            pending: Pending::default(),
            resolved: false,
            snapshot: Snapshot::default(),
            health_checks: BTreeMap::new(),
        }
    }

    /// Takes in what a source said. Nothing is resolved yet.
    pub fn apply(&mut self, event: WatchEvent) {
        match event {
            WatchEvent::Services(delta) => {
                self.listed.services |= matches!(delta, Delta::Replace(_));
                self.services.update(delta, &mut self.strings);
            }
            WatchEvent::EndpointSlices(delta) => self.slices.update(delta, &mut self.strings),
            WatchEvent::Nodes(delta) => self.apply_node(delta),
        }
    }

    /// Takes in what the kernel says of this node.
    pub fn set_node_facts(&mut self, facts: NodeFacts) {
        if self.facts.as_ref() != Some(&facts) {
            self.facts = Some(facts);
            self.pending.node = true;
        }
    }

    /// Takes in a changed configuration. With another node name, the Node must be listed again.
    pub fn set_settings(&mut self, settings: ModelSettings) {
        if settings == self.settings {
            return;
        }
        self.pending.node = true;
        if settings.node_name != self.settings.node_name {
            self.pending.all_services = true;
            self.node = None;
            self.listed.nodes = false;
        }
        self.settings = settings;
    }

    /// All kinds were listed once, and the kernel's facts are known: the Snapshot may be programmed.
    pub fn is_synced(&self) -> bool {
        self.listed.services && self.listed.nodes && self.slices.is_listed() && self.facts.is_some()
    }

    /// Resolves what changed since the last call and says exactly what differs. Empty before [`Self::is_synced`].
    pub fn resolve(&mut self) -> Dirty {
        if !self.is_synced() {
            return Dirty::default();
        }
        let mut dirty = Dirty::default();
        let pending = mem::take(&mut self.pending);
        for service in self.touched_services(&pending) {
            self.resolve_service(&service, &mut dirty.ports);
        }
        dirty.node = (pending.node || !self.resolved) && self.resolve_node();
        if mem::replace(&mut self.resolved, true) { dirty } else { Dirty::everything() }
    }

    /// The Snapshot as of the last [`Self::resolve`].
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// What to answer on health check node ports, by Service and family, as of the last [`Self::resolve`]. It may change
    /// while no service port is dirty.
    pub fn health_checks(&self) -> &BTreeMap<(NamespacedName, IpFamily), HealthCheck> {
        &self.health_checks
    }

    /// Addresses that several service ports claim, as of the last [`Self::resolve`].
    pub fn conflicts(&self) -> impl Iterator<Item = FrontendConflict> {
        self.claims.conflicts()
    }

    /// The name of this node, if there is no Node object of that name.
    pub fn missing_node(&self) -> Option<&str> {
        self.node.is_none().then_some(&*self.settings.node_name)
    }

    /// This node's Node object, if there is one.
    pub fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// How many Services this proxy serves.
    pub fn service_count(&self) -> usize {
        self.services.len()
    }

    /// How many endpoints the EndpointSlices hold, whether or not a Service uses them.
    pub fn endpoint_count(&self) -> usize {
        self.slices.endpoint_count()
    }

    /// The last-change-trigger-times of slices that changed since the last call, for the network programming latency.
    /// Those of the first list are left out, and those of slices that went. To be called after each [`Self::resolve`].
    pub fn take_trigger_times(&mut self) -> Vec<UnixNanos> {
        self.slices.checkout_trigger_times()
    }

    fn apply_node(&mut self, delta: Delta<Node>) {
        match delta {
            Delta::Apply(node) if node.name == self.settings.node_name => self.set_node(Some(node)),
            Delta::Delete(name) if name.name == self.settings.node_name => self.set_node(None),
            Delta::Apply(_) | Delta::Delete(_) => {}
            Delta::Replace(nodes) => {
                self.listed.nodes = true;
                self.set_node(nodes.into_iter().rfind(|node| node.name == self.settings.node_name));
            }
        }
    }

    fn set_node(&mut self, node: Option<Node>) {
        if node == self.node {
            return;
        }
        let zone_of = |node: &Option<Node>| node.as_ref().and_then(|node| node.zone.clone());
        self.pending.hinted_services |= zone_of(&node) != zone_of(&self.node);
        self.pending.node = true;
        self.node = node;
    }

    /// Every Service whose ports may differ. Brings the claims up to date, so that the Services that win or lose a
    /// frontend are among them.
    fn touched_services(&mut self, pending: &Pending) -> BTreeSet<NamespacedName> {
        let mut touched = self.slices.checkout_changes();
        for (name, previous) in self.services.checkout_changes() {
            touched.extend(self.claims.update(previous.as_deref(), self.services.get(&name)));
            touched.insert(name);
        }
        if pending.hinted_services {
            touched.extend(self.slices.services_with_hints());
        }
        if pending.all_services {
            touched.extend(self.services.names().cloned());
        }
        touched
    }

    fn resolve_service(&mut self, name: &NamespacedName, dirty: &mut BTreeSet<ServicePortKey>) {
        let zone = self.node.as_ref().and_then(|node| node.zone.as_deref()).unwrap_or_default();
        let here = Topology { node_name: &self.settings.node_name, zone };
        let resolver = Resolver { slices: &self.slices, claims: &self.claims, here };
        let ResolvedService { ports, health_checks } =
            self.services.get(name).map(|service| resolver.resolve(service)).unwrap_or_default();
        let gone: Vec<_> = self.ports_of(name).filter(|key| !ports.contains_key(key)).collect();
        for key in gone {
            self.snapshot.ports.remove(&key);
            dirty.insert(key);
        }
        for (key, port) in ports {
            if self.snapshot.ports.get(&key).is_none_or(|known| **known != port) {
                self.snapshot.ports.insert(key.clone(), Arc::new(port));
                dirty.insert(key);
            }
        }
        self.set_health_checks(name, health_checks);
    }

    /// The keys of a Service in the Snapshot; they lie side by side.
    fn ports_of(&self, service: &NamespacedName) -> impl Iterator<Item = ServicePortKey> {
        let name = ServicePortName { service: service.clone(), port: "".into(), protocol: Protocol::Tcp };
        let first = ServicePortKey { name, family: IpFamily::V4 };
        let ports = self.snapshot.ports.range(first..).map(|(key, _)| key);
        ports.take_while(move |key| key.name.service == *service).cloned()
    }

    fn set_health_checks(
        &mut self,
        service: &NamespacedName,
        checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
    ) {
        for family in IpFamily::ALL {
            self.health_checks.remove(&(service.clone(), family));
        }
        self.health_checks.extend(checks);
    }

    /// Whether it differs.
    fn resolve_node(&mut self) -> bool {
        let Some(facts) = &self.facts else { return false };
        let node = node_view(&self.settings, self.node.as_ref(), facts);
        let differs = node != self.snapshot.node;
        self.snapshot.node = node;
        differs
    }
}
