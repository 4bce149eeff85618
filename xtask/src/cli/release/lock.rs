//! The Debian packages of the image, pinned by version and SHA-256 in `deploy/image/packages.json`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};
use xtask::run::Run;
use xtask::workspace;

use super::target::Target;
use crate::cli::vm::{Apt, MIRROR, stable};

/// Debian 13.
const RELEASE: &str = "trixie";

/// The packages whose files the image takes. Debian renames libraries when their interface changes:
/// then the release names the library that is missing.
const PACKAGES: [&str; 22] = [
    "base-files",
    "ca-certificates",
    "ipset",
    "iptables",
    "libbsd0",
    "libc6",
    "libedit2",
    "libgmp10",
    "libip4tc2",
    "libip6tc2",
    "libipset13t64",
    "libjansson4",
    "libmd0",
    "libmnl0",
    "libnetfilter-conntrack3",
    "libnfnetlink0",
    "libnftables1",
    "libnftnl11",
    "libtinfo6",
    "libxtables12",
    "netbase",
    "nftables",
];

/// The pinned packages of each architecture, by Debian's name of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lock {
    /// The name of Debian's release.
    pub(crate) release: String,
    /// A time at which the archive had all of these packages, as archives of snapshots write it.
    pub(crate) snapshot: String,
    /// The packages, sorted by name.
    pub(crate) packages: BTreeMap<String, Vec<Package>>,
}

/// A pinned package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Package {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// The name of the source package.
    pub(crate) source: String,
    /// The archive: `debian` or `debian-security`.
    pub(crate) archive: String,
    /// The path in the archive.
    pub(crate) path: String,
    /// The digest of the file.
    pub(crate) sha256: String,
}

impl Lock {
    /// Returns the path of the file.
    pub(crate) fn path() -> PathBuf {
        workspace::root().join("deploy/image/packages.json")
    }

    /// Reads the file.
    pub(crate) fn read() -> Result<Self> {
        let path = Self::path();
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| {
            format!("{} is damaged: `cargo xtask release --update-packages` writes it", path.display())
        })
    }

    /// Returns the packages of an architecture.
    pub(crate) fn of(&self, target: Target) -> Result<&[Package]> {
        let found = self.packages.get(target.name()).map(Vec::as_slice);
        found.with_context(|| format!("{} has no packages of {}", Self::path().display(), target.name()))
    }

    /// Writes the newest versions to the file. Returns a line for each change.
    pub(crate) fn update(each: &mut dyn FnMut(&str)) -> Result<Vec<String>> {
        let mut packages = BTreeMap::new();
        for target in Target::value_variants() {
            packages.insert(target.name().to_owned(), newest(*target, each)?);
        }
        let old = Self::read().ok();
        let changes = changes(old.as_ref().map(|lock| &lock.packages), &packages);
        if changes.is_empty() {
            return Ok(changes);
        }
        let time = Run::new("date").args(["--utc", "+%Y%m%dT%H%M%SZ"]).read()?;
        let lock = Self { release: RELEASE.to_owned(), snapshot: time.trim().to_owned(), packages };
        let path = Self::path();
        fs::write(&path, serde_json::to_string_pretty(&lock)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(changes)
    }
}

/// Asks the archive for the newest packages. apt verifies that the lists are Debian's.
fn newest(target: Target, each: &mut dyn FnMut(&str)) -> Result<Vec<Package>> {
    let work = tempfile::tempdir().context("cannot create a folder for apt")?;
    let apt = Apt::prepare(work.path(), &stable(MIRROR, RELEASE), target)?;
    apt.run("apt-get").arg("update").check(each)?;
    let text = apt.run("apt-cache").args(["show", "--no-all-versions"]).args(PACKAGES).read()?;
    let mut found: Vec<Package> = text.split("\n\n").filter_map(parse).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    for name in PACKAGES {
        ensure!(
            found.iter().any(|package| package.name == name),
            "Debian {RELEASE} has no package {name} for {}: correct PACKAGES in xtask/src/cli/release/lock.rs",
            target.name()
        );
    }
    Ok(found)
}

/// Reads a paragraph of `apt-cache show`.
fn parse(paragraph: &str) -> Option<Package> {
    let field = |name: &str| {
        let value = paragraph.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value.map(str::to_owned)
    };
    let (name, path) = (field("Package")?, field("Filename")?);
    // The version of the source is in parentheses if it is another.
    let source = field("Source").and_then(|source| Some(source.split(' ').next()?.to_owned()));
    let archive = if path.starts_with("pool/updates/") { "debian-security" } else { "debian" };
    Some(Package {
        source: source.unwrap_or_else(|| name.clone()),
        name,
        version: field("Version")?,
        archive: archive.to_owned(),
        path,
        sha256: field("SHA256")?,
    })
}

/// Returns a line for each package that comes, goes, or has another version.
fn changes(
    old: Option<&BTreeMap<String, Vec<Package>>>,
    new: &BTreeMap<String, Vec<Package>>,
) -> Vec<String> {
    let flat = |packages: &BTreeMap<String, Vec<Package>>| {
        let each = packages.iter().flat_map(|(target, list)| list.iter().map(move |p| (target.clone(), p)));
        each.map(|(target, p)| ((p.name.clone(), target), (p.version.clone(), p.sha256.clone()))).collect()
    };
    let old: BTreeMap<_, (String, String)> = old.map(flat).unwrap_or_default();
    let new: BTreeMap<_, (String, String)> = flat(new);
    let added = new.iter().filter(|(key, value)| old.get(*key) != Some(value)).map(
        |((name, target), (version, _))| {
            let before = old.get(&(name.clone(), target.clone())).map_or("none", |(version, _)| version);
            format!("{name} ({target}): {before} -> {version}")
        },
    );
    let removed = old.keys().filter(|key| !new.contains_key(*key));
    added.chain(removed.map(|(name, target)| format!("{name} ({target}): removed"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Package: libgmp10\nSource: gmp (2:6.3)\nVersion: 2:6.3.0+dfsg-3\nFilename: \
                         pool/updates/main/g/gmp/libgmp10_6.3.0+dfsg-3_amd64.deb\nMD5sum: 0\nSHA256: d0d0\n";

    fn lock(version: &str) -> BTreeMap<String, Vec<Package>> {
        let package = Package { version: version.to_owned(), ..parse(SHOWN).unwrap() };
        [("amd64".to_owned(), vec![package])].into()
    }

    #[test]
    fn package_is_read_with_its_archive_and_source() {
        let package = parse(SHOWN).unwrap();
        assert_eq!(package.version, "2:6.3.0+dfsg-3");
        assert_eq!(
            (&*package.source, &*package.archive, &*package.sha256),
            ("gmp", "debian-security", "d0d0")
        );
    }

    #[test]
    fn new_versions_and_removals_are_named() {
        assert_eq!(changes(Some(&lock("1")), &lock("1")), [""; 0]);
        assert_eq!(changes(Some(&lock("1")), &lock("2")), ["libgmp10 (amd64): 1 -> 2"]);
        assert_eq!(changes(None, &lock("2")), ["libgmp10 (amd64): none -> 2"]);
        assert_eq!(changes(Some(&lock("1")), &BTreeMap::new()), ["libgmp10 (amd64): removed"]);
    }

    #[test]
    fn every_architecture_has_the_packages_with_a_digest() {
        let lock = Lock::read().unwrap();
        for target in Target::value_variants() {
            let packages = lock.of(*target).unwrap();
            assert_eq!(packages.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), PACKAGES);
            assert!(packages.iter().all(|p| p.sha256.len() == 64 && p.path.starts_with("pool/")));
        }
    }
}
