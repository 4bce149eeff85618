//! What programs noted of flows and sockets, taken along when maps are built anew.

use std::{any::Any, fmt, path::Path};

use aya::{
    Pod,
    maps::{HashMap, Map, MapData},
};
use proxy_common::{
    for_each_map,
    layout::{
        AffinityKey, AffinityValue, Connection, Endpoint, Flow, FlowKey, FragmentKey, FragmentValue, MAPS,
        MapContent, SocketPeer, UdpSocket,
    },
};

use crate::kernel::{
    KernelError,
    bpf::{MapSpec, PinDir, Reader},
};

/// Keeps an entry that the new programs wrote meanwhile.
const BPF_NOEXIST: u64 = 1;

/// Uses the pinned maps of state among the new ones too, where they are of the same size: old and new programs then work with
/// one and the same while the new take the places of the old.
pub(crate) fn share(pins: &PinDir, specs: &[MapSpec], directory: &Path) -> Result<(), KernelError> {
    let maps = MAPS.iter().zip(specs).filter(|(map, _)| map.content == MapContent::State);
    maps.map(|(_, spec)| spec).try_for_each(|spec| pins.share(spec, directory))
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

/// Returns true if an entry is copied. A flow that has closed waits for the second pass: an old
/// program may still put the next connection of the same client port in its place. The new programs
/// would take that connection for the closed one, and send it to the endpoint of the closed one. Until
/// the second pass they know neither, and wait.
fn is_copied<V: Any>(value: &V, pass: Pass) -> bool {
    let flow = (value as &dyn Any).downcast_ref::<Flow>();
    pass == Pass::After || !flow.is_some_and(Flow::is_closing)
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
