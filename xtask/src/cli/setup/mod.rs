//! `cargo xtask setup`: installs what build, demo and tests need, or says what to install.

mod apart;
mod apt;
mod c_compiler;
mod linker;
mod packages;
mod stamp;
pub(super) mod tools;

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::run::Run;
use xtask::toolchain::{self, Compiler, Survey};
use xtask::{search, workspace};

use self::apt::Packages;
pub(crate) use self::apt::{depends, unpack_all};
pub(crate) use self::c_compiler::ensure_c;
pub(crate) use self::tools::KEYRING;
use self::tools::{
    C_COMPILER, C_COMPILER_AMD64, C_COMPILER_ARM64, COMPONENTS, FUZZ_TOOLS, IMAGE_TOOLS, OPTIONAL_TOOLS,
    QEMU, QEMU_ARM64, RELEASE_TOOLS, TEST_TOOLS, TOOLS, Tool, VM_ARM64_TOOLS, VM_TOOLS, WORLD_TOOLS,
};
use super::progress::Progress;
use super::release::Target;

const DOWNLOAD: Duration = Duration::from_mins(10);

/// What is needed, and what of it is missing.
#[derive(Default)]
struct Needs {
    /// The compilers and linkers of this machine. `None` if no toolchain is needed.
    survey: Option<Survey>,
    tools: Vec<&'static Tool>,
}

/// Sets up, and prints what was found.
pub(crate) fn run() -> Result<()> {
    ensure()?;
    ensure_world()?;
    let toolchain = toolchain::find()?;
    println!("compiler  {}", toolchain.compiler.rustc.display());
    println!("linker    {} (LLVM {})", toolchain.linker.path.display(), toolchain.linker.llvm);
    for tool in TOOLS.iter().chain(&WORLD_TOOLS) {
        println!("{:<9} {}", tool.name, tool.find().unwrap_or_default().display());
    }
    println!("This machine can build shunt and run its demo and tests.");
    Ok(())
}

/// Sets up build and demo, unless an earlier setup is still valid. That check takes a fraction of a
/// second.
pub(crate) fn ensure() -> Result<()> {
    let stamp = workspace::tools().join("setup.stamp");
    if stamp::read(&stamp).is_some_and(|files| linker::still_runs(&files)) {
        return Ok(());
    }
    install_missing(&Needs::check())?;
    let needs = Needs::check();
    let files = needs.files().with_context(|| needs.explain())?;
    fs::create_dir_all(workspace::tools()).context("cannot create the folder for tools")?;
    stamp::write(&stamp, &files)
}

/// Sets up the build only, without the tools of demo and tests, some of which an unprivileged
/// container cannot run.
pub(crate) fn ensure_build() -> Result<()> {
    let needs = Needs { survey: Some(toolchain::survey()), ..Needs::default() };
    if needs.lacks_toolchain() {
        install_missing(&needs)?;
    }
    toolchain::find().map(drop)
}

/// Sets up virtual machines of an architecture, which few commands need.
pub(crate) fn ensure_vm(arch: Target) -> Result<()> {
    let (stamp, qemu, tools) = match arch {
        Target::Amd64 => ("vm.stamp", &QEMU, [&TOOLS[..], &WORLD_TOOLS, &VM_TOOLS]),
        Target::Arm64 => ("vm-arm64.stamp", &QEMU_ARM64, [&VM_ARM64_TOOLS[..], &[], &[]]),
    };
    let stamp = workspace::tools().join(stamp);
    if stamp::read(&stamp).is_some() {
        return Ok(());
    }
    if arch == Target::Amd64 && !arch.is_host() {
        bail!("virtual machines for amd64 need an amd64 machine: they run its programs");
    }
    unpack_qemu(qemu)?;
    let tools = || tools.into_iter().flatten();
    let missing = tools().filter(|tool| tool.find().is_none()).collect();
    install_packages(&Needs { tools: missing, ..Needs::default() })?;
    let find = |tool: &Tool| tool.find().with_context(|| tool.explain());
    let files = tools().map(find).collect::<Result<Vec<_>>>()?;
    fs::create_dir_all(workspace::tools()).context("cannot create the folder for tools")?;
    stamp::write(&stamp, &files)
}

/// Sets up fuzzing with coverage, which few people need.
pub(crate) fn ensure_fuzz() -> Result<()> {
    install_tools(&FUZZ_TOOLS)
}

