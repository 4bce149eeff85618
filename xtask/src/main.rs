//! `cargo xtask`: makes a machine able to build shunt, builds it, shows it and tests it.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
