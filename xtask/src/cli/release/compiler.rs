//! Finds a Rust compiler with the standard library of an architecture, or with the source of the
//! library.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use xtask::run::Run;
use xtask::{search, toolchain};

use super::Target;
use crate::cli::progress::Progress;

const DOWNLOAD: Duration = Duration::from_mins(10);

/// A compiler for an architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Compiler {
    pub(crate) cargo: PathBuf,
    pub(crate) rustc: PathBuf,
    pub(crate) sysroot: PathBuf,
    /// True if cargo builds the standard library from its source.
    pub(crate) builds_library: bool,
}

impl Compiler {
    /// Returns the compiler of the cargo that runs xtask if it has the library of the architecture,
    /// or if rustup can add it. Otherwise the compiler of the eBPF programs, which has the source
    /// of its library.
    pub(crate) fn find(target: Target) -> Result<Self> {
        let own = Self::of_cargo()?;
        if own.has_library(target) || (own.is_of_rustup() && own.add_library(target)) {
            return Ok(own);
        }
        let compiler = toolchain::find()?.compiler;
        let builds_library = !has_library(&compiler.sysroot, target);
        Ok(Self { cargo: compiler.cargo(), rustc: compiler.rustc, sysroot: compiler.sysroot, builds_library })
    }

    fn of_cargo() -> Result<Self> {
        let cargo = search::cargo();
        // Not rustup's proxy, which may choose another compiler when it runs without a variable.
        let beside = cargo.with_file_name("rustc");
        let rustc = if search::is_executable(&beside) { beside } else { "rustc".into() };
        let sysroot = Run::new(&rustc).args(["--print", "sysroot"]).read()?;
        Ok(Self { cargo, rustc, sysroot: sysroot.trim().into(), builds_library: false })
    }

    fn has_library(&self, target: Target) -> bool {
        has_library(&self.sysroot, target)
    }

    fn is_of_rustup(&self) -> bool {
        let home = search::home("RUSTUP_HOME", ".rustup");
        home.is_some_and(|home| self.sysroot.starts_with(home.join("toolchains")))
    }

    /// Adds the library with rustup. Returns true if the compiler has it then.
    fn add_library(&self, target: Target) -> bool {
        let added = self.rustup_add(target);
        if let Err(error) = &added {
            eprintln!(
                "the standard library is built from its source, because rustup cannot add it: {error:#}"
            );
        }
        added.is_ok() && self.has_library(target)
    }

    fn rustup_add(&self, target: Target) -> Result<()> {
        let name = self.sysroot.file_name().context("the toolchain has no name")?;
        let run = Run::new("rustup").args(["target", "add", target.triple(), "--toolchain"]).arg(name);
        Progress::run(&format!("rustup target add {}", target.triple()), run.limit(DOWNLOAD))
    }
}

fn has_library(sysroot: &Path, target: Target) -> bool {
    let folder = sysroot.join("lib/rustlib").join(target.triple()).join("lib");
    let files = folder.read_dir().into_iter().flatten().flatten();
    files.map(|file| file.file_name()).any(|name| name.as_encoded_bytes().starts_with(b"libstd-"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn library_is_that_of_the_architecture() {
        let sysroot = tempfile::tempdir().unwrap();
        let folder = sysroot.path().join("lib/rustlib/aarch64-unknown-linux-gnu/lib");
        fs::create_dir_all(&folder).unwrap();
        assert!(!has_library(sysroot.path(), Target::Arm64), "an empty folder is no library");
        fs::write(folder.join("libstd-0123.rlib"), "").unwrap();
        assert!(has_library(sysroot.path(), Target::Arm64));
        assert!(!has_library(sysroot.path(), Target::Amd64));
    }

    #[test]
    fn compiler_of_this_machine_has_its_library() {
        let own = Compiler::of_cargo().unwrap();
        assert!(
            [Target::Amd64, Target::Arm64].iter().any(|target| target.is_host() && own.has_library(*target))
        );
    }
}
