//! The file system of a guest: tools, the requested files, and the init process.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::archive::Archive;
use super::userland::Userland;
use crate::cli::release::Target;

/// The text before the exit code in the last line of a guest's output.
pub(crate) const MARKER: &str = "shunt-vm: exit";

pub(crate) const XTABLES_NFT: &str = "xtables-nft-multi";
pub(crate) const XTABLES_LEGACY: &str = "xtables-legacy-multi";
/// Programs whose behaviour depends on the name by which they are called.
const FAMILIES: [&str; 2] = ["iptables", "ip6tables"];
const ACTIONS: [&str; 3] = ["", "-save", "-restore"];
const OTHER_NAMES: [(&str, &str); 3] =
    [("/bin/sh", "bash"), ("/sbin/modprobe", "../bin/kmod"), ("/bin/lsmod", "kmod")];

/// Folders on which the init process mounts something, which hides copied files.
const MOUNTED: [&str; 4] = ["/dev", "/proc", "/run", "/sys"];

const INIT: &str = include_str!("init");

/// The command of a guest and its files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guest {
    /// The program and its arguments. A path is copied into the guest; a name is looked up there.
    pub(crate) command: Vec<OsString>,
    /// Files and folders to copy to the same paths.
    pub(crate) copies: Vec<PathBuf>,
    /// The architecture of the command.
    pub(crate) arch: Target,
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

    /// Writes the file system, with programs of this source. The command writes its output to the
    /// serial port `output`.
    pub(crate) fn write(&self, path: &Path, userland: &Userland, output: &str) -> Result<()> {
        let tools = userland.tools()?;
        let mut files: Vec<PathBuf> = tools.iter().map(|(_, file)| file.clone()).collect();
        let copies = self.files()?;
        files.extend_from_slice(&copies);
        let mut archive = Archive::create(path)?;
        archive.merged_folders()?;
        for (name, file) in &tools {
            archive.copy(&Path::new("/usr/sbin").join(name), file)?;
        }
        other_names(&mut archive)?;
        for file in &copies {
            archive.copy(file, file)?;
        }
        for (library, at) in userland.libraries(&files)? {
            archive.copy(&at, &library)?;
        }
        self.write_command(&mut archive, output)?;
        archive.finish()
    }

    fn write_command(&self, archive: &mut Archive, output: &str) -> Result<()> {
        let mut words = Vec::new();
        for word in &self.command {
            words.extend_from_slice(word.as_bytes());
            words.push(0);
        }
        let environment = self.environment.iter().map(|(name, value)| format!("export {name}={value}\n"));
        let environment: String =
            environment.chain([format!("MARKER='{MARKER}'\nOUTPUT=/dev/{output}\n")]).collect();
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
            let hidden = MOUNTED.iter().find(|folder| file.starts_with(folder));
            if let Some(folder) = hidden {
                bail!(
                    "{} cannot be copied into the guest, which mounts something on {folder}",
                    file.display()
                );
            }
            Ok(file)
        };
        files.map(absolute).collect()
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_copied_if_given_by_path() {
        let guest = |program: &str| Guest::new(vec![program.into(), "/bin/no-file".into()]).unwrap();
        assert_eq!(guest("/bin/sh").files().unwrap(), [PathBuf::from("/bin/sh")]);
        assert_eq!(guest("ip").files().unwrap(), Vec::<PathBuf>::new());
        let error = guest("./no-such-program").files().unwrap_err().to_string();
        assert!(error.contains("no-such-program"), "{error}");
    }

    #[test]
    fn only_folders_that_hide_no_copied_files_are_mounted() {
        let points: Vec<&str> =
            INIT.lines().filter_map(|line| line.strip_prefix("mount -t ")?.split(' ').nth(2)).collect();
        assert!(points.contains(&"/run"), "{points:?}");
        for point in points {
            assert!(MOUNTED.iter().any(|folder| Path::new(point).starts_with(folder)), "{point}");
        }
    }

    #[test]
    fn file_that_the_guest_would_not_see_is_refused() {
        let guest = Guest { copies: vec!["/proc/version".into()], ..Guest::default() };
        let error = guest.files().unwrap_err().to_string();
        assert!(error.contains("/proc/version") && error.contains("on /proc"), "{error}");
    }

    #[test]
    fn init_process_ends_with_the_marker() {
        assert!(INIT.contains("$MARKER $?") && INIT.starts_with("#!/bin/bash"));
    }
}
