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

    /// An existing directory; none where there is nothing.
    pub fn existing(path: &Path) -> Option<Self> {
        path.is_dir().then(|| Self { path: path.into() })
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
    pub fn discard_beside(&self) -> Result<(), KernelError> {
        remove_tree(&self.beside()).into_iter().next().map_or(Ok(()), Err)
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
        remove_tree(other).into_iter().next().map_or(Ok(()), Err)
    }

    /// Removes every pin and the directory; returns all that failed.
    pub fn remove_all(&self) -> Vec<KernelError> {
        // Links first: programs stop before what they read goes.
        let mut errors = remove_tree(&self.path.join("links"));
        errors.extend(remove_tree(&self.path));
        errors.extend(remove_tree(&self.beside()));
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

/// Removes a directory with all that is in it, going on past errors. One that is not there is no error.
fn remove_tree(path: &Path) -> Vec<KernelError> {
    let mut errors = Vec::new();
    match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return errors,
        Err(error) => return vec![KernelError::path("list", path)(error)],
        Ok(entries) => {
            for entry in entries.flatten() {
                let path = entry.path();
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    errors.extend(remove_tree(&path));
                } else if let Err(error) = fs::remove_file(&path) {
                    errors.push(KernelError::path("remove", path)(error));
                }
            }
        }
    }
    if let Err(error) = fs::remove_dir(path) {
        errors.push(KernelError::path("remove", path)(error));
    }
    errors
}
