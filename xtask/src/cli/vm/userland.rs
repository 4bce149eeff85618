//! The programs of guests with their libraries: those of this machine, or unpacked packages of
//! another architecture.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use xtask::run::Run;
use xtask::{search, workspace};

use super::apt::Apt;
use super::kernel::{MIRROR, stable};
use super::{cache, elf};
use crate::cli::progress::Progress;
use crate::cli::release::Target;

/// Programs that every guest gets. Setup installs them on this machine.
pub(crate) const TOOLS: [&str; 13] = [
    "apparmor_parser",
    "bash",
    "bpftool",
    "busybox",
    "ip",
    "ipset",
    "kmod",
    "nft",
    "setpriv",
    "ss",
    "tc",
    super::guest::XTABLES_NFT,
    super::guest::XTABLES_LEGACY,
];
/// Programs that a guest gets if they are there.
const MORE_TOOLS: [&str; 6] = ["conntrack", "ethtool", "ipvsadm", "strace", "tcpdump", "xdp-loader"];
/// Folders of programs in packages.
const PROGRAMS: [&str; 4] = ["usr/bin", "usr/sbin", "bin", "sbin"];

/// Debian's release that programs for another architecture are from: that of shunt's image.
const SUITE: &str = "trixie";
/// The packages with these programs.
const PACKAGES: [&str; 14] = [
    "apparmor",
    "bash",
    "bpftool",
    "busybox-static",
    "conntrack",
    "ethtool",
    "iproute2",
    "ipset",
    "iptables",
    "kmod",
    "nftables",
    "strace",
    "tcpdump",
    "util-linux",
];

/// The source of a guest's programs.
#[derive(Debug, Clone)]
pub(crate) enum Userland {
    /// This machine.
    Host,
    /// A folder with unpacked packages.
    Unpacked(PathBuf),
}

/// A file, and its path in the guest.
pub(crate) type Placed = (PathBuf, PathBuf);

impl Userland {
    /// Returns the source of programs for an architecture. Those of another one are fetched from
    /// Debian.
    pub(crate) fn of(arch: Target) -> Result<Self> {
        if arch == Target::Amd64 {
            return Ok(Self::Host);
        }
        let folder = cache::folder("programs", arch);
        let _lock = cache::lock()?;
        if !folder.is_dir() {
            let label = format!("fetch programs of Debian {SUITE} for {}", arch.name());
            Progress::during(&label, |progress| fetch(arch, &folder, &mut |line| progress.line(line)))
                .with_context(|| cache::cannot_fetch("programs", &folder))?;
        }
        Ok(Self::Unpacked(folder))
    }

    /// Returns the programs by name.
    pub(crate) fn tools(&self) -> Result<Vec<(&'static str, PathBuf)>> {
        let mut found = Vec::new();
        for name in TOOLS {
            let file = self.program(name).with_context(|| self.lacks(name))?;
            found.push((name, file));
        }
        let more = MORE_TOOLS.into_iter().filter_map(|name| Some((name, self.program(name)?)));
        found.extend(more.filter(|(_, file)| is_elf(file)));
        Ok(found)
    }

    fn lacks(&self, name: &str) -> String {
        match self {
            Self::Host => {
                format!("{name} is missing, and guests need it: run `cargo xtask vm` as root, or install it")
            }
            Self::Unpacked(root) => format!("{name} is not in {}: remove it and try again", root.display()),
        }
    }

    fn program(&self, name: &str) -> Option<PathBuf> {
        match self {
            Self::Host => search::program(name).and_then(|path| path.canonicalize().ok()),
            Self::Unpacked(root) => PROGRAMS.iter().map(|folder| root.join(folder).join(name)).find(|file| {
                // An absolute link leads to a program of this machine.
                fs::symlink_metadata(file).is_ok_and(|found| found.is_file())
            }),
        }
    }

    /// Returns the shared libraries that these files need, and the plugins of the libraries.
    pub(crate) fn libraries(&self, files: &[PathBuf]) -> Result<Vec<Placed>> {
        let files: Vec<&PathBuf> = files.iter().filter(|file| is_elf(file)).collect();
        let found = match self {
            // ldd fails for static programs, which need no library.
            Self::Host => parse_ldd(&Run::new("ldd").args(&files).watch(&mut |_| ())?.stdout)?,
            Self::Unpacked(root) => elf::libraries(root, &files)?,
        };
        let files =
            found.iter().chain(&plugins(&found)).map(|file| (file.clone(), self.place(file))).collect();
        Ok(files)
    }

    fn place(&self, file: &Path) -> PathBuf {
        let inside = match self {
            Self::Host => None,
            Self::Unpacked(root) => file.strip_prefix(root).ok(),
        };
        inside.map_or_else(|| file.to_owned(), |inside| Path::new("/").join(inside))
    }
}

fn fetch(arch: Target, folder: &Path, each: &mut dyn FnMut(&str)) -> Result<()> {
    let work = tempfile::tempdir_in(workspace::vm()).context("cannot create a folder to unpack in")?;
    let unpacked = work.path().join("unpacked");
    Apt::prepare(work.path(), &stable(MIRROR, SUITE), arch)?.unpack(&PACKAGES, &unpacked, each)?;
    cache::keep(&unpacked, folder)
}

/// Reads lines like "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)" and
/// "/lib64/ld-linux-x86-64.so.2 (0x…)".
fn parse_ldd(text: &str) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        let library = line.split_once(" => ").map_or(line, |(_, path)| path);
        if library == "not found" {
            bail!("cannot copy a library into the guest, because it is missing here: {line}");
        }
        if let Some((path, _)) = library.split_once(" (0x").filter(|(path, _)| path.starts_with('/')) {
            found.insert(path.into());
        }
    }
    Ok(found)
}

/// Returns the folders of iptables' plugins, beside its library. The plugins need no other
/// libraries than iptables.
fn plugins(libraries: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let is_xtables =
        |path: &&PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libxtables.so"));
    let library = libraries.iter().find(is_xtables).and_then(|library| library.parent());
    let places = library.into_iter().map(|folder| folder.join("xtables"));
    places.filter(|folder| folder.is_dir()).collect()
}

fn is_elf(file: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *b"\x7fELF"
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn libraries_are_read_with_the_loader_and_without_the_vdso() {
        let text = "/usr/bin/bash:\n\tlinux-vdso.so.1 (0x00007fd40555b000)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007fd40401e000)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007fd40555d000)\n/usr/bin/busybox:\n\tnot a dynamic executable\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(parse_ldd(text).unwrap(), expected.map(PathBuf::from).into());
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = parse_ldd("\tlibnone.so.1 => not found\n").unwrap_err().to_string();
        assert!(error.contains("libnone.so.1"), "{error}");
    }

    #[test]
    fn program_of_packages_is_never_one_of_this_machine() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("sbin")).unwrap();
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        symlink("/bin/sh", root.path().join("usr/bin/ip")).unwrap();
        let userland = Userland::Unpacked(root.path().into());
        assert_eq!(userland.program("ip"), None);
        fs::write(root.path().join("sbin/ip"), "").unwrap();
        assert_eq!(userland.program("ip"), Some(root.path().join("sbin/ip")));
        assert!(userland.tools().unwrap_err().to_string().contains("apparmor_parser"));
    }

    #[test]
    fn file_of_packages_has_its_path_below_their_folder() {
        let userland = Userland::Unpacked("/cache/packages".into());
        assert_eq!(userland.place(Path::new("/cache/packages/lib/x.so")), Path::new("/lib/x.so"));
        assert_eq!(Userland::Host.place(Path::new("/lib/x.so")), Path::new("/lib/x.so"));
    }
}
