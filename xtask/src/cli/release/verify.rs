//! `cargo xtask release --verify`: makes the release twice, in clones in different folders, and
//! compares every byte.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use xtask::run::Run;
use xtask::workspace;

use super::source::Source;
use super::target::Target;
use super::{digest, inputs};
use crate::cli::steps;

/// Names of the folders. Their lengths differ, as do folders of different people.
const NAMES: [&str; 2] = ["a", "another-folder-of-a-reader"];
/// What the clones share: tools that are built once, and packages, which are verified in any case.
const SHARED: [&str; 2] = ["tools", "packages"];

/// Makes both releases of the commit, and fails if they differ.
pub(crate) fn run(targets: &[Target]) -> Result<()> {
    Source::read(false)?;
    let work = tempfile::tempdir_in(workspace::target()).context("cannot create a folder for clones")?;
    let made = NAMES.iter().map(|name| make(&work.path().join(name), targets)).collect::<Result<Vec<_>>>()?;
    let [one, other] = &made[..] else { bail!("two releases were made") };
    let (one, other) = (digests(one)?, digests(other)?);
    let differing = differing(&one, &other);
    if !differing.is_empty() {
        bail!("these files differ between the two releases:\n  {}", differing.join("\n  "));
    }
    println!("{} files are the same in both releases", one.len());
    Ok(())
}

/// Clones the repository into a folder, and makes the release there. Returns the folder of the
/// release.
fn make(folder: &Path, targets: &[Target]) -> Result<PathBuf> {
    Run::new("git").args(["clone", "--quiet"]).arg(workspace::root()).arg(folder).read()?;
    let target = folder.join("target");
    fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
    for name in SHARED {
        let own = workspace::root().join("target").join(name);
        fs::create_dir_all(&own).with_context(|| format!("cannot create {}", own.display()))?;
        symlink(&own, target.join(name)).with_context(|| format!("cannot link {}", own.display()))?;
    }
    let out = folder.join("out");
    let run = steps::cargo(steps::BUILD * 2).dir(folder).env("CARGO_TARGET_DIR", &target);
    let run = run.args(["xtask", "release", "--out"]).arg(&out);
    run.args(targets.iter().flat_map(|target| ["--target", target.name()])).show()?;
    Ok(out)
}

/// Returns the digests of all files below a folder, by their paths.
fn digests(folder: &Path) -> Result<BTreeMap<String, String>> {
    let files = inputs::files(folder)?;
    files.into_iter().map(|(name, path)| Ok((name, digest::of_file(&path)?))).collect()
}

/// Returns the names of files that are not the same in both.
fn differing(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> Vec<String> {
    let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
    names.sort();
    names.dedup();
    names.into_iter().filter(|name| one.get(*name) != other.get(*name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_differ_or_are_missing_are_named() {
        let of = |files: &[(&str, &str)]| {
            files.iter().map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned())).collect()
        };
        let (one, other) =
            (of(&[("a", "1"), ("b", "1"), ("c", "1")]), of(&[("a", "1"), ("b", "2"), ("d", "1")]));
        assert_eq!(differing(&one, &other), ["b", "c", "d"]);
        assert_eq!(differing(&one, &one), [""; 0]);
    }
}
