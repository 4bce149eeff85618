//! Whether what a plan adds fits into the maps: a service port that does not fit is left as it is, rather than half written.

use std::collections::{BTreeMap, HashMap};

use super::{super::MapSizes, Plan, state::State, step::Step};

/// A map without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// Its name.
    pub(crate) map: &'static str,
    /// Its capacity.
    pub(crate) capacity: u32,
}

/// The maps whose entries belong to service ports.
const MAPS: [&str; 4] = ["services", "endpoints", "members", "source_ranges"];

/// Entries in each of them.
type Entries = [usize; MAPS.len()];

/// The identifiers that need more room than is left, each with a map that lacks it. The oldest go first; what the plan removes
/// makes room only afterwards.
pub(crate) fn refused(state: &State, plan: &Plan, sizes: &MapSizes) -> HashMap<u32, Full> {
    let capacities = [sizes.services, sizes.endpoints, sizes.members, sizes.source_ranges];
    let held = [state.service_count(), state.endpoints.len(), state.members.len(), state.ranges.len()];
    let mut room: Entries = std::array::from_fn(|map| (capacities[map] as usize).saturating_sub(held[map]));
    let mut refused = HashMap::new();
    for (service, needed) in needs(state, plan) {
        match (0..MAPS.len()).find(|&map| needed[map] > room[map]) {
            Some(map) => drop(refused.insert(service, Full { map: MAPS[map], capacity: capacities[map] })),
            None => room.iter_mut().zip(needed).for_each(|(room, needed)| *room -= needed),
        }
    }
    refused
}

/// How many entries each service port gets more.
fn needs(state: &State, plan: &Plan) -> BTreeMap<u32, Entries> {
    let mut needs: BTreeMap<u32, Entries> = BTreeMap::new();
    for step in &plan.steps {
        let map = match step {
            Step::PutService(key, _) if state.service(key).is_none() => 0,
            Step::PutEndpoint(..) => 1,
            Step::PutMember(_) => 2,
            Step::PutRange(_) => 3,
            _ => continue,
        };
        if let Some(service) = step.service() {
            needs.entry(service).or_default()[map] += 1;
        }
    }
    needs
}
