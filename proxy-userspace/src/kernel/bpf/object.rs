//! Loads a BPF object and the programs in it. Its maps and links are pinned and outlive the
//! process.

use std::{
    borrow::Cow,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError},
    programs::Program,
};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::{
    super::{KernelError, cgroup::Cgroup},
    Globals, LogLevel, MapSpec, MappedWords, Reader, Recording, Writer, link, load_program, missing,
    reuse::SamePrograms,
    source_lines, syscall,
    tc::LinkProgram,
};

/// A loaded object. Its maps exist and are pinned, and its cgroup programs are in the kernel.
#[derive(Debug)]
pub struct Object {
    pub(super) ebpf: Ebpf,
    /// All maps by name, including those that were taken out.
    maps: Vec<(&'static str, OwnedFd)>,
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
        bytes: &[u8],
        maps: &[MapSpec],
        constants: &[(&'static str, u32)],
        recording: Recording,
        directory: &Path,
    ) -> Result<Self, KernelError> {
        // Kernels before 5.11 (97306be45fbe) charge maps and programs to this limit. If it cannot
        // be lifted, creating a map fails.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
        let paths: Vec<PathBuf> = maps.iter().map(|map| directory.join(map.name)).collect();
        let mut loader = EbpfLoader::new();
        for (map, path) in maps.iter().zip(&paths) {
            if map.max_entries != 0 {
                loader.map_max_entries(map.name, map.max_entries);
            }
            loader.map_pin_path(map.name, path);
        }
        let globals = Globals::new(bytes, recording);
        globals.set(&mut loader, constants);
        let bytes = match recording {
            Recording::Log(LogLevel::Off) => source_lines::without_source_lines(bytes).into(),
            Recording::Log(_) | Recording::Trace { .. } => Cow::Borrowed(bytes),
        };
        let mut ebpf = loader.load(&bytes).map_err(KernelError::bpf("load", "the BPF object"))?;
        let same = match recording {
            Recording::Log(LogLevel::Off) => SamePrograms::find(&ebpf, maps, directory),
            Recording::Log(_) | Recording::Trace { .. } => SamePrograms::default(),
        };
        let is_missing = |name: &str, program: &Program| is_of_cgroup(program) && same.named(name).is_none();
        for (name, program) in ebpf.programs_mut().filter(|(name, program)| is_missing(name, program)) {
            load_program(program).map_err(KernelError::bpf("load program", name))?;
        }
        let open = |(map, path): (&MapSpec, &PathBuf)| {
            let map_fd = syscall::open_pin(path).map_err(KernelError::path("open map", path))?;
            Ok((map.name, map_fd))
        };
        let maps = maps.iter().zip(&paths).map(open).collect::<Result<_, KernelError>>()?;
        let is_of_link = |name: &str| ebpf.program(name).is_some_and(|program| !is_of_cgroup(program));
        let link_programs = same.ids().filter(|(name, _)| is_of_link(name));
        let link_programs = link_programs.map(|(name, id)| (name.to_owned(), id)).collect();
        Ok(Self { ebpf, maps, same, link_programs })
    }

    /// Returns true if every map is pinned in this directory.
    pub fn is_pinned(&self, directory: &Path) -> bool {
        self.maps.iter().all(|(name, _)| directory.join(name).exists())
    }

    /// Pins the maps whose pins were removed.
    pub fn restore_pins(&self, directory: &Path) -> Result<(), KernelError> {
        let unpinned = self.maps.iter().map(|(name, map)| (directory.join(name), map));
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

    /// Takes a map out as a map with types.
    pub fn take_map<M>(&mut self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<Map, Error = MapError>,
    {
        let map = self.ebpf.take_map(name).ok_or_else(missing("map", name))?;
        M::try_from(map).map_err(KernelError::bpf("open map", name))
    }

    /// Returns the link program with this name. The first call loads it, unless an earlier process
    /// loaded the same.
    pub fn link_program(&mut self, name: &'static str) -> Result<LinkProgram<'_>, KernelError> {
        let id = match self.link_program_id(name) {
            Some(id) => id,
            None => self.load_copy(name)?,
        };
        let fd = match self.same.with_id(id) {
            Some(program) => program,
            None => self.program(name)?.fd().map_err(KernelError::bpf("find program", name))?.as_fd(),
        };
        Ok(LinkProgram { name, fd, id })
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
        self.ebpf.program(name).ok_or_else(missing("program", name))
    }

    fn program_mut(&mut self, name: &str) -> Result<&mut Program, KernelError> {
        self.ebpf.program_mut(name).ok_or_else(missing("program", name))
    }

    /// Returns the id of the link program with this name, if it is loaded. Of several copies it is
    /// the last.
    fn link_program_id(&self, name: &str) -> Option<u32> {
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
        let programs = self.ebpf.programs().filter(|(_, program)| is_of_cgroup(program));
        programs.map(|(name, _)| name.to_owned()).collect()
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

const fn is_of_cgroup(program: &Program) -> bool {
    !matches!(program, Program::SchedClassifier(_) | Program::Xdp(_))
}
