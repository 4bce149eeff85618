//! The root file system of the image: the commands that shunt runs, and only what they need of
//! Debian's packages.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::inputs;
use super::packages::Unpacked;
use super::target::Target;
use super::tree::{Node, Tree};
use crate::cli::vm::elf;

/// Programs and files that the image has for themselves. A path that ends with `/` is a folder with
/// everything in it, and `@` is the name of the architecture in paths of libraries.
const WANTED: [&str; 20] = [
    "usr/sbin/nft",
    "usr/sbin/ipset",
    "usr/sbin/iptables-nft",
    "usr/sbin/iptables-nft-save",
    "usr/sbin/iptables-nft-restore",
    "usr/sbin/ip6tables-nft",
    "usr/sbin/ip6tables-nft-save",
    "usr/sbin/ip6tables-nft-restore",
    "usr/sbin/iptables-legacy",
    "usr/sbin/iptables-legacy-save",
    "usr/sbin/iptables-legacy-restore",
    "usr/sbin/ip6tables-legacy",
    "usr/sbin/ip6tables-legacy-save",
    "usr/sbin/ip6tables-legacy-restore",
    "usr/lib/@/xtables/",
    // Names of protocols and ports.
    "etc/protocols",
    "etc/services",
    // Scanners read which release the packages are of.
    "etc/os-release",
    "usr/lib/os-release",
    // The licenses that the copyright files refer to.
    "usr/share/common-licenses/",
];

/// The first bytes of programs and libraries.
const ELF: &[u8] = b"\x7fELF";

/// Certificate authorities, for kubeconfigs that name none.
const CERTIFICATES: &str = "usr/share/ca-certificates/mozilla/";
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";

/// Plain names of commands. Debian's alternatives are the same.
const PLAIN: [&str; 6] =
    ["iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"];

/// Folders that are links in Debian, so that the linker is at its usual path.
const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// Folders for mounts and temporary files, with their modes.
const FOLDERS: [(&str, u32); 7] = [
    ("dev", 0o755),
    ("etc/shunt", 0o755),
    ("proc", 0o555),
    ("run", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr/lib64", 0o755),
];

/// Files that no package contains.
const OWN: [(&str, &str); 3] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

/// The files of the packages, of which the image takes some.
struct Selection<'a> {
    target: Target,
    /// The packages and files by the paths of the files.
    offered: BTreeMap<String, (&'a Unpacked, PathBuf)>,
    tree: Tree,
    /// Names of packages of which the image has a file.
    used: BTreeSet<&'a str>,
}

/// Returns the file system without shunt. Each package must have a file in it.
pub(crate) fn build(target: Target, packages: &[Unpacked]) -> Result<Tree> {
    let mut selection =
        Selection { target, offered: offered(packages)?, tree: Tree::default(), used: [].into() };
    wanted(target).iter().try_for_each(|path| selection.take_all(path))?;
    selection.bundle_certificates()?;
    for package in packages {
        let name = package.package.name.as_str();
        ensure!(
            selection.used.contains(name),
            "the image needs no file of the package {name}: remove it from PACKAGES"
        );
        selection.describe(package)?;
    }
    let mut tree = selection.tree;
    for name in PLAIN {
        tree.link(&format!("usr/sbin/{name}"), &variant(name));
    }
    for name in MERGED {
        tree.link(name, &format!("usr/{name}"));
    }
    for (path, mode) in FOLDERS {
        tree.insert(path, Node::Folder(mode));
    }
    for (path, text) in OWN {
        tree.file(path, text);
    }
    Ok(tree)
}

/// Returns the files and folders that the image has for themselves.
pub(crate) fn wanted(target: Target) -> Vec<String> {
    let listed = WANTED.iter().map(|path| path.replace('@', triplet(target)));
    listed.chain([loader(target).to_owned()]).collect()
}

/// Returns Debian's name of an architecture in the paths of libraries.
fn triplet(target: Target) -> &'static str {
    match target {
        Target::Amd64 => "x86_64-linux-gnu",
        Target::Arm64 => "aarch64-linux-gnu",
    }
}

/// Returns the path at which programs look for the dynamic linker.
fn loader(target: Target) -> &'static str {
    match target {
        Target::Amd64 => "usr/lib64/ld-linux-x86-64.so.2",
        Target::Arm64 => "usr/lib/ld-linux-aarch64.so.1",
    }
}

/// Returns the nftables variant of a command.
fn variant(name: &str) -> String {
    name.replacen("tables", "tables-nft", 1)
}

/// Lists the files of all packages.
fn offered(packages: &[Unpacked]) -> Result<BTreeMap<String, (&Unpacked, PathBuf)>> {
    let mut offered = BTreeMap::new();
    for package in packages {
        let files = inputs::files(&package.folder)?;
        offered.extend(files.into_iter().map(|(name, path)| (name, (package, path))));
    }
    Ok(offered)
}

