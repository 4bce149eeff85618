//! C compilers with a static C library, one for each architecture.

use anyhow::{Result, ensure};
use xtask::run::Run;
use xtask::search;

use super::tools::{C_COMPILER, C_COMPILER_AMD64, C_COMPILER_ARM64, Tool};
use super::{Needs, install_packages};
use crate::cli::release::Target;

/// Installs the C compiler for an architecture if it is missing, and returns its name.
pub(crate) fn ensure_c(target: Target) -> Result<&'static str> {
    let tool = match target {
        target if target.is_host() => &C_COMPILER,
        Target::Amd64 => &C_COMPILER_AMD64,
        Target::Arm64 => &C_COMPILER_ARM64,
    };
    if !has_library(tool) {
        install_packages(&Needs { tools: vec![tool], ..Needs::default() })?;
    }
    ensure!(
        has_library(tool),
        "{} is missing, or finds no libc.a, the static C library of {}",
        tool.name,
        target.name()
    );
    Ok(tool.name)
}

/// Returns true if the compiler runs and finds a static C library. A compiler may be installed
/// without one.
fn has_library(tool: &Tool) -> bool {
    let found = search::program(tool.name).map(|path| Run::new(path).arg("-print-file-name=libc.a").read());
    // A name without a folder means that there is none.
    found.is_some_and(|printed| printed.is_ok_and(|path| path.starts_with('/')))
}
