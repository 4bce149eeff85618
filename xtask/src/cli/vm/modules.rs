//! Selects a kernel's modules for a guest: all of networking, and their dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use xtask::run::Run;

use super::archive::Archive;

const DEPMOD: Duration = Duration::from_mins(2);
/// Folders of which every module is included: a third of all modules, without a list to maintain.
/// Checksums and ciphers are requested by name, so they are no dependencies.
const TAKEN: [&str; 5] = [
    "kernel/net/",
    "kernel/drivers/net/",
    "kernel/crypto/",
    "kernel/arch/x86/crypto/",
    "kernel/arch/arm64/crypto/",
];

/// Returns the release, and the folder of its modules in unpacked packages.
pub(crate) fn find(unpacked: &Path) -> Result<(String, PathBuf)> {
    let folders = ["lib/modules", "usr/lib/modules"].map(|folder| unpacked.join(folder));
    let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let mut trees: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    ensure!(trees.len() == 1, "the packages hold the modules of {} kernels", trees.len());
    let tree = trees.remove(0);
    let release = tree.file_name().and_then(|name| name.to_str()).context("a kernel's name is not UTF-8")?;
    Ok((release.to_owned(), tree.clone()))
}

/// Writes an archive of the modules of guests, with depmod's tables.
pub(crate) fn pack(unpacked: &Path, tree: &Path, release: &str, archive: &Path) -> Result<()> {
    if !unpacked.join("lib").exists() {
        // depmod looks in /lib.
        std::os::unix::fs::symlink("usr/lib", unpacked.join("lib")).context("cannot link lib")?;
    }
    Run::new("depmod").arg("--basedir").arg(unpacked).arg(release).limit(DEPMOD).read()?;
    let failed = || format!("cannot read the modules of {release}");
    let dependencies = fs::read_to_string(tree.join("modules.dep")).with_context(failed)?;
    let mut names: BTreeSet<PathBuf> = choose(&dependencies).into_iter().map(PathBuf::from).collect();
    for entry in fs::read_dir(tree).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(b"modules.") {
            names.insert(entry.file_name().into());
        }
    }
    let mut archive = Archive::create(archive)?;
    let folder = Path::new("/lib/modules").join(release);
    names.iter().try_for_each(|name| archive.copy(&folder.join(name), &tree.join(name)))?;
    archive.finish()
}

/// Returns the modules to include, from the text of modules.dep: "MODULE: DEPENDENCY...", all
/// dependencies of each.
fn choose(dependencies: &str) -> BTreeSet<&str> {
    let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let needs: BTreeMap<&str, &str> = lines.collect();
    let taken = needs.iter().filter(|(module, _)| TAKEN.iter().any(|folder| module.starts_with(folder)));
    taken.flat_map(|(module, needed)| std::iter::once(*module).chain(needed.split_whitespace())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networking_is_included_with_its_dependencies() {
        let text = "kernel/drivers/net/veth.ko:\n\
                    kernel/net/sctp/sctp.ko.xz: kernel/lib/libcrc32c.ko.xz kernel/net/ipv4/udp_tunnel.ko.xz\n\
                    kernel/lib/libcrc32c.ko.xz:\nkernel/fs/xfs/xfs.ko.xz: kernel/lib/libcrc32c.ko.xz\n";
        let expected = [
            "kernel/drivers/net/veth.ko",
            "kernel/lib/libcrc32c.ko.xz",
            "kernel/net/ipv4/udp_tunnel.ko.xz",
            "kernel/net/sctp/sctp.ko.xz",
        ];
        assert_eq!(choose(text).into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn packages_without_modules_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(find(folder.path()).unwrap_err().to_string().contains("0 kernels"));
    }

    #[test]
    fn modules_are_found_in_usr() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("usr/lib/modules/7.2.13");
        fs::create_dir_all(&tree).unwrap();
        assert_eq!(find(folder.path()).unwrap(), ("7.2.13".to_owned(), tree));
    }
}
