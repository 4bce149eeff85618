//! Compiles the programs that only the benchmark attaches into `OUT_DIR/shunt-floor`.

use std::process::ExitCode;

use xtask::ebpf;

fn main() -> ExitCode {
    match ebpf::build_script(
        ebpf::FLOOR,
        &[
            "proxy-ebpf/src/ctx",
            "proxy-ebpf/src/floor.rs",
            "proxy-ebpf/src/maps/translations.rs",
            "proxy-ebpf/src/object.rs",
        ],
    ) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not returned from main: RUST_BACKTRACE would bury the message.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
