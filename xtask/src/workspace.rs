//! The folders of the workspace.

use std::path::{Path, PathBuf};

/// Returns the workspace's root folder, which has Cargo.lock.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// Returns the folder of tools that setup builds for this workspace, so that nothing the user
/// installed is replaced.
///
/// It does not depend on `CARGO_TARGET_DIR`, which editors and CI set differently for the same
/// checkout.
pub fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Returns cargo's target folder for the BPF target. Debug, release and clippy builds share it, so
/// `core` is compiled once.
pub fn bpf_target() -> PathBuf {
    root().join("target/bpf")
}

/// Returns the folder of kernels for virtual machines, and of their temporary files.
pub fn vm() -> PathBuf {
    root().join("target/vm")
}

/// Returns the folder of the logs of `cargo xtask`.
pub fn logs() -> PathBuf {
    root().join("target/xtask-logs")
}

/// Returns the absolute path of cargo's target folder for host builds. `CARGO_TARGET_DIR` may be
/// relative to the caller's folder.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| PathBuf::from(dir)),
        None => root().join("target"),
    }
}

/// Returns the oldest Rust release that compiles the workspace, from its `rust-version`.
pub fn rust_version() -> (u32, u32) {
    let parts = [env!("CARGO_PKG_RUST_VERSION"), "0"].join(".");
    let mut numbers = parts.split('.').map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_the_lock_file() {
        assert!(root().join("Cargo.lock").is_file());
    }

    #[test]
    fn oldest_rust_is_the_one_of_the_workspace() {
        assert!(rust_version() >= (1, 95));
    }
}
