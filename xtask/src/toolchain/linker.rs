//! bpf-linkers, and which LLVM each was built with.

use std::env;
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

/// Linkers to look at, the best first: those that setup built, those in PATH, and those of `cargo install`.
pub(super) fn candidates() -> Vec<PathBuf> {
    let ours = BPF_LINKER_LLVMS.rev().map(|llvm| linker_root(llvm).join("bin/bpf-linker"));
    let installed = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| search::home().map(|home| home.join(".cargo")))
        .map(|home| home.join("bin/bpf-linker"));
    let mut unique: Vec<PathBuf> = Vec::new();
    for linker in ours.chain(search::programs("bpf-linker")).chain(installed) {
        let linker = canonical(&linker);
        if search::is_executable(&linker) && !unique.contains(&linker) {
            unique.push(linker);
        }
    }
    unique
}

/// Tells the LLVM major of a linker; the error is the reason why it cannot be used.
///
/// `bpf-linker --version` prints its own version only, and fails when its libLLVM was removed. The LLVM is told by the
/// name of the shared library it needs (`libLLVM.so.22.1`, before LLVM 19 `libLLVM-18.so`) or, linked statically, by the
/// name LLVM writes into bitcode (`LLVM22.1.8`). The file is tens of megabytes, which grep reads at once and an
/// unoptimised build script does not.
pub(super) fn inspect(path: &Path) -> Result<Linker> {
    Run::new(path).arg("--version").read().context("it does not run")?;
    let names = Run::new("grep")
        .args(["-aoE", r"libLLVM(\.so\.|-)[0-9]+|LLVM[0-9]+\.[0-9]+\.[0-9]+"])
        .arg(path)
        .read()
        .context("no LLVM version is in it")?;
    let llvm = parse_names(&names).context("no LLVM version is in it")?;
    Ok(Linker { path: path.to_owned(), llvm })
}

/// The LLVM major told by names found in a linker; what it loads counts before what it mentions.
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
    fn a_shared_library_tells_the_llvm() {
        assert_eq!(parse_names("libLLVM.so.22\n"), Some(22));
        assert_eq!(parse_names("libLLVM-18\n"), Some(18));
    }

    #[test]
    fn a_static_linker_is_told_by_the_name_in_bitcode() {
        assert_eq!(parse_names("LLVM21.1.0\n"), Some(21));
    }

    #[test]
    fn the_library_it_loads_counts_before_a_name_it_mentions() {
        assert_eq!(parse_names("LLVM21.1.0\nlibLLVM.so.22\n"), Some(22));
    }

    #[test]
    fn nothing_found_is_nothing_told() {
        assert_eq!(parse_names(""), None);
    }
}
