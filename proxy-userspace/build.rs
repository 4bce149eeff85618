//! Compiles the eBPF programs into `OUT_DIR/shunt-ebpf`, which the library embeds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

/// Sources of the object besides those cargo watches by itself, from the workspace's root.
const SOURCES: [&str; 7] = [
    "Cargo.lock",
    "Cargo.toml",
    "proxy-common/Cargo.toml",
    "proxy-common/src",
    "proxy-ebpf/Cargo.toml",
    "proxy-ebpf/aya-build",
    "proxy-ebpf/src",
];

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not returned from main: RUST_BACKTRACE would bury the message.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<()> {
    let root = xtask::workspace::root();
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let built = xtask::ebpf::build_ebpf(&out_dir)?;
    for tool in [&built.toolchain.compiler.rustc, &built.toolchain.linker.path] {
        println!("cargo::rerun-if-changed={}", tool.display());
    }
    for warning in built.warnings {
        println!("cargo::warning=proxy-ebpf: {warning}");
    }
    Ok(())
}
