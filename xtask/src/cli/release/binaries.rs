//! Builds static programs for an architecture. The same sources and compilers give the same bytes
//! in every folder.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xtask::inner_cargo::{self, Renamed};
use xtask::run::Run;
use xtask::workspace;

use super::Target;
use super::compiler::Compiler;
use crate::cli::setup;
use crate::cli::steps::BUILD;

/// Chooses shunt among what cargo builds.
pub(crate) const SHUNT: [&str; 4] = ["--package", "proxy-userspace", "--bin", "shunt"];

/// What is built, and for which architecture.
#[derive(Debug)]
pub(crate) struct Builder {
    target: Target,
    compiler: Compiler,
    /// The C compiler, which also links.
    c_compiler: &'static str,
}

/// Builds shunt for an architecture into `folder/shunt-ARCHITECTURE`: optimised, static, and
/// without debug information. The symbols stay, because CPU profiles need the names of functions.
pub(crate) fn build(target: Target, folder: &Path) -> Result<PathBuf> {
    Builder::prepare(target)?.cargo("build").args(SHUNT).show()?;
    let program = folder.join(format!("shunt-{}", target.name()));
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::copy(release(target).join("shunt"), &program)
        .with_context(|| format!("cannot write {}", program.display()))?;
    Ok(program)
}

/// Returns cargo's folder of optimised static programs for an architecture.
pub(crate) fn release(target: Target) -> PathBuf {
    workspace::target().join(target.triple()).join("release")
}

impl Builder {
    /// Finds the compilers, and installs what is missing.
    pub(crate) fn prepare(target: Target) -> Result<Self> {
        setup::ensure_build()?;
        Ok(Self { target, c_compiler: setup::ensure_c(target)?, compiler: Compiler::find(target)? })
    }

    /// Returns a cargo command that builds optimised static programs, into [`release`].
    pub(crate) fn cargo(&self, command: &str) -> Run {
        let (compiler, target) = (&self.compiler, workspace::target());
        let renamed = inner_cargo::renamed_folders(&compiler.sysroot, &target);
        let run = inner_cargo::command(&compiler.cargo, &compiler.rustc, &rust_flags(&renamed))
            .args([command, "--release", "--locked", "--target", self.target.triple(), "--target-dir"])
            .arg(target)
            .limit(BUILD);
        let run = self.environment(&renamed).into_iter().fold(run, |run, (name, value)| run.env(name, value));
        if compiler.builds_library { run.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "build-std"]) } else { run }
    }

    fn environment(&self, renamed: &[Renamed]) -> [(String, OsString); 5] {
        let triple = self.target.triple().replace('-', "_");
        let flags: Vec<OsString> = renamed.iter().map(|renamed| quoted(&renamed.for_c())).collect();
        [
            (format!("CARGO_TARGET_{}_LINKER", triple.to_uppercase()), self.c_compiler.into()),
            (format!("CC_{triple}"), self.c_compiler.into()),
            (format!("CFLAGS_{triple}"), flags.join(&OsString::from(" "))),
            ("CC_SHELL_ESCAPED_FLAGS".into(), "1".into()),
            ("CARGO_PROFILE_RELEASE_STRIP".into(), "debuginfo".into()),
        ]
    }
}

/// Returns the compiler's flags. glibc is linked statically, so that the program runs beside any
/// other version, and without one.
fn rust_flags(renamed: &[Renamed]) -> Vec<OsString> {
    let paths = renamed.iter().map(Renamed::for_rustc);
    [OsString::from("-Ctarget-feature=+crt-static")].into_iter().chain(paths).collect()
}

/// Quotes a flag, as the crate cc reads it.
fn quoted(flag: &OsString) -> OsString {
    let mut quoted = OsString::from("'");
    quoted.push(flag);
    quoted.push("'");
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder(builds_library: bool) -> Builder {
        let compiler = Compiler {
            cargo: "cargo".into(),
            rustc: "/bin/rustc".into(),
            sysroot: "/usr".into(),
            builds_library,
        };
        Builder { target: Target::Arm64, compiler, c_compiler: "aarch64-linux-gnu-gcc" }
    }

    #[test]
    fn compilers_are_those_of_the_architecture() {
        let environment = builder(false).environment(&[]);
        let of = |name: &str| environment.iter().find(|(known, _)| known == name).unwrap().1.clone();
        assert_eq!(of("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER"), "aarch64-linux-gnu-gcc");
        assert_eq!(of("CC_aarch64_unknown_linux_gnu"), "aarch64-linux-gnu-gcc");
    }

    #[test]
    fn library_is_built_only_if_the_compiler_lacks_it() {
        let shown = builder(false).cargo("build").to_string();
        assert!(
            shown.starts_with("cargo build --release --locked --target aarch64-unknown-linux-gnu"),
            "{shown}"
        );
        assert!(!shown.contains("build-std"), "{shown}");
        assert!(builder(true).cargo("build").to_string().ends_with("-Z build-std"));
    }

    #[test]
    fn no_flag_keeps_the_name_of_the_workspace_folder() {
        let renamed = inner_cargo::renamed_folders(Path::new("/usr"), Path::new("/elsewhere"));
        let end = OsString::from(format!("={}=/shunt", workspace::root().display()));
        let ends = |flag: &OsString| flag.as_encoded_bytes().ends_with(end.as_encoded_bytes());
        assert!(rust_flags(&renamed).iter().any(ends));
        assert!(renamed.iter().any(|renamed| ends(&renamed.for_c())));
    }
}
