//! Cargo commands whose result depends neither on the environment of the cargo or tool that runs
//! xtask, nor on the folders of this machine.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::run::Run;
use crate::{search, workspace};

/// Variables of the outer cargo that the inner one needs too: the sources of crates.
const KEPT: [&str; 5] = ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTRIES_", "CARGO_REGISTRY_"];
/// Prefixes of variables by which an outer cargo, clippy, nextest or rustdoc would change the inner
/// build.
const DROPPED: [&str; 4] = ["CARGO", "RUSTC", "RUSTFLAGS", "RUSTDOC"];
/// More such variables, by full name.
const DROPPED_NAMES: [&str; 7] =
    ["RUSTUP_TOOLCHAIN", "CLIPPY_ARGS", "CLIPPY_CONF_DIR", "MAKEFLAGS", "MFLAGS", "TARGET", "PROFILE"];

/// Returns a cargo command on the workspace, with this compiler and its flags.
pub fn command(cargo: &Path, rustc: &Path, flags: &[OsString]) -> Run {
    let mut run = Run::new(cargo).dir(workspace::root());
    for (name, _) in env::vars_os() {
        if is_dropped(&name.to_string_lossy()) {
            run = run.without_env(name);
        }
    }
    run.env("RUSTC", rustc)
        // An empty value turns off the setting of a configuration file.
        .env("RUSTC_WRAPPER", "")
        .env("RUSTC_WORKSPACE_WRAPPER", "")
        // The byte 0x1f separates flags, so that paths may contain spaces.
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join(&OsString::from("\x1f")))
}

fn is_dropped(name: &str) -> bool {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    (starts(&DROPPED) && !starts(&KEPT)) || DROPPED_NAMES.contains(&name)
}

/// A folder, and its name in messages and debug information, which is the same on every machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renamed {
    folder: PathBuf,
    name: &'static str,
}

/// Returns the folders whose paths compilers write into programs: sources, and what is generated
/// from them in cargo's target folder. A later one has priority.
pub fn renamed_folders(sysroot: &Path, target: &Path) -> Vec<Renamed> {
    let renamed = |folder, name| Renamed { folder, name };
    let crates = search::home("CARGO_HOME", ".cargo").map(|folder| renamed(folder, "/cargo"));
    let others = [
        renamed(sysroot.join("lib/rustlib/src/rust"), "/rust"),
        renamed(target.to_owned(), "/shunt/target"),
        renamed(workspace::root(), "/shunt"),
    ];
    crates.into_iter().chain(others).collect()
}

impl Renamed {
    /// Returns the flag for rustc.
    pub fn for_rustc(&self) -> OsString {
        self.flag("--remap-path-prefix=")
    }

    /// Returns the flag for gcc and clang.
    pub fn for_c(&self) -> OsString {
        self.flag("-ffile-prefix-map=")
    }

    fn flag(&self, start: &str) -> OsString {
        let mut flag = OsString::from(start);
        flag.push(&self.folder);
        flag.push("=");
        flag.push(self.name);
        flag
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_outer_cargo_are_removed() {
        for name in [
            "CARGO",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_MANIFEST_DIR",
            "CARGO_PKG_NAME",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "CARGO_PROFILE_RELEASE_LTO",
            "CARGO_MAKEFLAGS",
            "RUSTC",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTFLAGS",
            "RUSTDOCFLAGS",
            "RUSTUP_TOOLCHAIN",
            "CLIPPY_ARGS",
        ] {
            assert!(is_dropped(name), "{name}");
        }
    }

    #[test]
    fn sources_of_crates_are_kept() {
        for name in [
            "CARGO_HOME",
            "CARGO_NET_OFFLINE",
            "CARGO_HTTP_PROXY",
            "CARGO_REGISTRIES_X_TOKEN",
            "PATH",
            "RUSTUP_HOME",
        ] {
            assert!(!is_dropped(name), "{name}");
        }
    }

    #[test]
    fn folder_of_this_machine_gets_a_name_of_every_machine() {
        let renamed = Renamed { folder: "/home/a b/shunt".into(), name: "/shunt" };
        assert_eq!(renamed.for_rustc(), "--remap-path-prefix=/home/a b/shunt=/shunt");
        assert_eq!(renamed.for_c(), "-ffile-prefix-map=/home/a b/shunt=/shunt");
    }
}
