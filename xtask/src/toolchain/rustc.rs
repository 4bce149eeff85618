//! Finds Rust compilers with the source of their library.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::canonical;
use crate::run::Run;
use crate::search;

/// A compiler that can build `core` for a target without a prebuilt one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiler {
    /// The compiler, never rustup's proxy.
    pub rustc: PathBuf,
    /// Its sysroot.
    pub sysroot: PathBuf,
    /// Its version.
    pub version: Version,
}

/// The versions that `rustc -vV` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Major and minor release.
    pub release: (u32, u32),
    /// LLVM's major version.
    pub llvm: u32,
}

impl Compiler {
    /// Returns a file of the library's source.
    pub fn library(&self) -> PathBuf {
        library(&self.sysroot)
    }

    /// Returns the compiler's own cargo if it has one, otherwise the cargo that runs xtask.
    pub fn cargo(&self) -> PathBuf {
        let own = self.sysroot.join("bin/cargo");
        if self.sysroot != Path::new("/usr") && search::is_executable(&own) { own } else { search::cargo() }
    }
}

fn library(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs")
}

/// Returns the compilers to inspect, the best first: rustup's nightly, its others, the
/// distribution's, and those in PATH.
pub(super) fn candidates() -> Vec<PathBuf> {
    let rustup = search::home("RUSTUP_HOME", ".rustup");
    let mut found = rustup.map(|home| below(&home.join("toolchains"), "")).unwrap_or_default();
    found.sort_by_key(|rustc| !rustc.to_string_lossy().contains("/nightly"));
    found.push(PathBuf::from("/usr/bin/rustc"));
    // Ubuntu keeps several releases side by side in /usr/lib/rust-1.NN.
    found.extend(below(Path::new("/usr/lib"), "rust-"));
    found.extend(search::programs("rustc"));
    let found = found.iter().map(|rustc| canonical(rustc));
    // rustup's proxies in PATH are links to rustup. The compilers behind them are already in the
    // list.
    search::unique(found.filter(|rustc| search::is_executable(rustc) && !rustc.ends_with("rustup")))
}

/// Returns `bin/rustc` of the subfolders of `folder` whose name starts with `prefix`, the highest
/// name first.
fn below(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = folder.read_dir() else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path().join("bin/rustc"))
        .filter(|rustc| rustc.is_file())
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found
}

/// Checks that `rustc` can compile for BPF. The error says why not.
pub(super) fn inspect(rustc: &Path, oldest: (u32, u32)) -> Result<Compiler> {
    let sysroot = rustc.parent().and_then(Path::parent).context("it is not in a bin folder")?;
    if !library(sysroot).is_file() {
        bail!("the source of its library (rust-src) is missing: no {}", library(sysroot).display());
    }
    inspect_program(rustc, sysroot, oldest)
}

/// Returns the compiler of rustup that cargo uses, if only the source of its library is missing.
pub(super) fn without_source(oldest: (u32, u32)) -> Option<Compiler> {
    let rustc = canonical(&search::cargo()).with_file_name("rustc");
    let sysroot = rustc.parent().and_then(Path::parent)?;
    let home = search::home("RUSTUP_HOME", ".rustup");
    let is_of_rustup = home.is_some_and(|home| sysroot.starts_with(canonical(&home)));
    if !is_of_rustup || library(sysroot).is_file() {
        return None;
    }
    inspect_program(&rustc, sysroot, oldest).ok()
}

fn inspect_program(rustc: &Path, sysroot: &Path, oldest: (u32, u32)) -> Result<Compiler> {
    let version = parse_version(&Run::new(rustc).arg("-vV").read()?)?;
    if version.release < oldest {
        let ((major, minor), (least_major, least_minor)) = (version.release, oldest);
        bail!("it is {major}.{minor}, older than {least_major}.{least_minor}");
    }
    Ok(Compiler { rustc: rustc.to_owned(), sysroot: sysroot.to_owned(), version })
}

/// Reads the output of `rustc -vV`.
fn parse_version(text: &str) -> Result<Version> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let release = field("release:").context("`rustc -vV` printed no release")?;
    let llvm =
        field("LLVM version:").context("`rustc -vV` printed no LLVM version: another code generator")?;
    let mut numbers = release.split('.').map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        bail!("`rustc -vV` printed the release {release:?}");
    };
    let llvm = llvm.split('.').next().unwrap_or_default();
    let llvm = llvm.parse().with_context(|| format!("`rustc -vV` printed the LLVM version {llvm:?}"))?;
    Ok(Version { release: (major, minor), llvm })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nightly_has_release_and_llvm() {
        let text = "rustc 1.97.0-nightly (e50aa6fba 2026-05-19)\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n\
                    release: 1.97.0-nightly\nLLVM version: 22.1.4\n";
        assert_eq!(parse_version(text).unwrap(), Version { release: (1, 97), llvm: 22 });
    }

    #[test]
    fn distribution_compiler_has_release_and_llvm() {
        let text = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)\nrelease: 1.96.0\n\
                    LLVM version: 22.1.8\n";
        assert_eq!(parse_version(text).unwrap(), Version { release: (1, 96), llvm: 22 });
    }

    #[test]
    fn output_without_llvm_is_refused() {
        let error = parse_version("release: 1.96.0\n").unwrap_err().to_string();
        assert!(error.contains("no LLVM version"), "{error}");
    }

    #[test]
    fn nonsense_is_refused_and_quoted() {
        let error = parse_version("release: new\nLLVM version: 22.1.8\n").unwrap_err().to_string();
        assert!(error.contains("\"new\""), "{error}");
    }

    #[test]
    fn compiler_without_library_source_is_refused() {
        let error = inspect(Path::new("/proc/self/bin/rustc"), (1, 95)).unwrap_err().to_string();
        assert!(error.contains("rust-src"), "{error}");
    }
}
