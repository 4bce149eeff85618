//! Which service port keeps an address that several Services claim, so that no dataplane sees a frontend twice.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    num::NonZeroU16,
};

use super::{
    Frontend, IpFamily, NamespacedName, Protocol, Service, ServicePortKey,
    service_port::{frontends, ports, precedence},
};

/// What a packet is matched by. Node ports have no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FrontendId {
    address: Option<IpAddr>,
    port: NonZeroU16,
    protocol: Protocol,
    family: IpFamily,
}

impl FrontendId {
    /// The frontend of a service port.
    pub(super) fn new(key: &ServicePortKey, frontend: &Frontend) -> Self {
        Self {
            address: frontend.address,
            port: frontend.port,
            protocol: key.name.protocol,
            family: key.family,
        }
    }
}

/// A service port's claim on a frontend. The smallest wins: by kind ([`precedence`]), then by key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    precedence: u8,
    key: ServicePortKey,
}

/// Two service ports claim one address and port. Upstream lets chance decide; here the rule is: a cluster IP goes before a
/// load-balancer IP, that before an external IP, and among equals the smaller key goes first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendConflict {
    /// The address; none for a node port.
    pub address: Option<IpAddr>,
    /// The destination port.
    pub port: NonZeroU16,
    /// Who serves it.
    pub owner: ServicePortKey,
    /// Who does not.
    pub loser: ServicePortKey,
}

/// All claims of all Services.
#[derive(Debug, Default)]
pub(super) struct FrontendClaims {
    owners: BTreeMap<FrontendId, Claim>,
    /// Claims that lost; most clusters have none.
    waiting: BTreeMap<FrontendId, BTreeSet<Claim>>,
}

impl FrontendClaims {
    /// Exchanges a Service's claims and yields the Services that may have won or lost a frontend by it.
    pub(super) fn update(
        &mut self,
        previous: Option<&Service>,
        current: Option<&Service>,
    ) -> BTreeSet<NamespacedName> {
        let (previous, current) = (claims(previous), claims(current));
        let mut moved = BTreeSet::new();
        for (id, claim) in previous.difference(&current) {
            self.remove(*id, claim, &mut moved);
        }
        for (id, claim) in current.difference(&previous) {
            self.add(*id, claim.clone(), &mut moved);
        }
        moved
    }

    /// The frontend belongs to this service port.
    pub(super) fn owns(&self, key: &ServicePortKey, frontend: &Frontend) -> bool {
        self.owners.get(&FrontendId::new(key, frontend)).is_some_and(|owner| owner.key == *key)
    }

    /// Every claim that lost.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = FrontendConflict> {
        self.waiting.iter().flat_map(|(id, waiting)| {
            let owner = self.owners.get(id);
            waiting.iter().filter_map(move |loser| {
                let owner = owner?.key.clone();
                Some(FrontendConflict { address: id.address, port: id.port, owner, loser: loser.key.clone() })
            })
        })
    }

    fn add(&mut self, id: FrontendId, claim: Claim, moved: &mut BTreeSet<NamespacedName>) {
        let loser = match self.owners.entry(id) {
            Entry::Vacant(owner) => {
                owner.insert(claim);
                return;
            }
            Entry::Occupied(owner) if *owner.get() < claim => claim,
            Entry::Occupied(mut owner) => owner.insert(claim),
        };
        moved.insert(loser.key.name.service.clone());
        self.waiting.entry(id).or_default().insert(loser);
    }

    fn remove(&mut self, id: FrontendId, claim: &Claim, moved: &mut BTreeSet<NamespacedName>) {
        let owned = self.owners.get(&id) == Some(claim);
        if owned {
            self.owners.remove(&id);
        }
        let Entry::Occupied(mut waiting) = self.waiting.entry(id) else {
            return;
        };
        if !owned {
            waiting.get_mut().remove(claim);
        } else if let Some(heir) = waiting.get_mut().pop_first() {
            moved.insert(heir.key.name.service.clone());
            self.owners.insert(id, heir);
        }
        if waiting.get().is_empty() {
            waiting.remove();
        }
    }
}

fn claims(service: Option<&Service>) -> BTreeSet<(FrontendId, Claim)> {
    let ports =
        service.into_iter().flat_map(|service| ports(service).into_iter().map(move |port| (service, port)));
    ports
        .flat_map(|(service, (key, port))| {
            let frontends = frontends(service, port, key.family);
            frontends.into_iter().map(move |frontend| {
                let claim = Claim { precedence: precedence(frontend.kind), key: key.clone() };
                (FrontendId::new(&key, &frontend), claim)
            })
        })
        .collect()
}
