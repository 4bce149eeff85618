//! Loads a copy of a link program beside the one in use, to run it over a frame.

use std::{os::fd::BorrowedFd, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, SchedClassifier},
};

use super::{Globals, LogLevel, Recording, load_program, missing};
use crate::kernel::KernelError;

/// The entries of a map that the copy has for itself. An LRU map needs some for each CPU.
const OWN_ENTRIES: u32 = 1024;

/// A copy of a link program. Its maps of its own go with it.
pub struct ProgramCopy {
    ebpf: Ebpf,
    name: &'static str,
}

impl ProgramCopy {
    /// Loads a copy. It uses the maps `shared` that are pinned in a directory, and has others for
    /// itself; those in `resizable` get few entries. Nothing is pinned or attached.
    ///
    /// # Errors
    /// Returns an error if a shared map is not pinned, or if the kernel refuses the program.
    pub fn load(
        bytes: &[u8],
        name: &'static str,
        (directory, shared): (&Path, &[&'static str]),
        resizable: &[&'static str],
        constants: &[(&'static str, u32)],
    ) -> Result<Self, KernelError> {
        let paths: Vec<_> = shared.iter().map(|map| (*map, directory.join(map))).collect();
        let mut loader = EbpfLoader::new();
        for (map, path) in &paths {
            // The loader would pin a new map.
            path.symlink_metadata().map_err(KernelError::path("open map", path.clone()))?;
            loader.map_pin_path(map, path);
        }
        for map in resizable {
            loader.map_max_entries(map, OWN_ENTRIES);
        }
        let globals = Globals::new(bytes, constants, Recording::Log(LogLevel::Off));
        globals.set(&mut loader);
        let mut ebpf = loader.load(bytes).map_err(KernelError::bpf("load", "the BPF object"))?;
        let program = ebpf.program_mut(name).ok_or_else(missing("program", name))?;
        load_program(program).map_err(KernelError::bpf("load program", name))?;
        Ok(Self { ebpf, name })
    }

    /// Returns the program.
    pub fn program(&self) -> Result<BorrowedFd<'_>, KernelError> {
        let program = self.ebpf.program(self.name).ok_or_else(missing("program", self.name))?;
        match program {
            Program::SchedClassifier(program) => SchedClassifier::fd(program)
                .map(std::os::fd::AsFd::as_fd)
                .map_err(KernelError::bpf("find program", self.name)),
            _ => Err(missing("link program", self.name)()),
        }
    }
}