/// Sets up the other tools of conformance cases, benchmarks and scenarios.
pub(crate) fn ensure_world() -> Result<()> {
    install_tools(&WORLD_TOOLS)
}

/// Mounts a bpf filesystem at its usual path if there is none, as shunt does. Tests that run at the
/// same time would mount one over the other, or miss the one that another test unmounts.
fn mount_bpffs() -> Result<()> {
    const PATH: &str = "/sys/fs/bpf";
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    let is_mounted = mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq([PATH, "bpf"]));
    if is_mounted {
        Ok(())
    } else {
        Run::new("mount").args(["-t", "bpf", "-o", "mode=0700", "bpf", PATH]).read().map(drop)
    }
}

/// Sets up the kernel for tests.
pub(crate) fn ensure_kernel() {
    if let Err(error) = mount_bpffs() {
        eprintln!("tests may fail without a bpf filesystem: {error:#}");
    }
}

/// Sets up what only `cargo xtask test` runs.
pub(crate) fn ensure_tests() {
    if install_tools(&TEST_TOOLS).is_ok() {
        return;
    }
    // A tool without a package must not keep the others away.
    for tool in &TEST_TOOLS {
        if let Err(error) = install_tools(slice::from_ref(tool)) {
            eprintln!("tests will fail without {}: {error:#}", tool.name);
        }
    }
}

/// Returns what tests leave out on this machine: a line for each tool that it lacks.
pub(crate) fn left_out() -> Vec<String> {
    OPTIONAL_TOOLS.iter().filter(|tool| tool.find().is_none()).map(Tool::explain).collect()
}

/// Sets up the parts of the Rust toolchain that check format and lints.
pub(crate) fn ensure_components() {
    let missing = COMPONENTS.iter().filter(|(_, program)| tools::component(program).is_none());
    for (name, _) in missing {
        // Only tests need it. A download can fail for a moment.
        if let Err(error) = add_component(name, None).or_else(|_| add_component(name, None)) {
            eprintln!("tests will fail without {name}: {error:#}");
        }
    }
}

/// Sets up what runs the image of a release.
pub(crate) fn ensure_image() -> Result<()> {
    install_tools(&IMAGE_TOOLS)
}

/// Sets up releases.
pub(crate) fn ensure_release() -> Result<()> {
    install_tools(&RELEASE_TOOLS)
}

fn install_tools(tools: &'static [Tool]) -> Result<()> {
    let tools = tools.iter().filter(|tool| tool.find().is_none()).collect();
    install_packages(&Needs { tools, ..Needs::default() })
}

/// Unpacks qemu if installing it would remove packages.
fn unpack_qemu(qemu: &Tool) -> Result<()> {
    if qemu.find().is_some() || !apt::is_there() {
        return Ok(());
    }
    let Ok(names) = tool_packages(&[qemu], &apt_knows()?) else {
        // The caller reports it with everything else that is missing.
        return Ok(());
    };
    let in_the_way = apt::would_remove(&names);
    if in_the_way.is_empty() { Ok(()) } else { apart::unpack(qemu, &names, &in_the_way) }
}

/// Installs packages, then the linker.
fn install_missing(needs: &Needs) -> Result<()> {
    if needs.lacks_toolchain() && add_library_source(needs)? {
        let survey = Some(toolchain::survey());
        install_packages(&Needs { survey, tools: needs.tools.clone() })?;
    } else {
        install_packages(needs)?;
    }
    let survey = toolchain::survey();
    if survey.toolchain().is_none() {
        let compiler = choose(&survey, apt_knows().ok().as_ref()).with_context(|| by_hand(needs, None))?;
        linker::install(compiler.version.llvm).with_context(|| by_hand(needs, None))?;
    }
    Ok(())
}

/// Installs packages with the missing tools and with a toolchain. Updates apt's lists first if they
/// lack one. If apt cannot be used, the error has instructions for a person.
fn install_packages(needs: &Needs) -> Result<()> {
    if needs.tools.is_empty() && !needs.lacks_toolchain() {
        return Ok(());
    }
    if !apt::is_there() {
        bail!("{}", by_hand(needs, None));
    }
    let names = wanted(needs, &current_packages(needs)?).with_context(|| by_hand(needs, None))?;
    if names.is_empty() {
        return Ok(());
    }
    if !apt::may_install() {
        bail!("{}", by_hand(needs, Some(&names)));
    }
    // Old lists name packages that the mirror has replaced.
    apt::install(&names).or_else(
        |error| {
            if apt::update().is_ok() { apt::install(&names) } else { Err(error) }
        },
    )
}

