//! Builds the programs of the test world and becomes one of them.
//!
//! Becoming, not starting: terminal, signals and exit status are then the program's own, and it cleans up after ctrl-C.

use anyhow::{Error, Result};

use super::{Bench, Conformance, steps};

/// Builds and runs the demo; returns only the error that kept it from starting.
pub(crate) fn demo(mode: &str) -> Result<Error> {
    steps::build_world().show()?;
    Ok(steps::demo(mode).exec())
}

/// Builds and runs the conformance runner; returns only the error that kept it from starting.
pub(crate) fn conformance(what: &Conformance) -> Result<Error> {
    steps::build_world().show()?;
    Ok(steps::conformance(what).exec())
}

/// Builds and runs the benchmark; returns only the error that kept it from starting.
pub(crate) fn bench(what: &Bench) -> Result<Error> {
    steps::build_world().show()?;
    Ok(steps::bench(what).exec())
}
