//! Loads a BPF object whose maps and links outlive the process. They are pinned, and the next
//! process uses or replaces them without a gap.

mod batch;
mod bpffs;
mod copy;
mod directory_lock;
mod link;
pub mod live_frames;
mod log;
mod mapped;
mod pins;
mod private_directory;
pub mod programs;
mod source_lines;
mod syscall;
pub mod tc;
pub mod test_run;
pub mod xdp;

use std::{
    borrow::Cow,
    io::{self, ErrorKind},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError, MapInfo},
    programs::{Program, ProgramError, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};
use nix::sys::{
    resource::{RLIM_INFINITY, Resource, setrlimit},
    signal::{SigSet, SigmaskHow},
};

use self::tc::LinkProgram;
pub use self::{
    batch::{Reader, Writer},
    copy::ProgramCopy,
    link::{KnownLinks, attach, is_attached},
    log::{LogLevel, LostRecords, MessageReader, Recording, RingReader, Wakeup},
    mapped::MappedWords,
    pins::{DEFAULT_PIN_DIR, PinDir, first_words, pinned_reader},
};
pub(super) use self::{
    bpffs::{BPFFS, check_lasting, is_bpffs, mount_bpffs},
    pins::{check_pin_directory, try_pin},
};
use super::KernelError;

/// The specification of a map. An existing map is used if it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// The name in the object and on bpffs.
    pub name: &'static str,
    /// Bytes of a key.
    pub key_size: usize,
    /// Bytes of a value.
    pub value_size: usize,
    /// The number of entries; 0 keeps that of the object.
    pub max_entries: u32,
}

impl MapSpec {
    /// Returns true if an existing map differs only in its number of entries.
    fn differs_in_size(&self, info: &MapInfo) -> bool {
        let resized = Self { max_entries: info.max_entries(), ..*self };
        !self.matches(info) && resized.matches(info)
    }

    /// Returns true if an existing map can be used.
    fn matches(&self, info: &MapInfo) -> bool {
        info.key_size() as usize == self.key_size
            && info.value_size() as usize == self.value_size
            && (self.max_entries == 0 || info.max_entries() == self.max_entries)
    }
}

