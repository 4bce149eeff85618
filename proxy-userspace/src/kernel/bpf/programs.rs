//! Reads how often programs ran, and how long.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use aya::{
    programs::{ProgramError, ProgramInfo, loaded_programs},
    sys::{Stats, enable_stats},
};

use super::{super::KernelError, syscall};

/// How often a program ran, and how long, while some process had [`RunStatistics`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramRuns {
    /// The id of the program.
    pub id: u32,
    /// Its name in the kernel: at most 15 characters.
    pub name: String,
    /// The number of runs on all CPUs.
    pub runs: u64,
    /// The time of all runs.
    pub run_time: Duration,
}

/// Makes the kernel measure the runs of all programs of the machine, which costs some ten
/// nanoseconds a run. The kernel stops when the last process that wants it ends, in whatever way,
/// unless `kernel.bpf_stats_enabled` is set.
#[derive(Debug)]
pub struct RunStatistics {
    _descriptor: OwnedFd,
}

impl RunStatistics {
    /// Begins to measure. Needs `CAP_SYS_ADMIN`. Kernel 5.8 (d46edd671a14).
    pub fn enable() -> Result<Self, KernelError> {
        let enabled = enable_stats(Stats::RunTime);
        enabled
            .map(|descriptor| Self { _descriptor: descriptor })
            .map_err(|error| KernelError::call("measure", "the runs of programs")(error.io_error))
    }
}

/// Returns the programs of the machine whose name begins with `prefix`, in the order of their ids.
/// Needs `CAP_SYS_ADMIN`.
pub fn loaded(prefix: &str) -> Result<Vec<ProgramRuns>, KernelError> {
    let mut found = Vec::new();
    for program in loaded_programs() {
        let info = match program {
            Ok(info) => info,
            // It was unloaded meanwhile.
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(KernelError::bpf("list", "programs")(error)),
        };
        let Some(name) = info.name_as_str().filter(|name| name.starts_with(prefix)) else { continue };
        let Ok(descriptor) = info.fd() else { continue };
        let (run_time_ns, runs) = syscall::program_runs(descriptor.as_fd())
            .map_err(KernelError::call("inspect program", name.to_owned()))?;
        let run_time = Duration::from_nanos(run_time_ns);
        found.push(ProgramRuns { id: info.id(), name: name.to_owned(), runs, run_time });
    }
    Ok(found)
}

/// Returns the program of the machine with this id. Needs `CAP_SYS_ADMIN`.
pub(super) fn with_id(id: u32) -> Result<Option<ProgramInfo>, KernelError> {
    for program in loaded_programs() {
        match program {
            Ok(program) if program.id() == id => return Ok(Some(program)),
            Ok(_) => {}
            // It was unloaded meanwhile.
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(KernelError::bpf("list", "programs")(error)),
        }
    }
    Ok(None)
}

/// Returns the descriptor of the program of the machine with this name that was loaded last. Needs
/// `CAP_SYS_ADMIN`.
pub fn newest(name: &str) -> Result<Option<OwnedFd>, KernelError> {
    let programs = loaded_programs().filter_map(Result::ok);
    let named = programs.filter(|program| program.name_as_str() == Some(name));
    let Some(program) = named.max_by_key(ProgramInfo::id) else { return Ok(None) };
    let descriptor = program.fd().map_err(KernelError::bpf("open program", name.to_owned()))?;
    descriptor
        .as_fd()
        .try_clone_to_owned()
        .map(Some)
        .map_err(KernelError::call("open program", name.to_owned()))
}

fn is_gone(error: &ProgramError) -> bool {
    matches!(error, ProgramError::SyscallError(error) if error.io_error.kind() == io::ErrorKind::NotFound)
}
