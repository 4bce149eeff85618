//! Where the workspace keeps its things.

use std::path::{Path, PathBuf};

/// The workspace's root folder: the one with Cargo.lock.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// Tools built for this workspace alone, so that nothing the user installed is replaced.
///
/// Not below `CARGO_TARGET_DIR`: editors and CI set that differently for the same checkout, and the tools are the same.
pub fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Cargo's target folder for the BPF target; shared by debug, release and clippy builds, so `core` is compiled once.
pub fn bpf_target() -> PathBuf {
    root().join("target/bpf")
}

/// Kernels for virtual machines, and the machines' files while they run.
pub fn vm() -> PathBuf {
    root().join("target/vm")
}

/// Logs of the steps that `cargo xtask` ran.
pub fn logs() -> PathBuf {
    root().join("target/xtask-logs")
}

/// The folder into which cargo, run by xtask, puts release binaries.
pub fn release() -> PathBuf {
    target().join("release")
}

/// Cargo's target folder for host builds, absolute: `CARGO_TARGET_DIR` counts from the caller's folder.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| PathBuf::from(dir)),
        None => root().join("target"),
    }
}

/// The oldest Rust release that compiles the workspace, from its `rust-version`.
pub fn rust_version() -> (u32, u32) {
    let parts = [env!("CARGO_PKG_RUST_VERSION"), "0"].join(".");
    let mut numbers = parts.split('.').map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_holds_the_lock_file() {
        assert!(root().join("Cargo.lock").is_file());
    }

    #[test]
    fn the_oldest_rust_is_the_one_the_workspace_states() {
        assert!(rust_version() >= (1, 95));
    }
}
