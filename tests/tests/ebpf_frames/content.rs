//! Reads and replaces the content of the maps of the programs.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
};

use aya::{
    Ebpf, Pod,
    maps::{
        HashMap, Map, MapData, MapError,
        lpm_trie::{Key, LpmTrie},
    },
};
use proxy_common::layout::{DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4};

/// The maps `direct_flows_v4` and `direct_flows_v6`.
pub(crate) struct DirectFlows {
    v4: HashMap<MapData, DirectKeyV4, DirectFlowV4>,
    v6: HashMap<MapData, DirectKey, DirectFlow>,
}

impl DirectFlows {
    /// Takes the maps out of an object.
    pub(crate) fn take(ebpf: &mut Ebpf) -> Self {
        Self { v4: map(ebpf, "direct_flows_v4"), v6: map(ebpf, "direct_flows_v6") }
    }

    /// Returns the entries of both.
    pub(crate) fn read(&self) -> BTreeMap<DirectKey, DirectFlow> {
        let v4 = read(&self.v4).into_iter().map(|(key, flow)| (key.into(), flow.into()));
        v4.chain(read(&self.v6)).collect()
    }

    /// Replaces the entries of both.
    pub(crate) fn fill(&mut self, expected: &BTreeMap<DirectKey, DirectFlow>) {
        let v4 = expected.iter().filter_map(|(key, flow)| Some((key.v4()?, flow.v4())));
        fill(&mut self.v4, &v4.collect());
        let v6 = expected.iter().filter(|(key, _)| key.v4().is_none());
        fill(&mut self.v6, &v6.map(|(key, flow)| (*key, *flow)).collect());
    }
}

/// Takes a map out of an object.
pub(crate) fn map<M: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &str) -> M {
    M::try_from(ebpf.take_map(name).expect("in the object")).expect("of this type")
}

/// Replaces the content of a map.
pub(crate) fn fill<K, V>(map: &mut HashMap<MapData, K, V>, expected: &BTreeMap<K, V>)
where
    K: Pod + Ord + Hash,
    V: Pod + PartialEq,
{
    let held = read(map);
    for key in held.keys().filter(|key| !expected.contains_key(key)) {
        map.remove(key).expect("in the map");
    }
    for (key, value) in expected.iter().filter(|(key, value)| held.get(key) != Some(*value)) {
        map.insert(key, value, 0).expect("there is room");
    }
}

/// Returns the content of a map.
pub(crate) fn read<K, V>(map: &HashMap<impl Borrow<MapData>, K, V>) -> BTreeMap<K, V>
where
    K: Pod + Ord,
    V: Pod,
{
    map.iter().collect::<Result<_, _>>().expect("nothing else writes")
}

/// Returns a set as the content of a map.
pub(crate) fn members<K: Ord + Copy>(set: &BTreeSet<K>) -> BTreeMap<K, u8> {
    set.iter().map(|key| (*key, 0)).collect()
}

/// Replaces the content of a longest-prefix trie.
pub(crate) fn fill_trie<K: Pod, V: Pod>(
    trie: &mut LpmTrie<MapData, K, V>,
    expected: impl IntoIterator<Item = (u32, K, V)>,
) {
    let held: Vec<Key<K>> = trie.keys().collect::<Result<_, _>>().expect("nothing else writes");
    for key in held {
        trie.remove(&key).expect("in the map");
    }
    for (length, key, value) in expected {
        trie.insert(&Key::new(length, key), value, 0).expect("there is room");
    }
}
