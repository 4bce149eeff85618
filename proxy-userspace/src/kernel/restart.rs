//! Restarts this program in its own process.

use std::{env, ffi::CString, fs, io, os::unix::ffi::OsStringExt as _, path::PathBuf};

use nix::unistd::execv;

use super::{KernelError, cpu_profile, hangup};

/// Replaces this process by the same program with the same arguments and environment. The process
/// number stays the same, so a container runtime does not see an exit. All open files are closed.
/// Returns only if this fails.
pub fn restart() -> KernelError {
    // The name of the file becomes the name of the process. If the file is gone, the link still
    // works.
    let link = PathBuf::from("/proc/self/exe");
    let program = fs::read_link(&link).ok().filter(|path| path.exists()).unwrap_or(link);
    let arguments: Result<Vec<CString>, _> =
        env::args_os().map(|argument| CString::new(argument.into_vec())).collect();
    let path = CString::new(program.clone().into_os_string().into_vec());
    cpu_profile::stop_timer();
    if let Err(error) = hangup::hold() {
        tracing::debug!(%error, "a SIGHUP during the restart ends shunt");
    }
    let error = match (path, arguments) {
        (Ok(path), Ok(arguments)) => match execv(&path, &arguments) {
            Ok(never) => match never {},
            Err(errno) => errno.into(),
        },
        (Err(error), _) | (_, Err(error)) => io::Error::other(error),
    };
    KernelError::path("execute", program)(error)
}
