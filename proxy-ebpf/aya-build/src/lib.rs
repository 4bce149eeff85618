//! The one function of the crate `aya-build` that the build scripts of aya-ebpf call.
//!
//! The crate itself builds eBPF programs, which xtask does here. For that it depends on 20 other
//! crates, `serde_derive` and `cargo_metadata` among them. To compile them would be a third of the
//! work to compile the programs.

use std::{env, io};

/// The result of a build script.
pub type Result<T> = io::Result<T>;

/// Sets `cfg(bpf_target_arch)` to the architecture of the host, unless a flag of the compiler does.
///
/// aya-ebpf needs it for the registers in arguments of kprobes. The crate also reads the variable
/// `AYA_BPF_TARGET_ARCH`; this function does not.
pub fn emit_bpf_target_arch_cfg() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(bpf_target_arch, values(any()))");
    if env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_none() {
        let host = env::var_os("HOST").ok_or_else(|| io::Error::other("HOST is not set"))?;
        println!("cargo::rustc-cfg=bpf_target_arch=\"{}\"", architecture(&host.to_string_lossy()));
    }
    Ok(())
}

/// Returns the architecture of a target triple, by the name that aya-ebpf uses.
fn architecture(host: &str) -> &str {
    let architecture = host.split_once('-').map_or(host, |(architecture, _)| architecture);
    if architecture.starts_with("riscv64") { "riscv64" } else { architecture }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architecture_is_the_first_part_of_a_triple() {
        assert_eq!(architecture("x86_64-unknown-linux-gnu"), "x86_64");
        assert_eq!(architecture("riscv64gc-unknown-linux-gnu"), "riscv64");
    }
}