/// Adds the source of its library to the compiler of rustup, if there is no other compiler that can
/// be used and this one could be. Returns true if it was added.
///
/// The distribution's packages are ten times larger, and their compiler is slower.
fn add_library_source(needs: &Needs) -> Result<bool> {
    let (Some(survey), Some(compiler)) = (&needs.survey, toolchain::without_source()) else {
        return Ok(false);
    };
    let known = if apt::is_there() { Some(current_packages(needs)?) } else { None };
    if !lacks_only_source(survey, known.as_ref(), &compiler) {
        return Ok(false);
    }
    let added = add_component("rust-src", compiler.sysroot.file_name());
    if let Err(error) = &added {
        eprintln!("cannot add rust-src to rustup's toolchain: {error:#}; setup looks for another compiler");
    }
    Ok(added.is_ok())
}

/// Returns true if no compiler of the survey can be used, and if this one could be used with the
/// source of its library: there is a linker for it, or one can be built.
fn lacks_only_source(survey: &Survey, known: Option<&Packages>, compiler: &Compiler) -> bool {
    let llvm = compiler.version.llvm;
    let has_linker = survey.linkers.iter().any(|linker| linker.llvm == llvm);
    let can_link = has_linker || known.is_some_and(|known| packages::can_link(known, llvm));
    can_link && choose(survey, known).is_none()
}

/// Returns what apt knows of packages. Updates its lists first if they lack one that is needed.
fn current_packages(needs: &Needs) -> Result<Packages> {
    let known = apt_knows()?;
    if wanted(needs, &known).is_ok() || !apt::may_install() {
        return Ok(known);
    }
    apt::update()?;
    apt_knows()
}

fn apt_knows() -> Result<Packages> {
    let c_compilers = [C_COMPILER, C_COMPILER_AMD64, C_COMPILER_ARM64];
    let others =
        [&WORLD_TOOLS[..], &VM_TOOLS, &VM_ARM64_TOOLS, &FUZZ_TOOLS, &TEST_TOOLS, &IMAGE_TOOLS, &c_compilers];
    let others = others.map(packages::of_tools).concat();
    let names = [packages::all(&TOOLS), others].concat();
    apt::policy(names.iter().map(String::as_str))
}

/// Returns the packages to install. The error names what apt does not have.
fn wanted(needs: &Needs, known: &Packages) -> Result<Vec<String>> {
    let mut names = tool_packages(&needs.tools, known)?;
    if let Some(survey) = needs.survey.as_ref().filter(|survey| survey.toolchain().is_none()) {
        names.extend(toolchain_packages(survey, known)?);
    }
    Ok(packages::missing(known, names))
}

fn tool_packages(tools: &[&Tool], known: &Packages) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for tool in tools {
        let found = packages::tool(known, tool);
        names.extend(found.with_context(|| format!("apt has no package for {}", tool.name))?);
    }
    Ok(names)
}

fn toolchain_packages(survey: &Survey, known: &Packages) -> Result<Vec<String>> {
    if let Some(compiler) = choose(survey, Some(known)) {
        return Ok(packages::linker_libraries(compiler.version.llvm));
    }
    let (major, minor) = workspace::rust_version();
    let pair = packages::compiler(known, (major, minor))
        .with_context(|| format!("apt has no Rust compiler {major}.{minor} or newer with its source"))?;
    let llvm = apt::llvm_of(&pair.compiler)
        .with_context(|| format!("cannot tell the LLVM of the package {}", pair.compiler))?;
    if !packages::can_link(known, llvm) {
        bail!("apt has no llvm-{llvm}-dev to build a bpf-linker for {} with", pair.compiler);
    }
    Ok([vec![pair.compiler, pair.source], packages::linker_libraries(llvm)].concat())
}

/// Returns the first compiler for which a linker can be built.
fn choose<'a>(survey: &'a Survey, known: Option<&Packages>) -> Option<&'a Compiler> {
    let can_link = |llvm| known.is_some_and(|known| packages::can_link(known, llvm));
    survey.compilers.iter().find(|compiler| can_link(compiler.version.llvm))
}

