//! `cargo xtask vm`: runs the kernel tests, or any command, in a virtual machine with another
//! kernel.

mod apt;
mod archive;
mod cache;
pub(crate) mod elf;
mod guest;
mod kernel;
mod modules;
mod qemu;
mod suite;
mod userland;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

pub(crate) use self::apt::Apt;
pub(crate) use self::guest::Guest;
pub(crate) use self::kernel::{Kernel, MIRROR, stable};
pub(crate) use self::suite::{PATIENCE, Part, one_after_the_other};
use super::progress::Progress;
use super::release::Target;
use super::setup;

/// Arguments of `cargo xtask vm`.
#[derive(Debug, Args)]
pub(crate) struct Vm {
    /// The kernel: Debian's cloud kernel of this version, fetched once and kept in target/vm.
    #[arg(long, default_value = "6.1")]
    kernel: Kernel,
    /// The architecture. For another one than this machine's, the kernel tests are compiled for it,
    /// and the guest's programs are fetched from Debian.
    #[arg(long, default_value = "amd64")]
    arch: Target,
    /// Copy this file or folder into the guest, to the same path.
    #[arg(long, value_name = "PATH")]
    copy: Vec<PathBuf>,
    /// Stop the machine after this number of minutes.
    #[arg(long, value_name = "MINUTES", default_value_t = 20)]
    limit: u64,
    /// Run only this part of the kernel tests.
    #[arg(long, value_enum)]
    part: Option<Part>,
    /// Leave out kernel tests whose names contain this.
    #[arg(long, value_name = "TEXT")]
    skip: Vec<String>,
    /// The command to run instead of the kernel tests.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command, or the kernel tests. Returns the exit code of the command in the guest.
pub(crate) fn run(what: &Vm) -> Result<ExitCode> {
    let guest = if what.command.is_empty() {
        setup::ensure()?;
        setup::ensure_components();
        let mut guest = suite::guest(what.arch, what.part, &what.skip)?;
        guest.copies.extend_from_slice(&what.copy);
        guest
    } else {
        Guest { copies: what.copy.clone(), arch: what.arch, ..Guest::new(what.command.clone())? }
    };
    let limit = Duration::from_mins(what.limit);
    boot(what.kernel, &guest, limit, &mut |line| println!("{line}")).map(ExitCode::from)
}

/// Boots a kernel with a guest, and calls `each` with every line of output. Returns the exit code
/// of the command.
pub(crate) fn boot(kernel: Kernel, guest: &Guest, limit: Duration, each: &mut dyn FnMut(&str)) -> Result<u8> {
    setup::ensure_vm(guest.arch)?;
    let fetched = kernel.fetch(guest.arch)?;
    let progress = Progress::start(&format!("kernel {}", fetched.release));
    let mut progress = Some(progress);
    let code = qemu::run(kernel, &fetched, guest, limit, &mut |line| {
        // The command's output replaces the spinner.
        if let Some(progress) = progress.take() {
            progress.end("started");
        }
        each(line);
    });
    if let Some(progress) = progress {
        progress.end(if code.is_ok() { "ended without output" } else { "FAILED" });
    }
    code
}
