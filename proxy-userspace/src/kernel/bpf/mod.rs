//! Loading a BPF object whose maps and links outlive the process: pinned, taken over, replaced without a gap.

mod batch;
mod link;
mod log;
mod mapped;
mod memlock;
mod pins;
mod syscall;
pub mod tc;
pub mod test_run;

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapError, MapInfo},
    programs::{Program, ProgramError, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};

use self::tc::LinkProgram;
pub use self::{
    batch::Reader,
    link::{Replacement, attach, is_attached},
    log::{LogLevel, MessageReader, RingReader},
    mapped::MappedWords,
    pins::{PinDir, first_words},
};
pub(super) use self::{
    pins::{BPFFS, is_bpffs},
    syscall::try_tcx,
};
use super::KernelError;

/// A map of an object: what it must look like for an existing one to be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// Its name in the object and on bpffs.
    pub name: &'static str,
    /// Bytes of a key.
    pub key_size: usize,
    /// Bytes of a value.
    pub value_size: usize,
    /// Capacity; 0 keeps what the object says.
    pub max_entries: u32,
}

impl MapSpec {
    /// Whether an existing map is the same but for its capacity.
    fn differs_in_size(&self, info: &MapInfo) -> bool {
        let resized = Self { max_entries: info.max_entries(), ..*self };
        !self.matches(info) && resized.matches(info)
    }

    /// Whether an existing map is the same, so that it can be used in place.
    fn matches(&self, info: &MapInfo) -> bool {
        info.key_size() as usize == self.key_size
            && info.value_size() as usize == self.value_size
            && (self.max_entries == 0 || info.max_entries() == self.max_entries)
    }
}

