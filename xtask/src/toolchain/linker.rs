//! Finds bpf-linkers and the LLVM version of each.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{BPF_LINKER_LLVMS, canonical, linker_root};
use crate::run::Run;
use crate::search;

/// A bpf-linker that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linker {
    /// The program.
    pub path: PathBuf,
    /// The major version of the LLVM in it.
    pub llvm: u32,
}

/// Returns the linkers to inspect, the best first: those that setup built, those in PATH, and those
/// of `cargo install`.
pub(super) fn candidates() -> Vec<PathBuf> {
    let ours = BPF_LINKER_LLVMS.rev().map(|llvm| linker_root(llvm).join("bin/bpf-linker"));
    let installed = search::home("CARGO_HOME", ".cargo").map(|home| home.join("bin/bpf-linker"));
    let found = ours.chain(search::programs("bpf-linker")).chain(installed);
    search::unique(found.map(|linker| canonical(&linker)).filter(|linker| search::is_executable(linker)))
}

/// Returns the LLVM major version of a linker. The error says why the linker cannot be used.
///
/// `bpf-linker --version` prints only its own version, and fails if its libLLVM was removed. The
/// LLVM version is in the name of the shared library (`libLLVM.so.22.1`, before LLVM 19
/// `libLLVM-18.so`) or, in a static program, in the name that LLVM writes into bitcode
/// (`LLVM22.1.8`). The file has tens of megabytes: grep reads it quickly, an unoptimised build
/// script does not.
pub(super) fn inspect(path: &Path) -> Result<Linker> {
    Run::new(path).arg("--version").read().context("the program does not run")?;
    let names = Run::new("grep")
        .args(["-aoE", r"libLLVM(\.so\.|-)[0-9]+|LLVM[0-9]+\.[0-9]+\.[0-9]+"])
        .arg(path)
        .read()
        .context("the file contains no LLVM version")?;
    let llvm = parse_names(&names).context("the file contains no LLVM version")?;
    Ok(Linker { path: path.to_owned(), llvm })
}

/// Returns the LLVM major version from names in a linker. A library that it loads has priority.
fn parse_names(names: &str) -> Option<u32> {
    let number = |name: &str| name.split('.').next().and_then(|number| number.parse().ok());
    let loaded = names.lines().find_map(|name| {
        let rest = name.strip_prefix("libLLVM")?;
        number(rest.strip_prefix(".so.").or_else(|| rest.strip_prefix('-'))?)
    });
    loaded.or_else(|| names.lines().find_map(|name| number(name.strip_prefix("LLVM")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_library_names_the_llvm_version() {
        assert_eq!(parse_names("libLLVM.so.22\n"), Some(22));
        assert_eq!(parse_names("libLLVM-18\n"), Some(18));
    }

    #[test]
    fn static_linker_names_the_llvm_version_in_bitcode() {
        assert_eq!(parse_names("LLVM21.1.0\n"), Some(21));
    }

    #[test]
    fn loaded_library_has_priority_over_other_names() {
        assert_eq!(parse_names("LLVM21.1.0\nlibLLVM.so.22\n"), Some(22));
    }

    #[test]
    fn no_name_means_no_version() {
        assert_eq!(parse_names(""), None);
    }
}
