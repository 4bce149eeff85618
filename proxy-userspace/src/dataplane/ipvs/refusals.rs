//! What the kernel refuses of service ports. It is left out of plans until its service port changes, or until there is room again, so
//! that what is wrong with one keeps no other from being served.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    IpvsError,
    claims::{Claims, Item, claims, endpoints},
    node::Node,
    plan::{SetChange, Step},
    sets::{Entry, Set},
    state::State,
};
use crate::{
    kernel::{
        KernelError,
        ipvs::{Change, VirtualKey},
    },
    model::{IpFamily, ResolvedPort, ServicePortKey, Snapshot},
};

/// Something that the kernel does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Refused {
    /// An entry of a set, or an address of the dummy link, which is an entry of [`Set::Addresses`].
    Item(Item),
    /// A virtual server.
    Server(VirtualKey),
    /// One of its real servers.
    Real(VirtualKey, SocketAddr),
}

/// What is known of a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Why {
    said: String,
    /// It may be possible by now.
    is_to_be_tried: bool,
}

/// What is left out, by service port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refusals {
    by_port: BTreeMap<ServicePortKey, BTreeMap<Refused, Why>>,
}

impl Refusals {
    /// Whether this is left out of a service port.
    pub(super) fn has(&self, port: &ServicePortKey, what: Refused) -> bool {
        self.by_port.get(port).is_some_and(|refused| refused.contains_key(&what))
    }

    /// What a plan about everything leaves out: what is still wanted, and not to be tried again.
    pub(super) fn of_everything(&self, snapshot: &Snapshot, node: &Node) -> Self {
        let mut left = self.clone();
        left.by_port.retain(|key, refused| {
            let Some(port) = snapshot.ports.get(key) else { return false };
            let all = claims(key, port, node, &Self::default());
            refused.retain(|what, why| !why.is_to_be_tried && is_wanted(&all, port, *what));
            !refused.is_empty()
        });
        left
    }

    /// What a plan about these service ports leaves out: nothing of them, since they changed.
    pub(super) fn of_others(&self, changed: &BTreeSet<ServicePortKey>) -> Self {
        let mut left = self.clone();
        left.by_port.retain(|key, _| !changed.contains(key));
        left
    }

    /// Forgets what a plan did not leave out.
    pub(super) fn keep(&mut self, left_out: &Self) {
        self.by_port.retain(|key, refused| {
            refused.retain(|what, _| left_out.has(key, *what));
            !refused.is_empty()
        });
    }

    /// An entry left a set: there is room, unless it left since one beside it was refused.
    pub(super) fn has_left(&mut self, family: IpFamily, set: Set, left: Entry) {
        for (what, why) in self.by_port.values_mut().flatten() {
            if let Refused::Item(Item::Entry(of, it, entry)) = what {
                why.is_to_be_tried |= (*of, *it) == (family, set) && !set.are_of_one_frontend(*entry, left);
            }
        }
    }

    fn add(&mut self, port: ServicePortKey, what: Refused, said: String) {
        tracing::debug!(%port, ?what, said, "refused");
        self.by_port.entry(port).or_default().insert(what, Why { said, is_to_be_tried: false });
    }

    /// All is there, or what is not.
    pub(super) fn outcome(&self) -> Result<(), IpvsError> {
        let first = self.by_port.iter().find_map(|(key, refused)| Some((key, refused.values().next()?)));
        first.map_or(Ok(()), |(key, why)| {
            let (count, first, said) = (self.by_port.len(), key.clone(), why.said.clone());
            Err(IpvsError::LeftOut { count, first, said })
        })
    }
}

/// What was refused while a plan was carried out.
#[derive(Debug, Default)]
pub(super) struct Refusing {
    found: Vec<(Refused, KernelError)>,
    /// Virtual servers that shall be reached from source ranges alone, which the kernel may not know of.
    open: BTreeSet<VirtualKey>,
    /// Virtual servers that should be gone and may not be.
    stay: BTreeSet<VirtualKey>,
}

impl Refusing {
    /// This was refused.
    pub(super) fn add(&mut self, what: Refused, error: KernelError) {
        self.found.push((what, error));
    }

    /// An entry of a set, or an address of the dummy link, was refused.
    pub(super) fn add_entry(&mut self, family: IpFamily, set: Set, entry: Entry, error: KernelError) {
        self.add(Refused::Item(Item::Entry(family, set, entry)), error);
    }

    /// These changes of sets may not have been made, and not because of one of them.
    pub(super) fn may_lack(&mut self, changes: &[SetChange]) {
        self.open.extend(changes.iter().filter_map(|change| match change {
            SetChange::Add(_, Set::LoadBalancerFirewall, entry) => entry.server(),
            _ => None,
        }));
    }

    /// Where this change removes a virtual server, that may still be there.
    pub(super) fn may_stay(&mut self, change: &Change) {
        if let Change::RemoveServer(key) = change {
            self.stay.insert(*key);
        }
    }

    /// Whether this was refused.
    pub(super) fn has(&self, what: Refused) -> bool {
        self.found.iter().any(|(found, _)| *found == what)
    }

