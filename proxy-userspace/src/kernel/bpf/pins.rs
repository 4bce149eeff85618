//! The directory on bpffs that holds what outlives the process.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::{Pod, maps::MapInfo};
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{super::KernelError, MapSpec, MappedWords, Reader, syscall};

/// Where distributions and container runtimes mount bpffs.
pub(in crate::kernel) const BPFFS: &str = "/sys/fs/bpf";

/// A directory of pins: maps by their names, links below `links/`.
///
/// Two more stand beside it at times. `-next` holds maps that shall take the place of those here, while they are filled: a
/// process that finds it there throws it away. `-swap` is the same directory once programs run with its maps: a process that
/// finds it there moves what is left of it here, since these maps and not those here are in use.
#[derive(Debug)]
pub struct PinDir {
    path: PathBuf,
    /// Locked as long as it is open. Two processes that write the same maps would number Services independently.
    lock: Option<File>,
}

impl PinDir {
    /// Makes the directory, and locks it against other processes. Where it is to be below /sys/fs/bpf and that is no bpffs, one is
    /// mounted there.
    pub fn create(path: &Path) -> Result<Self, KernelError> {
        ensure_bpffs(path)?;
        let links = path.join("links");
        fs::create_dir_all(&links).map_err(KernelError::path("create directory", links))?;
        let lock = File::open(path).map_err(KernelError::path("open directory", path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.into(), lock: Some(lock) }),
            Err(TryLockError::WouldBlock) => Err(KernelError::PinsInUse { path: path.into() }),
            Err(TryLockError::Error(error)) => Err(KernelError::path("lock directory", path)(error)),
        }
    }

    /// Makes the directory again if someone removed it.
    pub fn restore(&mut self) -> Result<(), KernelError> {
        if !self.path.join("links").is_dir() {
            // What is there may be back in a moment, and then is to be locked as it was.
            ensure_bpffs(&self.path)?;
            // What is locked may be gone, or else be in our own way.
            self.lock = None;
            *self = Self::create(&self.path)?;
        }
        Ok(())
    }

    /// An existing directory; none where there is nothing. One that is on no bpf filesystem is none of ours.
    pub fn existing(path: &Path) -> Result<Option<Self>, KernelError> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ if is_bpffs(path) => Ok(Some(Self { path: path.into(), lock: None })),
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

    fn next(&self) -> PathBuf {
        suffixed(&self.path, "-next")
    }

    fn swap(&self) -> PathBuf {
        suffixed(&self.path, "-swap")
    }

    /// Makes the directory in which maps are built that shall take the place of those here.
    pub fn create_next(&self) -> Result<PathBuf, KernelError> {
        let path = self.next();
        fs::create_dir(&path).map_err(KernelError::path("create directory", &path))?;
        Ok(path)
    }

    /// Pins a map in another directory too, if it is pinned here and is as asked for.
    pub fn share(&self, map: &MapSpec, directory: &Path) -> Result<(), KernelError> {
        let path = self.path.join(map.name);
        if !MapInfo::from_pin(&path).is_ok_and(|info| map.matches(&info)) {
            return Ok(());
        }
        let opened = syscall::open_pin(&path).map_err(KernelError::path("open map", path))?;
        let beside = directory.join(map.name);
        syscall::pin(opened.as_fd(), &beside).map_err(KernelError::path("pin map", beside))
    }

    /// A pinned array of so many words as memory.
    pub fn mapped(&self, name: &'static str, words: u32) -> Result<MappedWords, KernelError> {
        let path = self.path.join(name);
        let opened = syscall::open_pin(&path).map_err(KernelError::path("open map", path))?;
        MappedWords::new(opened, words).map_err(KernelError::call("map into memory", name))
    }

    /// Reads a map that is pinned here, if all but its capacity is as asked for.
    pub fn reader_of_other_size<K: Pod, V: Pod>(
        &self,
        map: &MapSpec,
    ) -> Result<Option<Reader<K, V>>, KernelError> {
        let path = self.path.join(map.name);
        if !MapInfo::from_pin(&path).is_ok_and(|info| map.differs_in_size(&info)) {
            return Ok(None);
        }
        let opened = syscall::open_pin(&path).map_err(KernelError::path("open map", path))?;
        Ok(Some(Reader::new(opened)))
    }

    /// Puts right what a process left that ended while it replaced the maps. Programs that run with maps that are thrown away
    /// keep them until they are replaced.
    pub fn recover(&self) -> Result<(), KernelError> {
        self.finish_swap()?;
        remove_pins(&self.next(), |_| true).into_iter().next().map_or(Ok(()), Err)
    }

    /// Puts the maps that were built in `-next` in the place of those here. May be tried again after an error, and is finished
    /// by the next process otherwise.
    pub fn take_next(&self) -> Result<(), KernelError> {
        let (next, swap) = (self.next(), self.swap());
        match fs::rename(&next, swap) {
            // An earlier try came further.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(KernelError::path("rename directory", next))?,
        }
        self.finish_swap()
    }

    fn finish_swap(&self) -> Result<(), KernelError> {
        let swap = self.swap();
        let entries = match fs::read_dir(&swap) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(KernelError::path("list", &swap))?,
        };
        for entry in entries {
            let entry = entry.map_err(KernelError::path("list", &swap))?;
            let from = entry.path();
            fs::rename(&from, self.path.join(entry.file_name()))
                .map_err(KernelError::path("move pin", from))?;
        }
        fs::remove_dir(&swap).map_err(KernelError::path("remove", swap))
    }

    /// Removes the pins of those links that are meant.
    pub fn remove_links(&self, is_meant: impl Fn(&str) -> bool) -> Result<(), KernelError> {
        remove_entries(&self.path.join("links"), is_meant).into_iter().next().map_or(Ok(()), Err)
    }

    /// The names under which links are pinned.
    pub fn link_names(&self) -> Result<Vec<String>, KernelError> {
        let links = self.path.join("links");
        let entries = match fs::read_dir(&links) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(KernelError::path("list", links))?,
        };
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
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

    /// Removes the pins of our maps and of all links with this prefix, and the directories if nothing else
    /// is in them. Returns all errors. Pins of other owners stay.
    pub fn remove_all(&self, is_map: impl Fn(&str) -> bool, links: &str) -> Vec<KernelError> {
        // Links first: programs must stop before their maps are removed.
        let mut errors = remove_pins(&self.path.join("links"), |name| name.starts_with(links));
        for directory in [self.path.clone(), self.next(), self.swap()] {
            errors.extend(remove_pins(&directory, &is_map));
        }
        errors
    }
}

