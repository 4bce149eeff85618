//! Decides which service port gets a frontend that several Services claim. No dataplane sees a
//! frontend twice.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    num::NonZeroU16,
    sync::Arc,
};

use super::{
    Frontend, IpFamily, NamespacedName, Protocol, ResolvedPort, Service, ServicePortKey,
    service_port::{frontends, ports, precedence},
};

/// What identifies a frontend in packets. Node ports have no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FrontendIdentity {
    pub(super) address: Option<IpAddr>,
    pub(super) port: NonZeroU16,
    pub(super) protocol: Protocol,
    pub(super) family: IpFamily,
}

impl FrontendIdentity {
    /// Creates the identity of a frontend of a service port.
    pub(super) fn new(key: &ServicePortKey, frontend: &Frontend) -> Self {
        Self {
            address: frontend.address,
            port: frontend.port,
            protocol: key.name.protocol,
            family: key.family,
        }
    }
}

/// A service port that claims a frontend. The smallest claim wins: by kind ([`precedence`]), then
/// by key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FrontendClaim {
    precedence: u8,
    key: ServicePortKey,
}

/// The claims of some Services.
pub(super) type Claims = Vec<(FrontendIdentity, FrontendClaim)>;

/// Two service ports that claim the same frontend. Upstream leaves the result to chance. shunt
/// gives the frontend to a cluster IP before a load-balancer IP, and to that before an external IP.
/// Among equal kinds, the smaller key gets it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendConflict {
    /// The address; none for a node port.
    pub address: Option<IpAddr>,
    /// The destination port.
    pub port: NonZeroU16,
    /// The service port that serves the frontend.
    pub owner: ServicePortKey,
    /// The service port that does not.
    pub loser: ServicePortKey,
}

/// The claims of all Services.
#[derive(Debug, Default)]
pub(super) struct FrontendClaims {
    owners: BTreeMap<FrontendIdentity, FrontendClaim>,
    /// Claims that lost. Most clusters have none.
    lost: BTreeMap<FrontendIdentity, BTreeSet<FrontendClaim>>,
}

impl FrontendClaims {
    /// Replaces a Service's claims. Returns the other Services that got or lost a frontend.
    pub(super) fn update(
        &mut self,
        previous: Option<&Service>,
        current: Option<&Service>,
    ) -> BTreeSet<NamespacedName> {
        let (previous, current) = (claims(previous), claims(current));
        let mut affected = BTreeSet::new();
        for (id, claim) in previous.iter().filter(|claim| current.binary_search(claim).is_err()) {
            self.remove(*id, claim, &mut affected);
        }
        for (id, claim) in current.into_iter().filter(|claim| previous.binary_search(claim).is_err()) {
            self.add(id, claim, &mut affected);
        }
        affected
    }

    /// Fills the empty set with the claims of all service ports. They come in parts, and each part
    /// is sorted. One sort is faster than many insertions.
    pub(super) fn fill(&mut self, mut claims: Claims) {
        // A stable sort finds the parts and merges them.
        claims.sort();
        claims.dedup_by(|(id, claim), (owned, _)| {
            let has_lost = id == owned;
            if has_lost {
                self.lost.entry(*id).or_default().insert(claim.clone());
            }
            has_lost
        });
        self.owners = claims.into_iter().collect();
    }

    /// Returns true if no frontend is claimed twice.
    pub(super) fn all_own(&self) -> bool {
        self.lost.is_empty()
    }

    /// Returns true if the frontend, which this service port claims, belongs to it.
    pub(super) fn owns(&self, key: &ServicePortKey, frontend: &Frontend) -> bool {
        self.all_own()
            || self.owners.get(&FrontendIdentity::new(key, frontend)).is_some_and(|owner| owner.key == *key)
    }

    /// Returns the service port to which a frontend belongs.
    pub(super) fn owner(&self, id: &FrontendIdentity) -> Option<&ServicePortKey> {
        self.owners.get(id).map(|claim| &claim.key)
    }

    /// Returns the service ports to which ports of an address belong.
    pub(super) fn owners_at(&self, address: IpAddr) -> impl Iterator<Item = (NonZeroU16, &ServicePortKey)> {
        let first = FrontendIdentity {
            address: Some(address),
            port: NonZeroU16::MIN,
            protocol: Protocol::Tcp,
            family: IpFamily::V4,
        };
        let owners = self.owners.range(first..).take_while(move |(id, _)| id.address == Some(address));
        owners.map(|(id, claim)| (id.port, &claim.key))
    }

    /// Returns all claims that lost.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = FrontendConflict> {
        self.lost.iter().flat_map(|(id, lost)| {
            let owner = self.owners.get(id);
            lost.iter().filter_map(move |loser| {
                let owner = owner?.key.clone();
                Some(FrontendConflict { address: id.address, port: id.port, owner, loser: loser.key.clone() })
            })
        })
    }

    fn add(&mut self, id: FrontendIdentity, claim: FrontendClaim, affected: &mut BTreeSet<NamespacedName>) {
        let loser = match self.owners.entry(id) {
            Entry::Vacant(owner) => {
                owner.insert(claim);
                return;
            }
            Entry::Occupied(owner) if *owner.get() < claim => claim,
            Entry::Occupied(mut owner) => owner.insert(claim),
        };
        affected.insert(loser.key.name.service.clone());
        self.lost.entry(id).or_default().insert(loser);
    }

    fn remove(
        &mut self,
        id: FrontendIdentity,
        claim: &FrontendClaim,
        affected: &mut BTreeSet<NamespacedName>,
    ) {
        let owned = self.owners.get(&id) == Some(claim);
        if owned {
            self.owners.remove(&id);
        }
        let Entry::Occupied(mut lost) = self.lost.entry(id) else {
            return;
        };
        if !owned {
            lost.get_mut().remove(claim);
        } else if let Some(next) = lost.get_mut().pop_first() {
            affected.insert(next.key.name.service.clone());
            self.owners.insert(id, next);
        }
        if lost.get().is_empty() {
            lost.remove();
        }
    }
}

/// Returns the claims of a Service, sorted, each once.
fn claims(service: Option<&Service>) -> Claims {
    let mut claims = Claims::new();
    let ports =
        service.into_iter().flat_map(|service| ports(service).into_iter().map(move |port| (service, port)));
    for (service, (key, port)) in ports {
        let frontends = frontends(service, port, key.family);
        claims.extend(frontends.iter().map(|frontend| claim(&key, frontend)));
    }
    claims.sort_unstable();
    claims.dedup();
    claims
}

/// Returns the claims of these service ports, sorted.
pub(super) fn claims_of(ports: &[(ServicePortKey, Arc<ResolvedPort>)]) -> Claims {
    let mut claims = Claims::with_capacity(ports.len());
    for (key, port) in ports {
        claims.extend(port.frontends.iter().map(|frontend| claim(key, frontend)));
    }
    claims.sort_unstable();
    claims
}

fn claim(key: &ServicePortKey, frontend: &Frontend) -> (FrontendIdentity, FrontendClaim) {
    let claim = FrontendClaim { precedence: precedence(frontend.kind), key: key.clone() };
    (FrontendIdentity::new(key, frontend), claim)
}
