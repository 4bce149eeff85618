//! What it takes to load an object.

use std::{
    borrow::Cow,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use aya::{Ebpf, EbpfLoader};

use super::{super::KernelError, Globals, LogLevel, MapSpec, Recording, source_lines, syscall};

/// An object, its settings, and the directory of its pinned maps.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) bytes: &'static [u8],
    pub(super) maps: Vec<MapSpec>,
    pub(super) globals: Globals,
    pub(super) recording: Recording,
    pub(super) directory: PathBuf,
}

impl Source {
    /// Creates the maps that are not pinned, pins them, and prepares the programs. None of them is
    /// loaded. aya reads the BTF of the whole kernel first, which takes 30 ms on a slow machine.
    pub(super) fn load(&self) -> Result<Ebpf, KernelError> {
        let pins: Vec<_> = self.pins().collect();
        let mut loader = EbpfLoader::new();
        for (map, pin) in &pins {
            if map.max_entries != 0 {
                loader.map_max_entries(map.name, map.max_entries);
            }
            loader.map_pin_path(map.name, pin);
        }
        self.globals.set(&mut loader);
        let bytes = match self.recording {
            Recording::Log(LogLevel::Off) => source_lines::without_source_lines(self.bytes).into(),
            Recording::Log(_) | Recording::Trace { .. } => Cow::Borrowed(self.bytes),
        };
        loader.load(&bytes).map_err(KernelError::bpf("load", "the BPF object"))
    }

    /// Opens the pinned maps.
    pub(super) fn open_maps(&self) -> Result<Vec<(&'static str, OwnedFd)>, KernelError> {
        let open = |(map, pin): (&MapSpec, PathBuf)| {
            let map_fd = syscall::open_pin(&pin).map_err(KernelError::path("open map", pin))?;
            Ok((map.name, map_fd))
        };
        self.pins().map(open).collect()
    }

    /// Returns true if every map is pinned.
    pub(super) fn is_pinned(&self) -> bool {
        self.is_pinned_in(&self.directory)
    }

    /// Returns true if every map is pinned in this directory.
    pub(super) fn is_pinned_in(&self, directory: &Path) -> bool {
        self.maps.iter().all(|map| directory.join(map.name).exists())
    }

    fn pins(&self) -> impl Iterator<Item = (&MapSpec, PathBuf)> {
        self.maps.iter().map(|map| (map, self.directory.join(map.name)))
    }
}
