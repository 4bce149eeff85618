//! Elements settled: what becomes of each, and all changes as transactions.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{Draft, Group, structure::Whole};
use crate::{
    dataplane::nftables::{plan::Plan, sets::Base, state::Held},
    kernel::nftables::{Change, ElementKey, ElementValue, Family, Verdict},
};

/// What becomes of an element.
#[derive(Default)]
pub(super) struct Touch {
    /// Service ports that need it now, less those that no longer do.
    pub(super) claims: i64,
    pub(super) value: Option<ElementValue>,
}

/// Where an element is. Those of one destination are next to each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) family: Family,
    pub(super) base: Base,
    pub(super) key: ElementKey,
}

impl Spot {
    /// None where it is not of one destination.
    pub(super) fn destination(&self) -> Option<&[u8]> {
        self.base.destination(self.family, &self.key)
    }

    fn is_with(&self, other: &Self) -> bool {
        (self.family, self.destination()) == (other.family, other.destination())
    }
}

impl Ord for Spot {
    fn cmp(&self, other: &Self) -> Ordering {
        let destinations = (self.family, self.destination()).cmp(&(other.family, other.destination()));
        destinations.then_with(|| (self.base, self.key).cmp(&(other.base, other.key)))
    }
}

impl PartialOrd for Spot {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Draft<'_> {
    /// All changes as transactions of at most so many, as far as groups allow it.
    pub(super) fn transactions(&mut self, most: usize) -> Vec<Group> {
        self.write_lists();
        let mut packing = Packing { most, transactions: Vec::new() };
        for group in std::mem::take(&mut self.structure) {
            packing.add(group);
        }
        // What is masqueraded comes before what leads there, and goes after it.
        let (mut added, mut removed) = (Group::new(), Group::new());
        for (spot, touch) in std::mem::take(&mut self.common) {
            for change in self.settle(spot, touch).into_iter().flatten() {
                let is_removal = matches!(change, Change::DeleteElement(..));
                if is_removal { &mut removed } else { &mut added }.push((spot.family, change));
            }
        }
        packing.add_each(added);
        for whole in std::mem::take(&mut self.wholes) {
            packing.add(self.complete(whole));
        }
        self.settle_destinations(&mut packing);
        packing.add_each(removed);
        packing.add_each(self.removals());
        packing.transactions
    }

    /// Chains and sets that are needed no longer: rules first, since they may lead to each other.
    fn removals(&mut self) -> Group {
        let chains = std::mem::take(&mut self.unneeded);
        let sets = std::mem::take(&mut self.unneeded_sets);
        let rules = chains.iter().map(|(family, chain)| (*family, Change::FlushChain(chain.clone())));
        let rules: Group = rules.collect();
        let chains = chains.into_iter().map(|(family, chain)| (family, Change::DeleteChain(chain)));
        let sets = sets.into_iter().map(|(family, set)| (family, Change::DeleteSet(set)));
        rules.into_iter().chain(chains).chain(sets).collect()
    }

    /// The group of a service port with chains of its own, with its destinations, but those that somebody else's chain is for now.
    fn complete(&mut self, whole: Whole) -> Group {
        let Whole { family, mut group, leads, chains } = whole;
        for (base, key) in leads {
            let spots = self.spots(Spot { family, base, key });
            let is_elsewhere = |spot: &Spot| match &self.touched[spot].value {
                Some(ElementValue::Verdict(led)) => {
                    matches!(&led.verdict, Verdict::Goto(chain) if !chains.contains(chain))
                }
                _ => false,
            };
            if spots.iter().any(is_elsewhere) {
                continue;
            }
            for spot in spots {
                let touch = self.touched.remove(&spot).unwrap_or_default();
                group.extend(self.settle(spot, touch).into_iter().flatten().map(|change| (family, change)));
            }
        }
        group
    }

    /// All that is touched of the destination of an element whose key is the destination.
    fn spots(&self, of: Spot) -> Vec<Spot> {
        let first = Spot { base: of.base.first_of_destination(), ..of };
        self.touched.range(first..).map(|(spot, _)| *spot).take_while(|spot| spot.is_with(&of)).collect()
    }

    /// What becomes of the elements of destinations, one destination after the other.
    fn settle_destinations(&mut self, packing: &mut Packing) {
        let mut group = Group::new();
        let mut last: Option<Spot> = None;
        for (spot, touch) in std::mem::take(&mut self.touched) {
            if last.is_some_and(|last| !last.is_with(&spot)) {
                packing.add(std::mem::take(&mut group));
            }
            group.extend(self.settle(spot, touch).into_iter().flatten().map(|change| (spot.family, change)));
            last = Some(spot);
        }
        packing.add(group);
    }

    /// The changes that an element takes, if any.
    fn settle(&mut self, spot: Spot, touch: Touch) -> [Option<Change>; 2] {
        let Spot { family, base, key } = spot;
        let held = self.table(family).elements.get(&(base, key));
        let claims = i64::from(held.map_or(0, |held| held.claims)) + touch.claims;
        let claims = u32::try_from(claims).unwrap_or(0);
        let set = base.set();
        let removal = Change::DeleteElement(set, key);
        let changes = match (held, touch.value) {
            (Some(_), _) if claims == 0 => return [Some(removal), None],
            (Some(Held { value: there, .. }), Some(value)) if *there != value => {
                [Some(removal), Some(Change::AddElement(set, key, value))]
            }
            (None, Some(value)) if claims > 0 => [None, Some(Change::AddElement(set, key, value))],
            _ => [None, None],
        };
        let is_added = changes[1].is_some();
        let recorded = if is_added { 1 } else { held.map_or(0, |held| held.claims) };
        if claims != recorded {
            self.facts.claims.push((family, base, key, claims));
        }
        changes
    }

    /// The plan that this has become.
    pub(in super::super) fn finish(mut self, most: usize) -> Plan {
        let transactions = self.transactions(most);
        Plan { transactions, facts: self.facts }
    }
}

/// Elements that are touched.
pub(super) type Touched = BTreeMap<Spot, Touch>;

/// Groups become transactions.
struct Packing {
    most: usize,
    transactions: Vec<Group>,
}

impl Packing {
    fn add(&mut self, group: Group) {
        match self.transactions.last_mut() {
            _ if group.is_empty() => {}
            Some(last) if last.len() + group.len() <= self.most => last.extend(group),
            _ => self.transactions.push(group),
        }
    }

    /// Changes that are apart.
    fn add_each(&mut self, changes: Group) {
        for change in changes {
            self.add(vec![change]);
        }
    }
}