/// Adds a component to a toolchain of rustup, by default to the one in use.
fn add_component(name: &str, toolchain: Option<&OsStr>) -> Result<()> {
    let mut run = Run::new("rustup").args(["component", "add", name]).limit(DOWNLOAD);
    if let Some(toolchain) = toolchain {
        run = run.arg("--toolchain").arg(toolchain);
    }
    Progress::run(&format!("rustup component add {name}"), run)
}

/// Returns instructions for a person, if apt cannot be used.
fn by_hand(needs: &Needs, names: Option<&[String]>) -> String {
    let mut lines = vec![needs.explain()];
    if let Some(names) = names {
        lines.push(format!(
            "Install it as root, then run this command again:\n  apt-get install --no-install-recommends {}",
            names.join(" ")
        ));
        return lines.join("\n");
    }
    let (llvms, version) = (toolchain::BPF_LINKER_LLVMS, toolchain::BPF_LINKER);
    lines.push("Install what is missing, then run this command again.".into());
    if needs.survey.as_ref().is_some_and(|survey| survey.compilers.is_empty()) {
        lines.push("  a Rust compiler with its library's source: rustup toolchain install nightly --component rust-src".into());
    }
    if needs.lacks_toolchain() {
        lines.push(format!(
            "  bpf-linker {version} with the LLVM that `rustc +nightly -vV` prints ({} to {}), in PATH:\n    a release of \
             https://github.com/aya-rs/bpf-linker, or, with the headers of LLVM N installed in /usr/lib/llvm-N:\n    \
             LLVM_PREFIX=/usr/lib/llvm-N cargo install bpf-linker --version {version} --no-default-features --features llvm-N",
            llvms.start(),
            llvms.end()
        ));
    }
    lines.join("\n")
}

impl Needs {
    /// Checks the machine and changes nothing.
    fn check() -> Self {
        Self {
            survey: Some(toolchain::survey()),
            tools: TOOLS.iter().filter(|tool| tool.find().is_none()).collect(),
        }
    }

    fn lacks_toolchain(&self) -> bool {
        self.survey.as_ref().is_some_and(|survey| survey.toolchain().is_none())
    }

    /// Returns the files that a complete setup relies on, or `None` if something is missing.
    fn files(&self) -> Option<Vec<PathBuf>> {
        let toolchain = self.survey.as_ref()?.toolchain()?;
        let library = toolchain.compiler.library();
        let mut files = vec![toolchain.linker.path, toolchain.compiler.rustc, library];
        for tool in &TOOLS {
            files.push(search::program(tool.name).filter(|_| !self.tools.contains(&tool))?);
        }
        Some(files)
    }

    /// Describes what is missing.
    fn explain(&self) -> String {
        let survey = self.survey.iter().filter(|survey| survey.toolchain().is_none()).map(Survey::explain);
        let tools = self.tools.iter().map(|tool| tool.explain());
        survey.chain(tools).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use xtask::toolchain::{Linker, Version};

    use super::*;

    fn compiler(llvm: u32) -> Compiler {
        Compiler {
            rustc: "/rustup/bin/rustc".into(),
            sysroot: "/rustup".into(),
            version: Version { release: (1, 96), llvm },
        }
    }

    #[test]
    fn source_is_added_only_where_nothing_else_is_missing() {
        let none = Survey::default();
        assert!(!lacks_only_source(&none, None, &compiler(22)), "no linker");
        let linker = Linker { path: "/bin/bpf-linker".into(), llvm: 22 };
        let with_linker = Survey { linkers: vec![linker], ..Survey::default() };
        assert!(lacks_only_source(&with_linker, None, &compiler(22)));
        assert!(!lacks_only_source(&with_linker, None, &compiler(23)), "a linker of another LLVM");
        let package = |name| (name, apt::Package { candidate: Some("1".into()), ..apt::Package::default() });
        let known: Packages = packages::linker_libraries(22).into_iter().map(package).collect();
        assert!(lacks_only_source(&none, Some(&known), &compiler(22)), "a linker can be built");
        let usable = Survey { compilers: vec![compiler(22)], ..Survey::default() };
        assert!(!lacks_only_source(&usable, Some(&known), &compiler(22)), "another compiler can be used");
    }
}
