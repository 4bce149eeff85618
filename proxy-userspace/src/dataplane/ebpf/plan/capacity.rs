//! Whether the additions of a plan fit into the maps. A service port that does not fit stays as it
//! is, instead of half written.

use std::collections::BTreeMap;

use foldhash::HashMap;
use proxy_common::layout::{MAPS, MapSizes};

use super::{
    Plan,
    state::State,
    step::{MapEntry, Step},
};

/// Numbers of entries by the name of the map.
type Entries = HashMap<&'static str, usize>;

/// Returns the service ports that need more entries than a map has left, by identifier, each with
/// that map. The oldest service ports get room first. What the plan removes does not count: it
/// makes room only after the additions.
pub(crate) fn without_room(state: &State, plan: &Plan, sizes: &MapSizes) -> BTreeMap<u32, &'static str> {
    let room = |map| (sizes.entries(map) as usize).saturating_sub(state.entries(map).unwrap_or(0));
    let mut room: Entries = MAPS.iter().map(|map| (map.name, room(map.name))).collect();
    let mut without_room = BTreeMap::new();
    for (service, needed) in additions(state, plan) {
        match MAPS.iter().find(|map| needed.get(map.name) > room.get(map.name)) {
            Some(map) => drop(without_room.insert(service, map.name)),
            None => needed.iter().for_each(|(map, needed)| *room.entry(map).or_default() -= needed),
        }
    }
    without_room
}

/// Returns how many entries the plan adds for each service port.
fn additions(state: &State, plan: &Plan) -> BTreeMap<u32, Entries> {
    let mut additions: BTreeMap<u32, Entries> = BTreeMap::new();
    for step in &plan.steps {
        let Step::Put(entry) = step else { continue };
        let is_new = match entry {
            MapEntry::Service(key, _) => state.service(key).is_none(),
            MapEntry::Endpoint(key, _) => !state.endpoints.contains_key(key),
            _ => true,
        };
        if let Some(service) = entry.service().filter(|_| is_new) {
            *additions.entry(service).or_default().entry(entry.map()).or_default() += 1;
        }
    }
    additions
}
