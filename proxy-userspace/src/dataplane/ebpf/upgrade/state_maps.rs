//! What programs noted of flows and sockets, taken along when maps are built anew.

use std::{fmt, path::Path};

use aya::{
    Pod,
    maps::{HashMap, Map, MapData},
};
use proxy_common::layout::{
    AffinityKey, AffinityValue, Connection, Endpoint, Flow, FlowKey, FragmentKey, FragmentValue, SocketPeer,
    UdpSocket,
};

use crate::kernel::{
    KernelError,
    bpf::{MapSpec, PinDir, Reader},
};

/// The maps that programs write.
const STATE: [&str; 11] = [
    "affinity",
    "udp_flows",
    "udp_replies",
    "udp_sockets",
    "udp_connections",
    "tcp_connections",
    "flows",
    "fragments",
    "counters",
    "prefilter",
    "program_errors",
];

/// Keeps an entry that the new programs wrote meanwhile.
const BPF_NOEXIST: u64 = 1;

/// Uses the pinned maps of state among the new ones too, where they are of the same size: old and new programs then work with
/// one and the same while the new take the places of the old.
pub(crate) fn share(pins: &PinDir, specs: &[MapSpec], directory: &Path) -> Result<(), KernelError> {
    specs.iter().filter(|spec| STATE.contains(&spec.name)).try_for_each(|spec| pins.share(spec, directory))
}

/// When entries are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// The old programs still run, and change what they noted.
    Before,
    /// Only the new ones run.
    After,
}

type Copying = Box<dyn FnMut(Pass) -> Result<usize, KernelError> + Send>;

/// Whether a flow is copied. One that has closed is left for the second pass: an old program may yet put the next connection of the
/// client's port in its place, which the new ones would then take for the closed one, and send to its endpoint. Until the
/// second pass they know of neither, and wait.
const fn is_copied(flow: &Flow, pass: Pass) -> bool {
    matches!(pass, Pass::After) || !flow.is_closing()
}

const fn always<V>(_: &V, _: Pass) -> bool {
    true
}

/// Maps of state whose size changes: their entries are copied.
#[derive(Default)]
pub(crate) struct Copies(Vec<(&'static str, Copying)>);

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Copies {
    /// From the maps pinned in one directory to those of another that are not the same.
    pub(crate) fn between(pins: &PinDir, specs: &[MapSpec], directory: &Path) -> Result<Self, KernelError> {
        let mut copies = Self::default();
        copies.add::<AffinityKey, AffinityValue>("affinity", pins, specs, directory, always)?;
        copies.add::<SocketPeer, Endpoint>("udp_flows", pins, specs, directory, always)?;
        copies.add::<SocketPeer, Endpoint>("udp_replies", pins, specs, directory, always)?;
        copies.add::<u64, UdpSocket>("udp_sockets", pins, specs, directory, always)?;
        copies.add::<u64, Connection>("tcp_connections", pins, specs, directory, always)?;
        copies.add::<FlowKey, Flow>("flows", pins, specs, directory, is_copied)?;
        copies.add::<FragmentKey, FragmentValue>("fragments", pins, specs, directory, always)?;
        Ok(copies)
    }

    fn add<K, V>(
        &mut self,
        name: &'static str,
        pins: &PinDir,
        specs: &[MapSpec],
        directory: &Path,
        is_copied: fn(&V, Pass) -> bool,
    ) -> Result<(), KernelError>
    where
        K: Pod + Send + 'static,
        V: Pod + Send + 'static,
    {
        let spec = specs.iter().find(|spec| spec.name == name);
        let Some(mut from) = spec.map_or(Ok(None), |spec| pins.reader_of_other_size::<K, V>(spec))? else {
            return Ok(());
        };
        let failed = || KernelError::bpf("open map", name);
        let map = MapData::from_pin(directory.join(name)).map_err(failed())?;
        let map = Map::from_map_data(map).map_err(failed())?;
        let mut to: HashMap<MapData, K, V> = map.try_into().map_err(failed())?;
        self.0.push((
            name,
            Box::new(move |pass| copy(name, &mut from, &mut to, |value| is_copied(value, pass))),
        ));
        Ok(())
    }

    /// There is nothing to copy.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies what is not there yet. Called before programs are replaced and once more after it, it misses only what an old
    /// program notes while the new is put in its place.
    pub(crate) fn run(&mut self, pass: Pass) {
        for (map, copying) in &mut self.0 {
            match copying(pass) {
                Ok(entries) => tracing::info!(map, entries, "copied to a map of another size"),
                Err(error) => tracing::warn!(map, %error, "what it held is not all taken along"),
            }
        }
    }
}

fn copy<K: Pod, V: Pod>(
    name: &'static str,
    from: &mut Reader<K, V>,
    to: &mut HashMap<MapData, K, V>,
    is_copied: impl Fn(&V) -> bool,
) -> Result<usize, KernelError> {
    // The pass before may have ended with an error halfway.
    from.rewind();
    let mut copied = 0;
    loop {
        let entries = from.read().map_err(KernelError::call("read map", name))?;
        for (key, value) in entries.into_iter().filter(|(_, value)| is_copied(value)) {
            // It is there already, or the kernel has no memory for it now: the flow is one of those that begin anew.
            copied += usize::from(to.insert(key, value, BPF_NOEXIST).is_ok());
        }
        if from.is_at_beginning() {
            return Ok(copied);
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::flow_state;

    use super::*;

    #[test]
    fn a_closed_flow_is_copied_only_once_no_old_program_can_put_another_in_its_place() {
        let closed = Flow { state: flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED, ..Flow::NONE };
        let open = Flow { state: flow_state::REPLIED | flow_state::CLIENT_CLOSED, ..Flow::NONE };
        assert_eq!([Pass::Before, Pass::After].map(|pass| is_copied(&closed, pass)), [false, true]);
        assert_eq!([Pass::Before, Pass::After].map(|pass| is_copied(&open, pass)), [true, true]);
    }
}
