//! Compiles the proxy-ebpf crate for the BPF target, with BTF, independent of the cargo or tool
//! that runs it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use object::build::ByteString;
use object::build::elf::{Builder, SectionData};
use object::elf::SHT_STRTAB;
use object::{Object as _, ObjectSection as _};

use crate::inner_cargo;
use crate::limits;
use crate::run::Run;
use crate::toolchain::{self, Toolchain};
use crate::warnings::Warnings;
use crate::workspace;

/// The name of the object in the output folder, and of proxy-ebpf's binary.
pub const OBJECT: &str = "shunt-ebpf";
/// The same for the programs of the benchmark.
pub const FLOOR: &str = "shunt-floor";
const TARGET: &str = "bpfel-unknown-none";
const LIMIT: Duration = Duration::from_mins(20);

/// A compiled object, with the facts that build scripts report to cargo.
#[derive(Debug)]
pub struct Built {
    /// The object file.
    pub object: PathBuf,
    /// The toolchain that built it.
    pub toolchain: Toolchain,
    /// Warnings of the compiler, line by line.
    pub warnings: Vec<String>,
    /// The programs with their use of the kernel's limits, sorted by name.
    pub programs: Vec<limits::Program>,
}

/// Compiles the eBPF programs of a binary and writes the object to `out_dir/BINARY`.
pub fn build_ebpf(out_dir: &Path, binary: &str) -> Result<Built> {
    let toolchain = toolchain::find()?;
    let target = workspace::bpf_target();
    fs::create_dir_all(&target).with_context(|| format!("cannot make {}", target.display()))?;
    // Cargo locks the build, but not the copy of its result, which another profile's build may
    // replace.
    let lock = File::create(target.join("copy.lock")).context("cannot create copy.lock")?;
    lock.lock().context("cannot lock copy.lock")?;
    let mut warnings = Warnings::default();
    cargo_build(&toolchain, &target, binary).check(&mut |line| warnings.take(line))?;
    let made = target.join(TARGET).join("release").join(binary);
    let object = out_dir.join(binary);
    let bytes = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
    let stripped = without_debug_info(&bytes).with_context(|| format!("cannot strip {}", made.display()))?;
    fs::write(&object, stripped).with_context(|| format!("cannot write {}", object.display()))?;
    let programs = check(&object)?;
    Ok(Built { object, toolchain, warnings: warnings.lines, programs })
}

/// Compiles the eBPF programs of a binary in a build script, into `OUT_DIR/BINARY`. `sources` are
/// those besides what all binaries have, from the workspace's root.
pub fn build_script(binary: &str, sources: &[&str]) -> Result<()> {
    let root = workspace::root();
    for source in SOURCES.iter().chain(sources) {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let built = build_ebpf(&out_dir, binary)?;
    for tool in [&built.toolchain.compiler.rustc, &built.toolchain.linker.path] {
        println!("cargo::rerun-if-changed={}", tool.display());
    }
    for warning in built.warnings {
        println!("cargo::warning=proxy-ebpf: {warning}");
    }
    Ok(())
}

/// Sources of all binaries besides those cargo watches by itself.
const SOURCES: [&str; 6] = [
    "Cargo.lock",
    "Cargo.toml",
    "proxy-common/Cargo.toml",
    "proxy-common/src",
    "proxy-ebpf/Cargo.toml",
    "proxy-ebpf/aya-build",
];

/// Returns the cargo command. `RUSTC_BOOTSTRAP` allows `build-std` and aya's nightly features with
/// a stable compiler.
fn cargo_build(toolchain: &Toolchain, target_dir: &Path, binary: &str) -> Run {
    let compiler = &toolchain.compiler;
    inner_cargo::command(&compiler.cargo(), &compiler.rustc, &rustflags(toolchain, target_dir))
        .args(["build", "--locked", "--package", "proxy-ebpf", "--bin", binary, "--release"])
        .args(["--target", TARGET, "-Z", "build-std=core"])
        .args(UNOPTIMISED_LIBRARY.into_iter().flat_map(|setting| ["--config", setting]))
        .arg("--target-dir")
        .arg(target_dir)
        .limit(LIMIT)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TERM_COLOR", "never")
}

/// The compiler optimises generic and inline functions of the library in proxy-ebpf, and bpf-linker
/// the others. To optimise the library by itself changes no program by more than some instructions,
/// and is a tenth of the build. Not in Cargo.toml, where cargo warns that other builds have no such
/// packages.
const UNOPTIMISED_LIBRARY: [&str; 2] =
    ["profile.release.package.core.opt-level=0", "profile.release.package.compiler_builtins.opt-level=0"];

/// Flags of the compiler. In-order memory copies are for programs that read packets in place. LLVM
/// 22 crashes on such a copy without a known alignment (bpf-linker: SIGSEGV in "Post-RA pseudo
/// instruction expansion").
const FLAGS: [&str; 3] = ["-Cdebuginfo=2", "-Clink-arg=--btf", "-Clink-arg=--disable-expand-memcpy-in-order"];

fn rustflags(toolchain: &Toolchain, target_dir: &Path) -> Vec<OsString> {
    let mut linker = OsString::from("-Clinker=");
    linker.push(&toolchain.linker.path);
    let paths = inner_cargo::renamed_folders(&toolchain.compiler.sysroot, target_dir);
    let paths = paths.iter().map(inner_cargo::Renamed::for_rustc);
    FLAGS.into_iter().map(OsString::from).chain(paths).chain([linker]).collect()
}

/// Removes the DWARF sections, from which the linker made BTF. They are most of the object, and a
/// process that loads it would parse them into memory.
fn without_debug_info(bytes: &[u8]) -> object::build::Result<Vec<u8>> {
    let mut builder = Builder::read(bytes)?;
    for section in &mut builder.sections {
        let is_debug = |prefix: &[u8]| section.name.starts_with(prefix);
        section.delete = is_debug(b".debug_") || is_debug(b".rel.debug_");
    }
    builder.delete_orphans();
    // LLVM puts the names of sections into .strtab. The builder writes them only into a section of
    // their own.
    let names = builder.sections.add();
    names.name = ByteString::from(".shstrtab");
    names.sh_type = SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    builder.write(&mut stripped)?;
    Ok(stripped)
}

/// Checks that an object has BTF, without which bpftool cannot show map fields, and that no kernel
/// refuses it.
fn check(object: &Path) -> Result<Vec<limits::Program>> {
    let bytes = fs::read(object).with_context(|| format!("cannot read {}", object.display()))?;
    let file = object::File::parse(&*bytes).with_context(|| format!("cannot parse {}", object.display()))?;
    let missing: Vec<&str> = [".BTF", ".BTF.ext"]
        .into_iter()
        .filter(|name| file.section_by_name(name).is_none_or(|section| section.size() == 0))
        .collect();
    if !missing.is_empty() {
        bail!("{} has no section {}: the linker wrote no BTF", object.display(), missing.join(", "));
    }
    limits::check(&bytes).with_context(|| format!("{} cannot be used", object.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_without_btf_is_refused() {
        let error = format!("{:#}", check(Path::new("/proc/self/exe")).unwrap_err());
        assert!(error.contains(".BTF"), "{error}");
    }
}
