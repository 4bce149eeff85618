//! The crates that are in the binary.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result, ensure};
use xtask::workspace;

use super::target::Target;
use crate::cli::steps;

/// A crate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Crate {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Its license, as its author wrote it. Empty if there is none.
    pub(crate) license: String,
    /// The SHA-256 of its archive. Crates of the workspace have none.
    pub(crate) checksum: Option<String>,
}

/// Returns the crates that are compiled into the binary and its eBPF programs, sorted.
///
/// cargo resolves the features of these two packages alone, as a build of them does.
pub(crate) fn of(target: Target) -> Result<Vec<Crate>> {
    let run = steps::cargo(steps::SHORT)
        .args(["tree", "--locked", "--package", "proxy-userspace", "--package", "proxy-ebpf"])
        .args(["--edges", "normal,no-proc-macro", "--target", target.triple()])
        .args(["--prefix", "none", "--format", "{p}\t{l}"]);
    let path = workspace::root().join("Cargo.lock");
    let lock = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let found = parse(&run.read()?, &checksums(&lock));
    ensure!(!found.is_empty(), "cargo tree lists no crates");
    Ok(found)
}

/// Reads lines such as `serde v1.0.0 (*)`, with the license behind a tab.
fn parse(tree: &str, checksums: &BTreeMap<(String, String), String>) -> Vec<Crate> {
    let crates = tree.lines().filter_map(|line| {
        let (package, license) = line.split_once('\t')?;
        let (name, rest) = package.split_once(" v")?;
        let version = rest.split(' ').next()?.to_owned();
        let checksum = checksums.get(&(name.to_owned(), version.clone())).cloned();
        let license = license.trim_end_matches(" (*)").to_owned();
        Some(Crate { name: name.to_owned(), version, license, checksum })
    });
    crates.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the checksums of the crates in Cargo.lock.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let packages = lock.split("[[package]]").filter_map(|package| {
        let field = |name: &str| {
            let start = format!("{name} = \"");
            let value = package.lines().find_map(|line| line.strip_prefix(&start)?.strip_suffix('"'));
            value.map(str::to_owned)
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    });
    packages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_are_listed_once_with_license_and_checksum() {
        let lock = "version = 4\n\n[[package]]\nname = \"serde\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n";
        let tree = "proxy-userspace v1.2.3 (/work)\tApache-2.0\nserde v1.0.0\tMIT OR Apache-2.0\n\n\
                    serde v1.0.0\tMIT OR Apache-2.0 (*)\n";
        let crates = parse(tree, &checksums(lock));
        let names: Vec<&str> = crates.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["proxy-userspace", "serde"]);
        assert_eq!(crates[0].checksum, None);
        assert_eq!((&*crates[1].license, crates[1].checksum.as_deref()), ("MIT OR Apache-2.0", Some("ab")));
    }
}
