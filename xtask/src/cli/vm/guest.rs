//! The file system of a guest: tools of this machine, the requested files, and the init process.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use xtask::run::Run;
use xtask::search;

use super::archive::Archive;

/// The text before the exit code in the last line of a guest's output.
pub(crate) const MARKER: &str = "shunt-vm: exit";

/// Programs of this machine that every guest gets. Setup installs them.
const TOOLS: [&str; 12] = [
    "apparmor_parser",
    "bash",
    "busybox",
    "ip",
    "ipset",
    "kmod",
    "nft",
    "setpriv",
    "ss",
    "tc",
    XTABLES_NFT,
    XTABLES_LEGACY,
];
/// Programs that a guest gets if this machine has them.
const MORE_TOOLS: [&str; 6] = ["bpftool", "conntrack", "ethtool", "ipvsadm", "strace", "tcpdump"];
const XTABLES_NFT: &str = "xtables-nft-multi";
const XTABLES_LEGACY: &str = "xtables-legacy-multi";
/// Programs whose behaviour depends on the name by which they are called.
const FAMILIES: [&str; 2] = ["iptables", "ip6tables"];
const ACTIONS: [&str; 3] = ["", "-save", "-restore"];
const OTHER_NAMES: [(&str, &str); 3] =
    [("/bin/sh", "bash"), ("/sbin/modprobe", "../bin/kmod"), ("/bin/lsmod", "kmod")];

const INIT: &str = include_str!("init");

/// The command of a guest and its files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guest {
    /// The program and its arguments. A path is copied into the guest; a name is looked up there.
    pub(crate) command: Vec<OsString>,
    /// Files and folders to copy to the same paths.
    pub(crate) copies: Vec<PathBuf>,
    /// Environment variables of the command.
    pub(crate) environment: Vec<(&'static str, &'static str)>,
    /// The working folder: the path of the current folder. It contains only copied files.
    pub(crate) folder: PathBuf,
}

impl Guest {
    /// Returns a guest that runs a command in the path of the current folder.
    pub(crate) fn new(command: Vec<OsString>) -> Result<Self> {
        let folder = std::env::current_dir().context("cannot tell the current folder")?;
        Ok(Self { command, folder, ..Self::default() })
    }

    /// Writes the file system.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let tools = tools()?;
        let mut files: Vec<PathBuf> = tools.iter().map(|(_, file)| file.clone()).collect();
        files.extend(self.files()?);
        let mut archive = Archive::create(path)?;
        archive.merged_folders()?;
        for (name, file) in &tools {
            archive.copy(&Path::new("/usr/sbin").join(name), file)?;
        }
        other_names(&mut archive)?;
        for file in self.files()? {
            archive.copy(&file, &file)?;
        }
        let libraries = libraries(&files)?;
        for library in libraries.iter().chain(&plugins(&libraries)) {
            archive.copy(library, library)?;
        }
        self.write_command(&mut archive)?;
        archive.finish()
    }

    fn write_command(&self, archive: &mut Archive) -> Result<()> {
        let mut words = Vec::new();
        for word in &self.command {
            words.extend_from_slice(word.as_bytes());
            words.push(0);
        }
        let environment = self.environment.iter().map(|(name, value)| format!("export {name}={value}\n"));
        let environment: String = environment.chain([format!("MARKER='{MARKER}'\n")]).collect();
        archive.folder(&self.folder)?;
        archive.script(Path::new("/guest/command"), &words)?;
        archive.script(Path::new("/guest/environment"), environment.as_bytes())?;
        archive.script(Path::new("/guest/folder"), self.folder.as_os_str().as_bytes())?;
        archive.script(Path::new("/init"), INIT.as_bytes())
    }

    /// Returns the absolute paths of everything that is copied.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let program = self.command.first().map(Path::new).filter(|program| program.components().count() > 1);
        let files = self.copies.iter().map(PathBuf::as_path).chain(program);
        let absolute = |file: &Path| {
            let file = self.folder.join(file);
            ensure!(file.exists(), "there is no {} to copy into the guest", file.display());
            Ok(file)
        };
        files.map(absolute).collect()
    }
}

/// Returns the tools with their names and files.
fn tools() -> Result<Vec<(&'static str, PathBuf)>> {
    let find = |name| search::program(name).and_then(|path| path.canonicalize().ok());
    let mut found = Vec::new();
    for name in TOOLS {
        let file = find(name).with_context(|| {
            format!("{name} is missing, and guests need it: run `cargo xtask vm` as root, or install it")
        })?;
        found.push((name, file));
    }
    let more = MORE_TOOLS.into_iter().filter_map(|name| Some((name, find(name)?)));
    found.extend(more.filter(|(_, file)| is_elf(file)));
    Ok(found)
}

fn other_names(archive: &mut Archive) -> Result<()> {
    for family in FAMILIES {
        for action in ACTIONS {
            for (kind, target) in [("", XTABLES_NFT), ("-nft", XTABLES_NFT), ("-legacy", XTABLES_LEGACY)] {
                let name = format!("/usr/sbin/{family}{kind}{action}");
                archive.link(Path::new(&name), Path::new(target))?;
            }
        }
    }
    // Scripts, the kernel and the init process expect them in /bin.
    for name in ["bash", "busybox", "kmod", "setpriv"] {
        archive.link(&Path::new("/usr/bin").join(name), &Path::new("../sbin").join(name))?;
    }
    OTHER_NAMES.iter().try_for_each(|(name, target)| archive.link(Path::new(name), Path::new(target)))
}

/// Returns the shared libraries of these files, and of the files in these folders.
fn libraries(files: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let elves: Vec<&PathBuf> = files.iter().filter(|file| is_elf(file)).collect();
    // ldd fails for static programs, which need no library.
    let printed = Run::new("ldd").args(&elves).watch(&mut |_| ())?.stdout;
    parse_ldd(&printed)
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
    fn program_is_copied_if_given_by_path() {
        let guest = |program: &str| Guest::new(vec![program.into(), "/bin/no-file".into()]).unwrap();
        assert_eq!(guest("/bin/sh").files().unwrap(), [PathBuf::from("/bin/sh")]);
        assert_eq!(guest("ip").files().unwrap(), Vec::<PathBuf>::new());
        let error = guest("./no-such-program").files().unwrap_err().to_string();
        assert!(error.contains("no-such-program"), "{error}");
    }

    #[test]
    fn init_process_ends_with_the_marker() {
        assert!(INIT.contains("$MARKER $?") && INIT.starts_with("#!/bin/bash"));
    }
}
