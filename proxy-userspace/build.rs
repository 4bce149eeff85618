//! Compiles the eBPF programs into `OUT_DIR/shunt-ebpf`, which the library embeds.

use std::process::ExitCode;

use xtask::ebpf;

fn main() -> ExitCode {
    match ebpf::build_script(ebpf::OBJECT, &["proxy-ebpf/src"]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not returned from main: RUST_BACKTRACE would bury the message.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