/// A loaded object. Its maps exist and are pinned, its cgroup programs are loaded, and nothing is
/// attached.
#[derive(Debug)]
pub struct Object {
    ebpf: Ebpf,
    /// All maps by name, including those that were taken out.
    maps: Vec<(&'static str, OwnedFd)>,
    /// The ids of the link programs that are loaded, by name. Copies have the same name.
    link_programs: Vec<(&'static str, u32)>,
}

impl Object {
    /// Loads an object and pins its maps in `directory`. Maps that are pinned there already are
    /// used as they are: check them with [`PinDir::holds`] first.
    ///
    /// `constants` are global variables whose values the verifier takes as fixed. `recording` is
    /// what the programs write for [`RingReader`] and [`MessageReader`]. Programs that record
    /// anything keep their source lines, for the verifier's log and for bpftool.
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
        let globals = Globals::new(recording);
        globals.set(&mut loader, constants);
        let bytes = match recording {
            Recording::Log(LogLevel::Off) => source_lines::without_source_lines(bytes).into(),
            Recording::Log(_) | Recording::Trace { .. } => Cow::Borrowed(bytes),
        };
        let mut ebpf = loader.load(&bytes).map_err(KernelError::bpf("load", "the BPF object"))?;
        for (name, program) in ebpf.programs_mut().filter(|(_, program)| !is_link_program(program)) {
            load_program(program).map_err(KernelError::bpf("load program", name))?;
        }
        let open = |(map, path): (&MapSpec, &PathBuf)| {
            let map_fd = syscall::open_pin(path).map_err(KernelError::path("open map", path))?;
            Ok((map.name, map_fd))
        };
        let maps = maps.iter().zip(&paths).map(open).collect::<Result<_, KernelError>>()?;
        Ok(Self { ebpf, maps, link_programs: Vec::new() })
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

    /// Returns the link program with this name. The first call loads it.
    pub fn link_program(&mut self, name: &'static str) -> Result<LinkProgram<'_>, KernelError> {
        let known = self.link_program_id(name);
        let program = self.ebpf.program_mut(name).ok_or_else(missing("program", name))?;
        let id = if let Some(id) = known {
            id
        } else {
            load_program(program).map_err(KernelError::bpf("load program", name))?;
            let id = program.info().map_err(KernelError::bpf("inspect program", name))?.id();
            self.link_programs.push((name, id));
            id
        };
        let fd = program.fd().map_err(KernelError::bpf("find program", name))?;
        Ok(LinkProgram { name, fd: fd.as_fd(), id })
    }

    /// Returns a link program with this name whose id differs from one. Loads the program again if
    /// needed: a hook takes each program only once, so that a program takes its own place only as a
    /// copy.
    pub fn other_link_program(
        &mut self,
        name: &'static str,
        than: u32,
    ) -> Result<LinkProgram<'_>, KernelError> {
        if self.link_program(name)?.id == than {
            let program = self.ebpf.program_mut(name).ok_or_else(missing("program", name))?;
            if let Program::SchedClassifier(program) = program {
                // The kernel keeps the former copy where it is attached.
                program.unload().map_err(KernelError::bpf("unload program", name))?;
            }
            load_program(program).map_err(KernelError::bpf("load program", name))?;
            let id = program.info().map_err(KernelError::bpf("inspect program", name))?.id();
            self.link_programs.push((name, id));
        }
        self.link_program(name)
    }

    /// Returns the id of the link program with this name, if it is loaded. Of several copies it is
    /// the last.
    fn link_program_id(&self, name: &str) -> Option<u32> {
        self.link_programs.iter().rev().find_map(|(known, id)| (*known == name).then_some(*id))
    }

    /// Returns the names and ids of the link programs that are loaded.
    pub fn link_programs(&self) -> &[(&'static str, u32)] {
        &self.link_programs
    }

    /// Returns true if this object has loaded the program with this id, as the link program with
    /// this name.
    pub fn is_link_program(&self, name: &str, id: u32) -> bool {
        self.link_programs.contains(&(name, id))
    }

    /// Returns the cgroup programs by name.
    pub fn cgroup_programs_mut(&mut self) -> impl Iterator<Item = (&str, &mut Program)> {
        self.ebpf.programs_mut().filter(|(_, program)| !is_link_program(program))
    }
}

/// Global variables of the programs whose values the verifier takes as fixed.
struct Globals {
    has_set_retval: u8,
    has_coarse_clock: u8,
    log_level: u8,
    captures: u32,
    rings: [(&'static str, u32); 3],
}

impl Globals {
    fn new(recording: Recording) -> Self {
        Self {
            has_set_retval: may_choose_errors().into(),
            has_coarse_clock: has_coarse_clock().into(),
            log_level: recording.level(),
            captures: recording.captures(),
            rings: recording.rings(),
        }
    }

    fn set<'a>(&'a self, loader: &mut EbpfLoader<'a>, constants: &'a [(&'static str, u32)]) {
        loader.override_global("HAS_SET_RETVAL", &self.has_set_retval, true);
        loader.override_global("HAS_COARSE_CLOCK", &self.has_coarse_clock, true);
        for (name, value) in constants {
            loader.override_global(name, value, true);
        }
        loader.override_global(log::LEVEL, &self.log_level, true);
        loader.override_global(log::CAPTURES, &self.captures, true);
        for (ring, bytes) in self.rings {
            loader.map_max_entries(ring, bytes);
        }
    }
}

fn missing(kind: &'static str, name: &'static str) -> impl FnOnce() -> KernelError {
    move || KernelError::call("find", format!("{kind} {name}"))(ErrorKind::NotFound.into())
}

const fn is_link_program(program: &Program) -> bool {
    matches!(program, Program::SchedClassifier(_) | Program::Xdp(_))
}

/// Returns true if `connect` and `sendmsg` programs may choose the error that their caller gets.
/// Otherwise it gets EPERM. The helper exists since kernel 5.18 (b44123b4a3dc), but for these
/// programs only since 6.1 (bed89185af0d), and distributions backport it: the version of the kernel
/// does not decide.
pub fn may_choose_errors() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_helper(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval))
}

/// Returns true if programs may read the time of the kernel's last tick, which costs a tenth of
/// reading the hardware clock. Kernel 5.11 (d05512618056).
pub fn has_coarse_clock() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_helper(ProgramType::SchedClassifier, BpfHelper::BPF_FUNC_ktime_get_coarse_ns))
}

fn has_helper(program: ProgramType, helper: BpfHelper) -> bool {
    is_helper_supported(program, helper).unwrap_or_else(|error| {
        tracing::debug!(%error, ?helper, "cannot find out whether the kernel has this helper: programs do not use it");
        false
    })
}

/// Returns the number of possible CPUs. The numbers of CPUs are smaller.
pub fn cpus() -> Result<u32, KernelError> {
    let count = aya::util::nr_cpus().map_err(|(path, error)| KernelError::path("read", path)(error))?;
    u32::try_from(count).map_err(|error| KernelError::call("count", "CPUs")(io::Error::other(error)))
}

/// Loads a program with all signals blocked in this thread. A signal makes the verifier stop with
/// EAGAIN (c3494801cd17), such as SIGCHLD when a command ends. The loader would then ask for the
/// verifier's log: that takes ten times as long, and the log of a large program has no end.
fn load_program(program: &mut Program) -> Result<(), ProgramError> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(io::Error::from)?;
    let loaded = match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::Xdp(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    };
    before.thread_set_mask().map_err(io::Error::from)?;
    loaded
}