    /// What is left of a step: no new server that a set or a rule should guard, no address without a server, where the node's own
    /// ports would answer, and all that guards a server that could not be removed.
    pub(super) fn rest_of(&self, step: Step, state: &State) -> Step {
        match step {
            Step::Sets(mut changes) if !self.stay.is_empty() => {
                changes.retain(|change| match change {
                    SetChange::Delete(_, _, entry) => {
                        entry.server().is_none_or(|key| !self.stay.contains(&key))
                    }
                    _ => true,
                });
                Step::Sets(changes)
            }
            Step::Servers(changes) if self.leaves_out(state) => {
                let is_kept = |change: &Change| match change {
                    Change::AddServer(key, _) | Change::AddReal(key, ..) => !self.is_unguarded(*key, state),
                    _ => true,
                };
                Step::Servers(changes.into_iter().filter(is_kept).collect())
            }
            Step::AddAddresses(addresses) if self.leaves_out(state) => {
                let is_kept = |address: &IpAddr| {
                    let entry = Entry::Address(*address);
                    let item = Item::Entry(IpFamily::of(*address), Set::Addresses, entry);
                    !self.has(Refused::Item(item))
                        && state.servers.keys().any(|key| key.address.ip() == *address)
                };
                Step::AddAddresses(addresses.into_iter().filter(is_kept).collect())
            }
            step => step,
        }
    }

    fn leaves_out(&self, state: &State) -> bool {
        let is_whole = self.found.is_empty() && self.open.is_empty();
        !is_whole || state.terms.families.iter().any(|family| !state.writes_rules(*family))
    }

    /// Where rules of a family failed, or entries of sets, there may be nothing that lets source ranges through alone.
    fn is_unguarded(&self, key: VirtualKey, state: &State) -> bool {
        let family = IpFamily::of(key.address.ip());
        let is_open =
            || self.open.contains(&key) || (!state.writes_rules(family) && state.has_source_ranges(key));
        if !state.servers.contains_key(&key) && is_open() {
            return true;
        }
        self.found.iter().any(|(what, _)| match what {
            Refused::Item(Item::Entry(_, set, entry)) if *set != Set::LoopBack => entry.server() == Some(key),
            _ => false,
        })
    }

    /// What was refused with the service ports that want it, of those that are planned and those that were there before.
    pub(super) fn of(self, state: &State, planned: &[(ServicePortKey, Option<Claims>)]) -> Blamed {
        let wanting = |(what, error)| {
            let planned = planned.iter().filter_map(|(key, claims)| Some((key, claims.as_ref()?)));
            let all = planned.chain(state.ports.iter());
            let blamed = all.filter(|(_, claims)| wants(claims, what)).map(|(key, _)| key.clone());
            (what, blamed.collect(), error)
        };
        Blamed { found: self.found.into_iter().map(wanting).collect() }
    }
}

/// What was refused, of which service ports, and why.
pub(super) struct Blamed {
    found: Vec<(Refused, BTreeSet<ServicePortKey>, KernelError)>,
}

impl Blamed {
    /// Adds it to what is left out. What nobody wants is an error of its own.
    pub(super) fn record(self, refused: &mut Refusals) -> Result<(), IpvsError> {
        let mut nobodys = None;
        for (what, ports, error) in self.found {
            let said = error.to_string();
            if ports.is_empty() {
                nobodys.get_or_insert(error);
            }
            for key in ports {
                refused.add(key, what, said.clone());
            }
        }
        nobodys.map_or(Ok(()), |error| Err(error.into()))
    }
}

/// Whether a service port wants this, if everything is taken.
fn is_wanted(all: &Claims, port: &ResolvedPort, what: Refused) -> bool {
    let Refused::Real(server, real) = what else { return wants(all, what) };
    let reason = all.servers.iter().find_map(|(key, reason)| (*key == server).then_some(*reason));
    reason.is_some_and(|reason| endpoints(reason, port).iter().any(|endpoint| endpoint.address == real))
}

fn wants(claims: &Claims, what: Refused) -> bool {
    match what {
        Refused::Item(item) => claims.items.contains(&item),
        Refused::Server(wanted) | Refused::Real(wanted, _) => {
            claims.servers.iter().any(|(key, _)| *key == wanted)
        }
    }
}

/// Whether IPVS, or rtnetlink about an address, says that it will never take this. Other errors pass, or tell that the kernel holds
/// something else than was thought.
pub(super) fn is_refusal(error: &KernelError) -> bool {
    const NEVER: [i32; 5] =
        [libc::EINVAL, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP, libc::EADDRNOTAVAIL];
    matches!(error, KernelError::Call { source, .. }
        if source.raw_os_error().is_some_and(|number| NEVER.contains(&number)))
}

/// Which of these changes `ipset restore` says that it refused, all before it having been made; none where it says no such thing.
pub(super) fn refused_entry(
    changes: &[SetChange],
    error: &KernelError,
) -> Option<(usize, IpFamily, Set, Entry)> {
    let KernelError::CommandFailed { stderr, .. } = error else { return None };
    let (_, rest) = stderr.split_once("Error in line ")?;
    let (number, said) = rest.split_once(':')?;
    let at = number.parse::<usize>().ok()?.checked_sub(1)?;
    let &SetChange::Add(family, set, entry) = changes.get(at)? else { return None };
    // A set that somebody destroyed is made again after the next look; and so on.
    let is_about_entry =
        !["does not exist", "Kernel error received"].iter().any(|other| said.contains(other));
    is_about_entry.then_some((at, family, set, entry))
}

/// Whether the set has no room for any other entry.
pub(super) fn is_full(error: &KernelError) -> bool {
    matches!(error, KernelError::CommandFailed { stderr, .. } if stderr.contains("is full"))
}
