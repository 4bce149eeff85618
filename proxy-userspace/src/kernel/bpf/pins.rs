//! The directory on bpffs that holds what outlives the process.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::maps::MapInfo;
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{super::KernelError, MapSpec};

/// Where distributions and container runtimes mount bpffs.
const BPFFS: &str = "/sys/fs/bpf";

/// A directory of pins: maps by their names, links below `links/`.
#[derive(Clone, Debug)]
pub struct PinDir {
    path: PathBuf,
}

impl PinDir {
    /// Makes the directory. Where it is to be below /sys/fs/bpf and nothing is mounted there, bpffs is.
    pub fn create(path: &Path) -> Result<Self, KernelError> {
        if path.starts_with(BPFFS) && !is_bpffs(Path::new(BPFFS)) && Path::new(BPFFS).is_dir() {
            mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
                .map_err(|e| KernelError::path("mount bpf filesystem on", BPFFS)(e.into()))?;
            tracing::info!(path = BPFFS, "mounted a bpf filesystem: there was none");
        }
        let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
        if !is_bpffs(existing) {
            return Err(KernelError::NoBpffs { path: path.into() });
        }
        let links = path.join("links");
        fs::create_dir_all(&links).map_err(KernelError::path("create directory", links))?;
        Ok(Self { path: path.into() })
    }

    /// An existing directory; none where there is nothing. One that is on no bpf filesystem is none of ours.
    pub fn existing(path: &Path) -> Result<Option<Self>, KernelError> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ if is_bpffs(path) => Ok(Some(Self { path: path.into() })),
            _ => Err(KernelError::NoBpffs { path: path.into() }),
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the link of a program is pinned.
    pub fn link(&self, program: &str) -> PathBuf {
        self.path.join("links").join(program)
    }

    /// The directory in which a set of maps is built that shall replace this one's.
    fn beside(&self) -> PathBuf {
        suffixed(&self.path, "-next")
    }

    /// Makes that directory.
    pub fn create_beside(&self) -> Result<PathBuf, KernelError> {
        let path = self.beside();
        fs::create_dir(&path).map_err(KernelError::path("create directory", &path))?;
        Ok(path)
    }

    /// Removes what a process left there that ended before it was done. Programs that run with those maps keep them.
    pub fn discard_beside(&self, maps: &[MapSpec]) -> Result<(), KernelError> {
        remove_pins(&self.beside(), is_one_of(maps)).into_iter().next().map_or(Ok(()), Err)
    }

    /// Whether all these maps are pinned here, with the layout and capacity asked for; the first that is not, by name and
    /// reason.
    pub fn holds(&self, maps: &[MapSpec]) -> Result<(), String> {
        for map in maps {
            let info = MapInfo::from_pin(self.path.join(map.name))
                .map_err(|_| format!("map {} is not pinned", map.name))?;
            if !map.matches(&info) {
                return Err(format!(
                    "map {} has {} entries of {}+{} bytes, and {} of {}+{} are asked for",
                    map.name,
                    info.max_entries(),
                    info.key_size(),
                    info.value_size(),
                    map.max_entries,
                    map.key_size,
                    map.value_size
                ));
            }
        }
        Ok(())
    }

    /// Whether any of these maps is pinned here.
    pub fn holds_any(&self, maps: &[MapSpec]) -> bool {
        maps.iter().any(|map| self.path.join(map.name).exists())
    }

    /// Moves these maps' pins from another directory to here, over those that are here, and removes that directory.
    pub fn take_from(&self, other: &Path, maps: &[MapSpec]) -> Result<(), KernelError> {
        for map in maps {
            let (from, to) = (other.join(map.name), self.path.join(map.name));
            fs::rename(&from, to).map_err(KernelError::path("move pin", from))?;
        }
        remove_pins(other, is_one_of(maps)).into_iter().next().map_or(Ok(()), Err)
    }

    /// Removes the pins of these maps and of all links whose names start so, and the directories if that leaves nothing in
    /// them; returns all that failed. What others pinned there stays.
    pub fn remove_all(&self, maps: &[MapSpec], links: &str) -> Vec<KernelError> {
        // Links first: programs stop before what they read goes.
        let mut errors = remove_pins(&self.path.join("links"), |name| name.starts_with(links));
        errors.extend(remove_pins(&self.path, is_one_of(maps)));
        errors.extend(remove_pins(&self.beside(), is_one_of(maps)));
        errors
    }
}

/// A path beside another. bpffs refuses names with a dot.
pub(super) fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

fn is_one_of(maps: &[MapSpec]) -> impl Fn(&str) -> bool {
    |name| maps.iter().any(|map| map.name == name)
}

/// Removes those pins of a directory that are ours, going on past errors, and the directory if nothing is left in it. One that
/// is not there is no error.
fn remove_pins(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Vec<KernelError> {
    let mut errors = Vec::new();
    match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return errors,
        Err(error) => return vec![KernelError::path("list", directory)(error)],
        Ok(entries) => {
            let ours = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(&is_ours));
            for path in ours.map(|entry| entry.path()) {
                if let Err(error) = fs::remove_file(&path) {
                    errors.push(KernelError::path("remove", path)(error));
                }
            }
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && errors.is_empty() => {
            tracing::info!(path = %directory.display(), "left as it is: it holds what shunt did not put there");
        }
        Err(error) => errors.push(KernelError::path("remove", directory)(error)),
        Ok(()) => {}
    }
    errors
}
