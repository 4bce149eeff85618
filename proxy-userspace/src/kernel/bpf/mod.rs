//! Loads a BPF object whose maps and links outlive the process. They are pinned, and the next
//! process uses or replaces them without a gap.

mod batch;
mod bpffs;
mod copy;
mod directory_lock;
mod instructions;
mod link;
pub mod live_frames;
mod log;
mod mapped;
mod object;
mod object_file;
mod pins;
mod private_directory;
pub mod programs;
mod reuse;
mod source;
mod source_lines;
mod syscall;
pub mod tc;
pub mod test_run;
pub mod xdp;

use std::{
    io::{self, ErrorKind},
    sync::OnceLock,
};

use aya::{
    EbpfLoader,
    maps::MapInfo,
    programs::{Program, ProgramError, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};
use nix::sys::{
    resource::{RLIM_INFINITY, Resource, setrlimit},
    signal::{SigSet, SigmaskHow},
};

pub use self::{
    batch::{Reader, Writer},
    copy::ProgramCopy,
    link::{KnownLinks, is_attached},
    log::{LogLevel, LostRecords, MessageReader, Recording, RingReader, Wakeup},
    mapped::MappedWords,
    object::Object,
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

/// Global variables of the programs whose values the verifier takes as fixed.
#[derive(Debug, Hash)]
struct Globals {
    has_set_retval: u8,
    has_coarse_clock: u8,
    log_level: u8,
    captures: u32,
    rings: [(&'static str, u32); 3],
    others: Vec<(&'static str, u32)>,
    object_hash: u64,
}

impl Globals {
    fn new(object: &[u8], others: &[(&'static str, u32)], recording: Recording) -> Self {
        let mut globals = Self {
            has_set_retval: may_choose_errors().into(),
            has_coarse_clock: has_coarse_clock().into(),
            log_level: recording.level(),
            captures: recording.captures(),
            rings: recording.rings(),
            others: others.to_vec(),
            object_hash: 0,
        };
        globals.object_hash = reuse::hash(object, &globals);
        globals
    }

    fn set<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader.override_global("HAS_SET_RETVAL", &self.has_set_retval, true);
        loader.override_global("HAS_COARSE_CLOCK", &self.has_coarse_clock, true);
        for (name, value) in &self.others {
            loader.override_global(name, value, true);
        }
        loader.override_global(reuse::HASH, &self.object_hash, true);
        loader.override_global(log::LEVEL, &self.log_level, true);
        loader.override_global(log::CAPTURES, &self.captures, true);
        for (ring, bytes) in self.rings {
            loader.map_max_entries(ring, bytes);
        }
    }
}

/// Lifts the limit to which kernels before 5.11 (97306be45fbe) charge maps and programs. If it
/// cannot be lifted, creating one fails.
fn lift_memory_limit() {
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
}

fn missing(kind: &'static str, name: &str) -> impl FnOnce() -> KernelError {
    move || KernelError::call("find", format!("{kind} {name}"))(ErrorKind::NotFound.into())
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
    without_signals(|| match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::Xdp(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    })
}

fn without_signals(load: impl FnOnce() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(io::Error::from)?;
    let loaded = load();
    before.thread_set_mask().map_err(io::Error::from)?;
    loaded
}
