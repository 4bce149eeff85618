//! `cargo xtask`: sets up a machine, and builds, demonstrates and tests shunt.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
