//! Finds a toolchain for the BPF target: a compiler with the source of its library, and a
//! bpf-linker with the same LLVM major version.
//!
//! The BPF target has no prebuilt `core`, so it is built from source. The linker reads the
//! compiler's LLVM bitcode, whose format depends on the major version of LLVM.

mod linker;
mod rustc;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

pub use linker::Linker;
pub use rustc::{Compiler, Version};

use crate::workspace;

/// The bpf-linker release that setup builds.
pub const BPF_LINKER: &str = "0.13.0";
/// The LLVM major versions that [`BPF_LINKER`] supports.
pub const BPF_LINKER_LLVMS: std::ops::RangeInclusive<u32> = 21..=23;

/// A compiler and a linker with the same LLVM major version.
#[derive(Debug, Clone)]
pub struct Toolchain {
    /// The compiler, with its library's source.
    pub compiler: Compiler,
    /// The linker.
    pub linker: Linker,
}

/// The compilers and linkers of this machine.
#[derive(Debug, Default)]
pub struct Survey {
    /// Usable compilers, the best first.
    pub compilers: Vec<Compiler>,
    /// Linkers that run, the best first.
    pub linkers: Vec<Linker>,
    /// Refused compilers and linkers, each with the reason.
    pub refused: Vec<String>,
}

/// Returns the folder where setup installs the bpf-linker for an LLVM major version (`cargo install
/// --root`).
pub fn linker_root(llvm: u32) -> PathBuf {
    workspace::tools().join(format!("bpf-linker-{BPF_LINKER}-llvm-{llvm}"))
}

/// Finds compilers and linkers, and runs each to get its version. Changes nothing.
pub fn survey() -> Survey {
    let mut survey = Survey::default();
    for candidate in rustc::candidates() {
        match rustc::inspect(&candidate, workspace::rust_version()) {
            Ok(compiler) => survey.compilers.push(compiler),
            Err(reason) => survey.refused.push(format!("{}: {reason}", candidate.display())),
        }
    }
    for candidate in linker::candidates() {
        match linker::inspect(&candidate) {
            Ok(linker) => survey.linkers.push(linker),
            Err(error) => survey.refused.push(format!("{}: {error:#}", candidate.display())),
        }
    }
    survey
}

/// Returns the compiler of rustup that cargo uses, if it lacks only the source of its library.
/// `rustup component add rust-src` adds the source.
pub fn without_source() -> Option<Compiler> {
    rustc::without_source(workspace::rust_version())
}

/// Returns the toolchain to use, or an error that says what to do.
pub fn find() -> Result<Toolchain> {
    let survey = survey();
    match survey.toolchain() {
        Some(toolchain) => Ok(toolchain),
        None => bail!(
            "{}\nRun `cargo xtask setup`: it installs what is missing, or says what to install.",
            survey.explain()
        ),
    }
}

impl Survey {
    /// Returns the best compiler for which there is a linker.
    pub fn toolchain(&self) -> Option<Toolchain> {
        self.compilers.iter().find_map(|compiler| {
            let linker = self.linkers.iter().find(|linker| linker.llvm == compiler.version.llvm)?;
            Some(Toolchain { compiler: compiler.clone(), linker: linker.clone() })
        })
    }

    /// Describes what is missing, and what was refused.
    pub fn explain(&self) -> String {
        let (major, minor) = workspace::rust_version();
        let missing = match self.compilers.first() {
            None => format!(
                "no Rust compiler, {major}.{minor} or newer, with the source of its library was found"
            ),
            Some(Compiler { rustc, version, .. }) => {
                format!("no bpf-linker with LLVM {}, that of {}, was found", version.llvm, rustc.display())
            }
        };
        let mut lines = vec![format!("the eBPF programs cannot be compiled: {missing}")];
        lines.extend(self.refused.iter().map(|refused| format!("  looked at {refused}")));
        let mismatched = self.linkers.iter();
        lines.extend(
            mismatched.map(|linker| format!("  looked at {}: LLVM {}", linker.path.display(), linker.llvm)),
        );
        lines.join("\n")
    }
}

/// Returns `path` without symbolic links, or unchanged if that fails.
fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(name: &str, llvm: u32) -> Compiler {
        let version = Version { release: (1, 96), llvm };
        Compiler { rustc: name.into(), sysroot: "/".into(), version }
    }

    fn linker(name: &str, llvm: u32) -> Linker {
        Linker { path: name.into(), llvm }
    }

    #[test]
    fn compiler_and_linker_of_one_llvm_are_paired() {
        let survey = Survey {
            compilers: vec![compiler("nightly", 23), compiler("debian", 22)],
            linkers: vec![linker("old", 21), linker("fits", 22)],
            refused: Vec::new(),
        };
        let toolchain = survey.toolchain().unwrap();
        assert_eq!((toolchain.compiler.rustc, toolchain.linker.path), ("debian".into(), "fits".into()));
    }

    #[test]
    fn linker_of_another_llvm_is_refused_by_name() {
        let survey = Survey {
            compilers: vec![compiler("/usr/bin/rustc", 22)],
            linkers: vec![linker("/opt/bpf-linker", 21)],
            refused: vec!["/nightly: no library source".into()],
        };
        assert!(survey.toolchain().is_none());
        let text = survey.explain();
        for part in ["LLVM 22", "/usr/bin/rustc", "/opt/bpf-linker: LLVM 21", "/nightly: no library source"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn missing_compiler_is_named() {
        assert!(Survey::default().explain().contains("no Rust compiler"));
    }
}