/// A loaded object: its maps exist and are pinned, its programs for cgroups have been checked by the kernel, nothing is attached.
#[derive(Debug)]
pub struct Object {
    ebpf: Ebpf,
    /// All maps, by name, whoever has taken them out meanwhile.
    maps: Vec<(&'static str, OwnedFd)>,
    /// Ids of the programs for links that were asked for, by name.
    link_programs: Vec<(&'static str, u32)>,
}

impl Object {
    /// Loads an object with its maps pinned in `directory`. Maps that are pinned there already are used as they are, so check
    /// with [`PinDir::holds`] first.
    /// `constants` are what the verifier shall take for given, by their names; `log_level` is what the programs
    /// write for [`RingReader`] and [`MessageReader`].
    pub fn load(
        bytes: &[u8],
        maps: &[MapSpec],
        constants: &[(&'static str, u32)],
        log_level: LogLevel,
        directory: &Path,
    ) -> Result<Self, KernelError> {
        memlock::lift_limit();
        let paths: Vec<PathBuf> = maps.iter().map(|map| directory.join(map.name)).collect();
        let mut loader = EbpfLoader::new();
        for (map, path) in maps.iter().zip(&paths) {
            if map.max_entries != 0 {
                loader.map_max_entries(map.name, map.max_entries);
            }
            loader.map_pin_path(map.name, path);
        }
        let has_set_retval = u8::from(may_choose_errors());
        loader.override_global("HAS_SET_RETVAL", &has_set_retval, true);
        let has_coarse_clock = u8::from(has_coarse_clock());
        loader.override_global("HAS_COARSE_CLOCK", &has_coarse_clock, true);
        for (name, value) in constants {
            loader.override_global(name, value, true);
        }
        let level = log_level.number();
        loader.override_global(log::LEVEL, &level, true);
        for ring in log::RINGS {
            loader.map_max_entries(ring, log_level.ring_bytes());
        }
        let mut ebpf = loader.load(bytes).map_err(KernelError::bpf("load", "the BPF object"))?;
        for (name, program) in ebpf.programs_mut().filter(|(_, program)| !is_for_links(program)) {
            load_program(program).map_err(KernelError::bpf("load program", name))?;
        }
        let open = |(map, path): (&MapSpec, &PathBuf)| {
            let map_fd = syscall::open_pin(path).map_err(KernelError::path("open map", path))?;
            Ok((map.name, map_fd))
        };
        let maps = maps.iter().zip(&paths).map(open).collect::<Result<_, KernelError>>()?;
        Ok(Self { ebpf, maps, link_programs: Vec::new() })
    }

    /// Every map has a pin in this directory.
    pub fn is_pinned(&self, directory: &Path) -> bool {
        self.maps.iter().all(|(name, _)| directory.join(name).exists())
    }

    /// Pins the maps that someone unpinned.
    pub fn restore_pins(&self, directory: &Path) -> Result<(), KernelError> {
        let unpinned = self.maps.iter().map(|(name, map)| (directory.join(name), map));
        for (path, map) in unpinned.filter(|(path, _)| !path.exists()) {
            syscall::pin(map.as_fd(), &path).map_err(KernelError::path("pin map", path))?;
        }
        Ok(())
    }

    /// Reads a hash map in large pieces. The types' sizes are those of its specification.
    pub fn reader<K: aya::Pod, V: aya::Pod>(&self, name: &'static str) -> Result<Reader<K, V>, KernelError> {
        self.map(name)?.try_clone().map(Reader::new).map_err(KernelError::call("open map", name))
    }

    /// An array of so many words as memory.
    pub fn mapped(&self, name: &'static str, words: u32) -> Result<MappedWords, KernelError> {
        let map = self.map(name)?;
        MappedWords::new(map, words).map_err(KernelError::call("map into memory", name))
    }

    fn map(&self, name: &'static str) -> Result<&OwnedFd, KernelError> {
        let missing = || KernelError::call("find map", name)(ErrorKind::NotFound.into());
        self.maps.iter().find_map(|(known, map)| (*known == name).then_some(map)).ok_or_else(missing)
    }

    /// Takes a map out, to be given its type.
    pub fn take_map<M>(&mut self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<Map, Error = MapError>,
    {
        let missing = || KernelError::call("find map", name)(ErrorKind::NotFound.into());
        let map = self.ebpf.take_map(name).ok_or_else(missing)?;
        M::try_from(map).map_err(KernelError::bpf("open map", name))
    }

    /// The program for links of this name, which the kernel checks when it is first asked for.
    pub fn link_program(&mut self, name: &'static str) -> Result<LinkProgram<'_>, KernelError> {
        let missing = || KernelError::call("find program", name)(ErrorKind::NotFound.into());
        let known = self.link_program_id(name);
        let program = self.ebpf.program_mut(name).ok_or_else(missing)?;
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

    /// The id of the program for links of this name, if it was ever asked for.
    pub fn link_program_id(&self, name: &str) -> Option<u32> {
        self.link_programs.iter().find_map(|(known, id)| (*known == name).then_some(*id))
    }

    /// The programs for a cgroup, by name.
    pub fn cgroup_programs_mut(&mut self) -> impl Iterator<Item = (&str, &mut Program)> {
        self.ebpf.programs_mut().filter(|(_, program)| !is_for_links(program))
    }
}

const fn is_for_links(program: &Program) -> bool {
    matches!(program, Program::SchedClassifier(_))
}

/// Whether programs that are asked for an address may choose the error their caller sees; else it sees EPERM. The helper came with kernel 5.18
/// (b44123b4a3dc), but to these programs only with 6.1 (bed89185af0d), so that a version says little.
pub fn may_choose_errors() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_helper(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval))
}

/// Whether programs may ask for the time of the kernel's last tick, which costs a tenth of asking the hardware. Kernel 5.11
/// (d05512618056).
pub fn has_coarse_clock() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_helper(ProgramType::SchedClassifier, BpfHelper::BPF_FUNC_ktime_get_coarse_ns))
}

fn has_helper(program: ProgramType, helper: BpfHelper) -> bool {
    is_helper_supported(program, helper).unwrap_or_else(|error| {
        tracing::debug!(%error, ?helper, "cannot tell whether there is this helper; going without");
        false
    })
}

/// How many CPUs this machine may have: their numbers are smaller than that.
pub fn cpus() -> Result<u32, KernelError> {
    let count = aya::util::nr_cpus().map_err(|(path, error)| KernelError::path("read", path)(error))?;
    u32::try_from(count).map_err(|error| KernelError::call("count", "CPUs")(io::Error::other(error)))
}

/// A signal that comes while the kernel verifies a program makes it stop and say EAGAIN (c3494801cd17). libbpf asks five times, which on
/// a busy machine was seen not to be enough: there one look takes tenths of a second.
const LOAD_ATTEMPTS: usize = 50;
/// Lets a burst of signals pass.
const LOAD_PAUSE: Duration = Duration::from_millis(10);

fn load_program(program: &mut Program) -> Result<(), ProgramError> {
    let mut load = || match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    };
    let is_interrupted = |loaded: &Result<(), ProgramError>| matches!(loaded, Err(ProgramError::LoadError { io_error, .. }) if io_error.kind() == ErrorKind::WouldBlock);
    for _ in 1..LOAD_ATTEMPTS {
        let loaded = load();
        if !is_interrupted(&loaded) {
            return loaded;
        }
        thread::sleep(LOAD_PAUSE);
    }
    load()
}
