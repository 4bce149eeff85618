//! Copies or shares the programs' state into new maps: flows, sockets and affinity.

use std::{any::Any, path::Path};

use aya::{
    Pod,
    maps::{HashMap, MapData},
};
use proxy_common::{
    Addr, for_each_map,
    layout::{
        AffinityKey, AffinityValue, Connection, DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4, Endpoint,
        Flow, FlowKey, FragmentKey, FragmentValue, MAPS, MapContent, SocketPeer, UdpSocket,
    },
};

use super::super::maps::open_pinned;
use crate::kernel::{
    KernelError,
    bpf::{MapSpec, PinDir, Reader},
};

/// Fails if there is an entry, which the new programs have written meanwhile.
const BPF_NOEXIST: u64 = 1;

/// Pins the maps of state among the new maps too, if their size does not change. Old and new
/// programs then use the same maps while the new ones replace the old ones.
pub(crate) fn share(pins: &PinDir, specs: &[MapSpec], directory: &Path) -> Result<(), KernelError> {
    let maps = MAPS.iter().zip(specs).filter(|(map, _)| map.content == MapContent::State);
    maps.map(|(_, spec)| spec).try_for_each(|spec| pins.share(spec, directory))
}

/// A pass over the maps whose entries are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyPass {
    /// The old programs still run, and change their entries.
    First,
    /// Only the new programs run.
    Second,
}

type CopyEntries = Box<dyn FnMut(CopyPass) -> Result<usize, KernelError> + Send>;

/// Returns true if an entry is copied. A flow that has closed waits for the second pass: an old
/// program may still put the next connection of the same client port in its place. The new programs
/// would confuse it with the closed connection, and send it to the endpoint of that one.
/// Until the second pass they know neither, and wait.
fn is_copied<V: Any>(value: &V, pass: CopyPass) -> bool {
    let flow = (value as &dyn Any).downcast_ref::<Flow>();
    pass == CopyPass::Second || !flow.is_some_and(Flow::is_closed)
}

/// The maps of state whose size changes. Their entries are copied.
#[derive(Default)]
pub(crate) struct StateCopies(Vec<(&'static str, CopyEntries)>);

impl StateCopies {
    /// Opens the maps that are pinned in `pins` and the new ones in `directory`, if they differ in
    /// size.
    pub(crate) fn between(pins: &PinDir, specs: &[MapSpec], directory: &Path) -> Result<Self, KernelError> {
        let mut copies = Self::default();
        macro_rules! add {
            (LruHashMap $name:literal $key:ty, $value:ty) => {
                copies.add::<$key, $value>($name, pins, specs, directory)?;
            };
            ($($other:tt)*) => {};
        }
        macro_rules! add_all {
            ($($map:ident $name:literal $type:ident<$key:ty, $value:ty> $content:ident
                $(size $field:ident $(= $default:literal $setting:literal)?)? $(fixed $entries:expr)?;)*) => {
                $(add!($type $name $key, $value);)*
            };
        }
        for_each_map!(add_all);
        Ok(copies)
    }

    fn add<K, V>(
        &mut self,
        name: &'static str,
        pins: &PinDir,
        specs: &[MapSpec],
        directory: &Path,
    ) -> Result<(), KernelError>
    where
        K: Pod + Send + 'static,
        V: Pod + Send + 'static,
    {
        let spec = specs.iter().find(|spec| spec.name == name);
        let Some(mut from) = spec.map_or(Ok(None), |spec| pins.reader_of_other_size::<K, V>(spec))? else {
            return Ok(());
        };
        let mut to: HashMap<MapData, K, V> = open_pinned(directory, name)?;
        self.0.push((name, Box::new(move |pass| copy(name, &mut from, &mut to, pass))));
        Ok(())
    }

    /// Returns true if there is nothing to copy.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies the entries that are missing. It is called before programs are replaced, and again
    /// after that. It misses only what an old program writes at the moment when it is replaced.
    pub(crate) fn run(&mut self, pass: CopyPass) {
        for (map, copy) in &mut self.0 {
            match copy(pass) {
                Ok(entries) => tracing::info!(map, entries, "copied entries to a map of another size"),
                Err(error) => {
                    tracing::warn!(map, %error, "cannot copy all entries to a map of another size: some connections may break");
                }
            }
        }
    }
}

fn copy<K: Pod, V: Pod + Any>(
    name: &'static str,
    from: &mut Reader<K, V>,
    to: &mut HashMap<MapData, K, V>,
    pass: CopyPass,
) -> Result<usize, KernelError> {
    // The pass before may have ended in the middle with an error.
    from.rewind();
    let mut copied = 0;
    loop {
        let entries = from.read().map_err(KernelError::call("read map", name))?;
        for (key, value) in entries.into_iter().filter(|(_, value)| is_copied(value, pass)) {
            // The entry exists already, or the kernel has no memory now. Then the flow starts
            // again.
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
    fn closed_flow_is_copied_only_after_all_programs_are_replaced() {
        let closed = Flow { state: flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED, ..Flow::NONE };
        let open = Flow { state: flow_state::REPLIED | flow_state::CLIENT_CLOSED, ..Flow::NONE };
        assert_eq!([CopyPass::First, CopyPass::Second].map(|pass| is_copied(&closed, pass)), [false, true]);
        assert_eq!([CopyPass::First, CopyPass::Second].map(|pass| is_copied(&open, pass)), [true, true]);
    }
}
