//! Loads a BPF object and the programs in it. Its maps and links are pinned and outlive the
//! process.

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf,
    maps::{Map, MapData, MapError},
    programs::Program,
};

use super::{
    super::{KernelError, cgroup::Cgroup},
    Globals, LogLevel, MapSpec, MappedWords, Reader, Recording, Writer, lift_memory_limit, link,
    load_program, missing,
    object_file::{self, DeclaredProgram},
    programs,
    reuse::SamePrograms,
    source::Source,
    syscall,
    tc::LinkProgram,
    without_signals,
    xdp::dispatcher::{Extension, Target},
};

/// A loaded object. Its maps exist and are pinned, and its cgroup programs are in the kernel.
#[derive(Debug)]
pub struct Object {
    source: Box<Source>,
    /// None as long as the programs that an earlier process loaded are enough: aya reads the BTF of
    /// the whole kernel before it loads anything.
    ebpf: Option<Ebpf>,
    /// The pinned maps by name.
    maps: Vec<(&'static str, OwnedFd)>,
    programs: Vec<DeclaredProgram>,
    /// The programs that an earlier process loaded, and that need not be loaded.
    same: SamePrograms,
    /// The names and ids of the link programs that are in the kernel. Copies have the same name.
    link_programs: Vec<(String, u32)>,
}

impl Object {
    /// Loads an object and pins its maps in `directory`. Maps that are pinned there already are
    /// used as they are: check them with [`PinDir::holds`](super::PinDir::holds) first.
    ///
    /// `constants` are global variables whose values the verifier takes as fixed. `recording` is
    /// what the programs write for [`RingReader`](super::RingReader) and
    /// [`MessageReader`](super::MessageReader). Programs that record anything keep their source
    /// lines, for the verifier's log and for bpftool. Those that record nothing are not loaded if
    /// an earlier process loaded the same.
    pub fn load(
        bytes: &'static [u8],
        maps: &[MapSpec],
        constants: &[(&'static str, u32)],
        recording: Recording,
        directory: &Path,
    ) -> Result<Self, KernelError> {
        lift_memory_limit();
        let globals = Globals::new(bytes, constants, recording);
        let (maps, directory) = (maps.to_vec(), directory.to_owned());
        let source = Box::new(Source { bytes, maps, globals, recording, directory });
        let programs = object_file::programs(bytes);
        let same = match recording {
            Recording::Log(LogLevel::Off) => SamePrograms::find(&source, &programs),
            Recording::Log(_) | Recording::Trace { .. } => SamePrograms::default(),
        };
        let of_links = same.ids().filter(|(name, _)| !is_of_cgroup(&programs, name));
        let link_programs = of_links.map(|(name, id)| (name.to_owned(), id)).collect();
        let mut object = Self { source, ebpf: None, maps: Vec::new(), programs, same, link_programs };
        object.load_cgroup_programs()?;
        object.maps = object.source.open_maps()?;
        Ok(object)
    }

    /// Loads the cgroup programs that are not in the kernel.
    fn load_cgroup_programs(&mut self) -> Result<(), KernelError> {
        let mut missing = self.cgroup_programs();
        missing.retain(|name| self.same.named(name).is_none());
        for name in &missing {
            load_program(self.program_mut(name)?).map_err(KernelError::bpf("load program", name.clone()))?;
        }
        Ok(())
    }

    /// Returns the object as aya has it. The first call loads it.
    pub(super) fn loaded(&mut self) -> Result<&mut Ebpf, KernelError> {
        let ebpf = if let Some(ebpf) = self.ebpf.take() {
            ebpf
        } else {
            // Other maps would be created where pins are gone.
            self.pin_maps()?;
            self.source.load()?
        };
        Ok(self.ebpf.insert(ebpf))
    }

    /// Returns true if every map is pinned in this directory.
    pub fn is_pinned(&self, directory: &Path) -> bool {
        self.source.is_pinned_in(directory)
    }

    /// Pins the maps whose pins were removed. From now on they are in this directory.
    pub fn restore_pins(&mut self, directory: &Path) -> Result<(), KernelError> {
        directory.clone_into(&mut self.source.directory);
        self.pin_maps()
    }

    fn pin_maps(&self) -> Result<(), KernelError> {
        let unpinned = self.maps.iter().map(|(name, map)| (self.source.directory.join(name), map));
        for (path, map) in unpinned.filter(|(path, _)| !path.exists()) {
            syscall::pin(map.as_fd(), &path).map_err(KernelError::path("pin map", path))?;
        }
        Ok(())
    }

    /// Returns a reader of a map. The types must have the sizes of its specification.
    pub fn reader<K: aya::Pod, V: aya::Pod>(&self, name: &'static str) -> Result<Reader<K, V>, KernelError> {
        self.map(name)?.try_clone().map(Reader::new).map_err(KernelError::call("open map", name))
    }

    /// Returns a writer of batches of a hash map.
    pub fn writer<K: aya::Pod, V: aya::Pod>(&self, name: &'static str) -> Result<Writer<K, V>, KernelError> {
        self.map(name)?.try_clone().map(Writer::new).map_err(KernelError::call("open map", name))
    }

    /// Opens a map once more, as a map with types.
    pub fn open_map<M>(&self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<Map, Error = MapError>,
    {
        let map = self.map(name)?.try_clone().map_err(KernelError::call("open map", name))?;
        let map = MapData::from_fd(map).and_then(Map::from_map_data).and_then(M::try_from);
        map.map_err(KernelError::bpf("open map", name))
    }

    /// Maps an array of 64-bit words into memory.
    pub fn mapped(&self, name: &'static str, words: u32) -> Result<MappedWords, KernelError> {
        let map = self.map(name)?;
        MappedWords::new(map, words).map_err(KernelError::call("map into memory", name))
    }

    fn map(&self, name: &'static str) -> Result<&OwnedFd, KernelError> {
        self.maps
            .iter()
            .find_map(|(known, map)| (*known == name).then_some(map))
            .ok_or_else(missing("map", name))
    }

    /// Takes a map out as a map with types. Only pinned maps can be taken again.
    pub fn take_map<M>(&mut self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<Map, Error = MapError>,
    {
        if self.map(name).is_ok() {
            return self.open_map(name);
        }
        let map = self.loaded()?.take_map(name).ok_or_else(missing("map", name))?;
        M::try_from(map).map_err(KernelError::bpf("open map", name))
    }

    /// Returns the link program with this name. The first call loads it, unless an earlier process
    /// loaded the same.
    pub fn link_program(&mut self, name: &'static str) -> Result<LinkProgram<'_>, KernelError> {
        let id = match self.link_program_id(name) {
            Some(id) => id,
            None => self.load_copy(name)?,
        };
        Ok(LinkProgram { name, fd: self.fd(name, id)?, id })
    }

    /// Returns the descriptor of the program with this id, which is that of this process if no
    /// earlier one loaded it.
    fn fd(&self, name: &'static str, id: u32) -> Result<BorrowedFd<'_>, KernelError> {
        match self.same.with_id(id) {
            Some(program) => Ok(program),
            None => Ok(self.program(name)?.fd().map_err(KernelError::bpf("find program", name))?.as_fd()),
        }
    }

    /// Returns the extension program with this name, which can replace a function like the target.
    /// The first call loads it, unless an earlier process loaded the same.
    pub fn extension(&mut self, name: &'static str, target: &Target) -> Result<Extension, KernelError> {
        let id = match self.link_program_id(name) {
            Some(id) => id,
            None => self.load_extension(name, target)?,
        };
        let program = self.fd(name, id)?.try_clone_to_owned();
        Ok(Extension { program: program.map_err(KernelError::call("open program", name))?, id })
    }

    fn load_extension(&mut self, name: &'static str, target: &Target) -> Result<u32, KernelError> {
        let replaced =
            programs::with_id(target.dispatcher)?.ok_or_else(missing("program", "xdp_dispatcher"))?;
        let replaced = replaced.fd().map_err(KernelError::bpf("open program", "xdp_dispatcher"))?;
        let Program::Extension(program) = self.program_mut(name)? else {
            return Err(missing("extension program", name)());
        };
        without_signals(|| program.load(replaced, &target.function))
            .map_err(KernelError::bpf("load program", name))?;
        let id = program.info().map_err(KernelError::bpf("inspect program", name))?.id();
        self.link_programs.push((name.to_owned(), id));
        Ok(id)
    }

    /// Returns a link program with this name whose id differs from one. Loads the program again if
    /// needed: a hook takes each program only once, so that a program takes its own place only as a
    /// copy.
    pub fn other_link_program(
        &mut self,
        name: &'static str,
        than: u32,
    ) -> Result<LinkProgram<'_>, KernelError> {
        if self.link_program_id(name) == Some(than) {
            self.load_copy(name)?;
        }
        self.link_program(name)
    }

    /// Loads a program, also if it is loaded already, and returns its id.
    fn load_copy(&mut self, name: &'static str) -> Result<u32, KernelError> {
        let program = self.program_mut(name)?;
        if program.fd().is_ok()
            && let Program::SchedClassifier(program) = program
        {
            // The kernel keeps the former copy where it is attached.
            program.unload().map_err(KernelError::bpf("unload program", name))?;
        }
        load_program(program).map_err(KernelError::bpf("load program", name))?;
        let id = program.info().map_err(KernelError::bpf("inspect program", name))?.id();
        self.link_programs.push((name.to_owned(), id));
        Ok(id)
    }

    fn program(&self, name: &str) -> Result<&Program, KernelError> {
        self.ebpf.as_ref().and_then(|ebpf| ebpf.program(name)).ok_or_else(missing("program", name))
    }

    fn program_mut(&mut self, name: &str) -> Result<&mut Program, KernelError> {
        self.loaded()?.program_mut(name).ok_or_else(missing("program", name))
    }

    /// Returns the id of the link program with this name, if it is loaded. Of several copies it is
    /// the last.
    pub fn link_program_id(&self, name: &str) -> Option<u32> {
        self.link_programs.iter().rev().find_map(|(known, id)| (known == name).then_some(*id))
    }

    /// Returns the names and ids of the link programs that are in the kernel.
    pub fn link_programs(&self) -> &[(String, u32)] {
        &self.link_programs
    }

    /// Returns true if the program with this id is one of this object, the link program with this
    /// name.
    pub fn is_link_program(&self, name: &str, id: u32) -> bool {
        self.link_programs.iter().any(|(known, program)| (&**known, *program) == (name, id))
    }

    /// Returns the names of the cgroup programs.
    pub fn cgroup_programs(&self) -> Vec<String> {
        let programs = self.programs.iter().filter(|program| program.is_of_cgroup);
        programs.map(|program| program.name.clone()).collect()
    }

    /// Attaches a program to a cgroup, through a link that is pinned at `pin`. If a link of this
    /// cgroup is pinned there already, its program is replaced. Otherwise a new link is pinned
    /// there.
    pub fn attach(&mut self, name: &str, cgroup: &Cgroup, pin: &Path) -> Result<(), KernelError> {
        if let Some(program) = self.same.named(name)
            && link::replace_program(program, cgroup, pin)?
        {
            return Ok(());
        }
        let program = self.program_mut(name)?;
        if program.fd().is_err() {
            load_program(program).map_err(KernelError::bpf("load program", name))?;
        }
        link::attach(program, cgroup, pin)
    }
}

fn is_of_cgroup(programs: &[DeclaredProgram], name: &str) -> bool {
    programs.iter().any(|program| program.is_of_cgroup && program.name == name)
}
