//! Builds a bpf-linker with the compiler's LLVM version.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use xtask::run::Run;
use xtask::toolchain::{BPF_LINKER, linker_root};

use crate::cli::progress::Progress;
use crate::cli::steps;

const LIMIT: Duration = Duration::from_mins(20);

/// Builds bpf-linker and installs it into target/tools.
pub(crate) fn install(llvm: u32) -> Result<()> {
    Progress::run(&format!("cargo install bpf-linker {BPF_LINKER} with LLVM {llvm}"), command(llvm))
}

fn command(llvm: u32) -> Run {
    let features = format!("llvm-{llvm}");
    steps::install("bpf-linker", BPF_LINKER, &features, &linker_root(llvm), LIMIT)
        .env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}"))
}

/// Returns true if the linker, the first file of the stamp, still runs. Its LLVM library may have
/// been removed.
pub(crate) fn still_runs(files: &[PathBuf]) -> bool {
    files.first().is_some_and(|linker| Run::new(linker).arg("--version").read().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linker_gets_feature_and_folder_of_its_llvm() {
        let shown = command(22).to_string();
        assert!(shown.contains("--features llvm-22 --root /"), "{shown}");
        assert!(shown.ends_with("-llvm-22 --debug"), "{shown}");
    }
}
