//! The compiler of a binary, and the libraries that it links beside crates.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use xtask::run::Run;

use super::compiler::Compiler;
use super::target::Target;
use crate::cli::setup;

/// What a binary was compiled and linked with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Linked {
    /// The compiler, as it prints its version.
    pub(crate) compiler: String,
    /// Statically linked libraries.
    pub(crate) libraries: Vec<Library>,
}

/// A library that comes with a compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Library {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Its license, as an SPDX expression.
    pub(crate) license: &'static str,
}

/// Returns what the binary of an architecture is linked with on this machine.
pub(crate) fn of(target: Target) -> Result<Linked> {
    let compiler = Run::new(Compiler::find(target)?.rustc).arg("--version").read()?;
    let compiler = compiler.trim().to_owned();
    let release = compiler.split(' ').nth(1).context("rustc prints no version")?.to_owned();
    let library = Library { name: "rust-std".into(), version: release, license: "MIT OR Apache-2.0" };
    Ok(Linked { compiler, libraries: vec![library, c_library(target)?] })
}

/// Asks dpkg for the version of the C library that the C compiler links.
fn c_library(target: Target) -> Result<Library> {
    let path = Run::new(setup::ensure_c(target)?).arg("-print-file-name=libc.a").read()?;
    let path = PathBuf::from(path.trim()).canonicalize().with_context(|| format!("cannot find {path}"))?;
    let owner = Run::new("dpkg-query").arg("--search").arg(&path).read()?;
    let name = owner.rsplit_once(": ").with_context(|| format!("no package has {}", path.display()))?.0;
    let version = Run::new("dpkg-query").args(["--show", "--showformat", "${Version}", name]).read()?;
    Ok(Library { name: "glibc".into(), version: version.trim().to_owned(), license: "LGPL-2.1-or-later" })
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn c_library_of_this_machine_has_a_version() {
        let own = Target::value_variants().iter().find(|target| target.is_host()).unwrap();
        let library = c_library(*own).unwrap();
        assert!(library.version.starts_with(|c: char| c.is_ascii_digit()), "{library:?}");
    }
}
