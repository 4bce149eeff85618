//! Reads and builds what a release is made of.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xtask::workspace;

use super::artefacts::{Inputs, Part};
use super::lock::Lock;
use super::settings::Settings;
use super::source::Source;
use super::target::Target;
use super::tree::Tree;
use super::{crates, digest, embedded, linked, packages};
use crate::cli::progress::Progress;

/// Files that pin dependencies.
const PINS: [&str; 2] = ["Cargo.lock", "deploy/image/packages.json"];

/// Builds a program for an architecture, into a folder, and returns its path.
type Program = dyn Fn(Target, &Path) -> Result<PathBuf>;

/// Builds the programs, and reads everything else.
pub(crate) fn read(
    settings: Settings,
    targets: &[Target],
    allow_changes: bool,
    program: &Program,
) -> Result<Inputs> {
    // Before the builds, which take minutes.
    let source = Source::read(allow_changes)?;
    let root = workspace::root();
    let lock = Lock::read()?;
    let parts = targets.iter().map(|target| part(*target, &lock, program)).collect::<Result<Vec<_>>>()?;
    let programs: Vec<_> = parts.iter().map(|part| (part.target, &*part.shunt)).collect();
    embedded::ensure_same(&programs)?;
    let changelog = changelog()?;
    let pins = PINS.iter().map(|name| Ok((*name, digest::of_file(&root.join(name))?)));
    let pins = pins.collect::<Result<Vec<_>>>()?;
    let deploy = folder(&root.join("deploy"))?;
    Ok(Inputs { settings, source, lock, deploy, changelog, pins, parts })
}

/// Reads the changelog.
pub(crate) fn changelog() -> Result<String> {
    fs::read_to_string(workspace::root().join("CHANGELOG.md")).context("cannot read CHANGELOG.md")
}

/// Builds and fetches what the image of an architecture is made of.
fn part(target: Target, lock: &Lock, program: &Program) -> Result<Part> {
    let work = workspace::target().join("release-work");
    let binaries = work.join("binaries");
    fs::create_dir_all(&binaries).with_context(|| format!("cannot create {}", binaries.display()))?;
    let unpacked = work.join("packages");
    drop(fs::remove_dir_all(unpacked.join(target.name())));
    let packages = Progress::during(&format!("packages of {}", target.name()), |progress| {
        packages::unpack(lock, target, &unpacked, &mut |line| progress.line(line))
    })?;
    let path = program(target, &binaries)?;
    let shunt = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Part { target, shunt, crates: crates::of(target)?, linked: linked::of(target)?, packages })
}

/// Reads the files below a folder.
pub(crate) fn folder(top: &Path) -> Result<Tree> {
    let mut tree = Tree::default();
    for (name, path) in files(top)? {
        tree.file(&name, fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    Ok(tree)
}

/// Returns all files and links below a folder, with their names relative to it.
pub(crate) fn files(top: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut folders = vec![top.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(top).context("a file outside its folder")?;
            let name = name.to_str().with_context(|| format!("{} is no UTF-8", path.display()))?;
            found.push((name.to_owned(), path));
        }
    }
    Ok(found)
}
