//! shunt's build steps as a library: proxy-userspace/build.rs compiles the eBPF programs with it.
//!
//! The command line (`cargo xtask`) is the feature `cli`; without it nothing here depends on more
//! than the standard library, `nix`, `object` and `aya-obj`.

pub mod ebpf;
pub mod inner_cargo;
pub mod limits;
pub mod run;
pub mod search;
pub mod toolchain;
pub mod warnings;
pub mod workspace;
