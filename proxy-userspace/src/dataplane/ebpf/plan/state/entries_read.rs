//! Makes a [`State`] of the entries that are read from the maps.

use foldhash::HashMap;
use proxy_common::layout::{EndpointKey, EndpointValue, MemberKey, ServiceKey, ServiceValue};

use super::{super::step::MapEntry, State};

/// The entries that were read so far. Sorting all entries of a kind once is faster than inserting
/// them one by one.
#[derive(Debug, Default)]
pub(crate) struct EntriesRead {
    state: State,
    services: Vec<(ServiceKey, ServiceValue)>,
    endpoints: Vec<(EndpointKey, EndpointValue)>,
    members: Vec<MemberKey>,
}

impl EntriesRead {
    /// Starts with a state without entries of maps.
    pub(crate) fn new(state: State) -> Self {
        Self { state, ..Self::default() }
    }

    /// Adds an entry.
    pub(crate) fn add(&mut self, entry: &MapEntry) {
        match *entry {
            MapEntry::Service(key, value) => self.services.push((key, value)),
            MapEntry::Endpoint(key, value) => self.endpoints.push((key, value)),
            MapEntry::Member(key) => self.members.push(key),
            _ => self.state.put(entry),
        }
    }

    /// Returns the state with all entries.
    pub(crate) fn into_state(self) -> State {
        let Self { mut state, services, endpoints, members } = self;
        // A map has each key once. If it changed meanwhile, the last value counts.
        let slot = |(EndpointKey { list, slot, .. }, _): &_| (*list, *slot);
        state.endpoints = sorted(&endpoints, |(key, _)| key.service, slot).into_iter().collect();
        state.members =
            sorted(&members, |key| key.service, |key| (key.list, key.endpoint)).into_iter().collect();
        state.services.reserve(services.len());
        state.services.extend(services);
        let frontends: Vec<_> = state.services.iter().map(|(key, value)| (value.service, *key)).collect();
        state.frontends = sorted(&frontends, |(service, _)| *service, |(_, key)| *key).into_iter().collect();
        state.frontends.iter().for_each(|(service, _)| state.ids.record(*service));
        let State { services, endpoints, members, digest, .. } = &mut state;
        let services = services.iter().map(|(key, value)| MapEntry::Service(*key, *value));
        let endpoints = endpoints.iter().map(|(key, value)| MapEntry::Endpoint(*key, *value));
        let members = members.iter().map(|key| MapEntry::Member(*key));
        for entry in services.chain(endpoints).chain(members) {
            digest.add(&entry);
        }
        state
    }
}

/// Sorts entries by the identifier of their service port and then by the rest of their key. Equal
/// entries keep their order. Only the identifiers are sorted, and the few entries of each.
fn sorted<T: Copy, K: Ord>(entries: &[T], service: impl Fn(&T) -> u32, rest: impl Fn(&T) -> K) -> Vec<T> {
    // Where the next entry of an identifier goes; once all have their place, the end of its group.
    let mut places: HashMap<u32, usize> = HashMap::default();
    for entry in entries {
        *places.entry(service(entry)).or_default() += 1;
    }
    let mut groups: Vec<(u32, usize)> = places.iter().map(|(service, count)| (*service, *count)).collect();
    groups.sort_unstable();
    let mut next = 0;
    for (service, count) in &groups {
        places.insert(*service, next);
        next += count;
    }
    let mut grouped = entries.to_vec();
    for entry in entries {
        if let Some(place) = places.get_mut(&service(entry)) {
            grouped[*place] = *entry;
            *place += 1;
        }
    }
    let mut rest_of_groups = &mut *grouped;
    for (_, count) in groups {
        let (group, later) = rest_of_groups.split_at_mut(count);
        group.sort_by_key(&rest);
        rest_of_groups = later;
    }
    grouped
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn entries_are_sorted_as_by_their_whole_key(
            entries in prop::collection::vec((prop_oneof![0_u32..40, any::<u32>()], 0_u32..4, any::<u8>()), 0..200)
        ) {
            let mut expected = entries.clone();
            expected.sort_by_key(|(service, rest, _)| (*service, *rest));
            prop_assert_eq!(sorted(&entries, |entry| entry.0, |entry| entry.1), expected);
        }
    }
}