/// The first words, in host byte order, of the first value of the array that is pinned at a path, however large its values are.
pub fn first_words<const N: usize>(path: &Path) -> Result<[u32; N], KernelError> {
    let failed = || KernelError::path("read map", path);
    let size = MapInfo::from_pin(path).map_err(|error| failed()(io::Error::other(error)))?.value_size();
    let map = syscall::open_pin(path).map_err(failed())?;
    let mut value = vec![0; size as usize];
    syscall::lookup_first(map.as_fd(), &mut value).map_err(failed())?;
    let words: Vec<u32> = value.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
    words.first_chunk().copied().ok_or_else(|| failed()(io::ErrorKind::UnexpectedEof.into()))
}

/// A path beside another. bpffs refuses names with a dot.
pub(super) fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether this is a directory or file of a bpf filesystem.
pub(in crate::kernel) fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

/// Pins can be made in this directory, which need not be there yet; a bpffs that is missing at its usual place is mounted.
fn ensure_bpffs(path: &Path) -> Result<(), KernelError> {
    if path.starts_with(BPFFS) && !is_bpffs(Path::new(BPFFS)) && Path::new(BPFFS).is_dir() {
        mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
            .map_err(|e| KernelError::path("mount bpf filesystem on", BPFFS)(e.into()))?;
        tracing::info!(path = BPFFS, "mounted a bpf filesystem: there was none");
    }
    let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    if is_bpffs(existing) { Ok(()) } else { Err(KernelError::NoBpffs { path: path.into() }) }
}

/// Removes those pins of a directory that are ours, going on past errors, and the directory if nothing is left in it. One that
/// is not there is no error.
fn remove_pins(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Vec<KernelError> {
    let mut errors = remove_entries(directory, is_ours);
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && errors.is_empty() => {
            tracing::info!(path = %directory.display(), "left as it is: it holds what shunt did not put there");
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            errors.push(KernelError::path("remove", directory)(error));
        }
        _ => {}
    }
    errors
}

/// Removes those pins of a directory whose names are of that kind, going on past errors.
fn remove_entries(directory: &Path, is_meant: impl Fn(&str) -> bool) -> Vec<KernelError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![KernelError::path("list", directory)(error)],
        Ok(entries) => entries.flatten(),
    };
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&is_meant))
        .filter_map(|entry| {
            fs::remove_file(entry.path()).err().map(KernelError::path("remove", entry.path()))
        })
        .collect()
}