impl<'a> Selection<'a> {
    /// Takes a file, or everything in a folder, with what it needs.
    fn take_all(&mut self, wanted: &str) -> Result<()> {
        if !wanted.ends_with('/') {
            return self.take(wanted);
        }
        let inside = self.offered.keys().filter(|path| path.starts_with(wanted));
        let inside: Vec<String> = inside.cloned().collect();
        ensure!(!inside.is_empty(), "no package has files in {wanted}");
        inside.iter().try_for_each(|path| self.take(path))
    }

    fn take(&mut self, path: &str) -> Result<()> {
        if self.tree.get(path).is_some() {
            return Ok(());
        }
        let (package, source) =
            self.offered.get(path).with_context(|| format!("no package of the image has the file {path}"))?;
        self.used.insert(&package.package.name);
        let node = read(source)?;
        self.tree.insert(path, node.clone());
        match node {
            Node::Link(target) => self.take(&resolve(path, &target)?),
            Node::File { bytes, .. } => self.take_needs(path, &bytes),
            Node::Folder(_) => Ok(()),
        }
    }

    fn take_needs(&mut self, path: &str, bytes: &[u8]) -> Result<()> {
        if !bytes.starts_with(ELF) {
            return Ok(());
        }
        let names = elf::read(bytes).with_context(|| format!("cannot read what {path} needs"))?;
        let libraries = names.iter().map(|name| format!("usr/lib/{}/{name}", triplet(self.target)));
        let libraries: Vec<String> = libraries.collect();
        libraries
            .iter()
            .try_for_each(|needed| self.take(needed).with_context(|| format!("{path} needs {needed}")))
    }

    /// Joins the certificates to one file, in the order of their names, as Debian's installation
    /// does.
    fn bundle_certificates(&mut self) -> Result<()> {
        let mut bundle = Vec::new();
        for (path, (package, source)) in &self.offered {
            if path.starts_with(CERTIFICATES) {
                bundle.extend(fs::read(source).with_context(|| format!("cannot read {}", source.display()))?);
                self.used.insert(&package.package.name);
            }
        }
        ensure!(!bundle.is_empty(), "no package has certificates in {CERTIFICATES}");
        self.tree.file(BUNDLE, bundle);
        Ok(())
    }

    /// Adds the copyright of a package, and its description where scanners of images look for it.
    fn describe(&mut self, package: &'a Unpacked) -> Result<()> {
        let name = &package.package.name;
        self.take(&format!("usr/share/doc/{name}/copyright"))?;
        self.tree.file(&format!("var/lib/dpkg/status.d/{name}"), package.control.as_str());
        Ok(())
    }
}

/// Reads a file or a link.
fn read(path: &Path) -> Result<Node> {
    let shown = || format!("cannot read {}", path.display());
    let metadata = fs::symlink_metadata(path).with_context(shown)?;
    if metadata.is_symlink() {
        let target = fs::read_link(path).with_context(shown)?;
        return Ok(Node::Link(target.to_str().with_context(shown)?.to_owned()));
    }
    let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
    Ok(Node::File { mode, bytes: fs::read(path).with_context(shown)? })
}

/// Returns the path that a link points to.
fn resolve(link: &str, target: &str) -> Result<String> {
    let folder = Path::new(link).parent().unwrap_or(Path::new(""));
    let mut resolved = PathBuf::new();
    for part in folder.join(target).components() {
        match part {
            Component::RootDir => resolved.clear(),
            Component::ParentDir => ensure!(resolved.pop(), "{link} points outside, to {target}"),
            Component::Normal(name) => resolved.push(name),
            Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Ok(resolved.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_commands_are_those_of_nftables() {
        assert_eq!(PLAIN.map(variant)[1..4], ["iptables-nft-save", "iptables-nft-restore", "ip6tables-nft"]);
        assert!(PLAIN.iter().all(|name| WANTED.contains(&&*format!("usr/sbin/{}", variant(name)))));
    }

    #[test]
    fn links_are_resolved_within_the_image() {
        let of = |link, target| resolve(link, target).map_err(|error| error.to_string());
        assert_eq!(of("usr/sbin/nft", "x").unwrap(), "usr/sbin/x");
        assert_eq!(of("usr/lib64/ld.so", "../lib/x86/ld.so").unwrap(), "usr/lib/x86/ld.so");
        assert_eq!(of("etc/a", "/usr/lib/a").unwrap(), "usr/lib/a");
        assert_eq!(of("etc/a", "../../a").unwrap_err(), "etc/a points outside, to ../../a");
    }
}
