//! Starting this program anew in its own process.

use std::{env, ffi::CString, fs, io, os::unix::ffi::OsStringExt as _, path::PathBuf};

use nix::unistd::execv;

use super::KernelError;

/// Puts the same program with the same arguments and environment in place of this process: its number stays, so that whoever
/// started it, as a container's runtime, sees no end. All that it has open is closed. Returns only if that fails.
pub fn restart() -> KernelError {
    // By its name, so that the new process shows under it; by the link where a file of that name is no more.
    let link = PathBuf::from("/proc/self/exe");
    let program = fs::read_link(&link).ok().filter(|path| path.exists()).unwrap_or(link);
    let arguments: Result<Vec<CString>, _> =
        env::args_os().map(|argument| CString::new(argument.into_vec())).collect();
    let path = CString::new(program.clone().into_os_string().into_vec());
    let error = match (path, arguments) {
        (Ok(path), Ok(arguments)) => match execv(&path, &arguments) {
            Ok(never) => match never {},
            Err(errno) => errno.into(),
        },
        (Err(error), _) | (_, Err(error)) => io::Error::other(error),
    };
    KernelError::path("execute", program)(error)
}
