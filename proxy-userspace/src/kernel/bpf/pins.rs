//! The directory of pins on bpffs: maps and links that outlive the process.

use std::{
    fs::{self, File},
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{Pod, maps::MapInfo};

use super::{
    super::KernelError,
    MapSpec, MappedWords, Reader,
    bpffs::{ensure_bpffs, is_bpffs},
    directory_lock::lock,
    private_directory, syscall,
};

/// The default directory of pins.
pub const DEFAULT_PIN_DIR: &str = "/sys/fs/bpf/shunt";

/// A directory of pins. Maps are pinned under their names, links below `links/`.
///
/// Two more directories may exist, whose names have a suffix:
///
/// - `-next` has maps that will replace the pinned ones, while they are filled. A process that
///   finds it at start removes it.
/// - `-swap` is the same directory after programs were attached that use its maps. A process that
///   finds it at start moves its pins into the main directory, because these maps are in use.
#[derive(Debug)]
pub struct PinDir {
    path: PathBuf,
    /// Locked while it is open. Two processes that write the same maps would assign identifiers
    /// independently.
    lock: Option<File>,
}

impl PinDir {
    /// Creates the directory and locks it. If it is below /sys/fs/bpf and no bpffs is mounted
    /// there, mounts one, unless it would not outlive the container. If a security module denies
    /// that, the error names it. A directory that other users can change is an error.
    pub fn create(path: &Path) -> Result<Self, KernelError> {
        Self::try_create(path).map_err(KernelError::explained)
    }

    fn try_create(path: &Path) -> Result<Self, KernelError> {
        ensure_bpffs(path)?;
        let directory = private_directory::create(path)?;
        private_directory::create(&path.join("links"))?;
        Ok(Self { path: path.into(), lock: Some(lock(path, directory)?) })
    }

    /// Creates the directory again if it was removed.
    pub fn restore(&mut self) -> Result<(), KernelError> {
        if !self.path.join("links").is_dir() {
            // If this fails, the lock must stay: the directory may be back in a moment.
            ensure_bpffs(&self.path).map_err(KernelError::explained)?;
            // The locked directory may be gone. If it is not, its lock would block the new one.
            self.lock = None;
            *self = Self::create(&self.path)?;
        }
        Ok(())
    }

    /// Opens an existing directory without a lock. Returns `None` if it does not exist. A directory
    /// that is not on bpffs, or that other users can change, is an error.
    pub fn existing(path: &Path) -> Result<Option<Self>, KernelError> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(KernelError::path("open directory", path)(error)),
            Ok(_) if is_bpffs(path) => {
                private_directory::open(path)?;
                Ok(Some(Self { path: path.into(), lock: None }))
            }
            Ok(_) => Err(KernelError::NoBpffs(path.into())),
        }
    }

    /// Opens an existing directory and locks it, so that no other process changes it meanwhile.
    /// Fails as [`Self::existing`] does, or if another process has the lock.
    pub fn lock_existing(path: &Path) -> Result<Option<Self>, KernelError> {
        let Some(existing) = Self::existing(path)? else { return Ok(None) };
        let lock = lock(path, private_directory::open(path)?)?;
        Ok(Some(Self { lock: Some(lock), ..existing }))
    }

    /// Returns the same directory without a lock, to read it.
    pub fn unlocked(&self) -> Self {
        Self { path: self.path.clone(), lock: None }
    }

    /// Returns the directories that an interrupted replacement of maps left.
    pub fn unfinished(path: &Path) -> Vec<PathBuf> {
        let suffixed = ["-next", "-swap"].map(|suffix| suffixed(path, suffix));
        suffixed.into_iter().filter(|path| path.symlink_metadata().is_ok()).collect()
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path where the link of a program is pinned.
    pub fn link(&self, program: &str) -> PathBuf {
        self.path.join("links").join(program)
    }

    fn open_map(&self, name: &str) -> Result<OwnedFd, KernelError> {
        let path = self.path.join(name);
        syscall::open_pin(&path).map_err(KernelError::path("open map", path))
    }

    fn next(&self) -> PathBuf {
        suffixed(&self.path, "-next")
    }

    fn swap(&self) -> PathBuf {
        suffixed(&self.path, "-swap")
    }

    /// Creates the directory for maps that will replace the pinned ones.
    pub fn create_next(&self) -> Result<PathBuf, KernelError> {
        let path = self.next();
        private_directory::create_new(&path)?;
        Ok(path)
    }

    /// Pins a map in another directory too, if it is pinned here and matches the specification.
    pub fn share(&self, map: &MapSpec, directory: &Path) -> Result<(), KernelError> {
        if !MapInfo::from_pin(self.path.join(map.name)).is_ok_and(|info| map.matches(&info)) {
            return Ok(());
        }
        let opened = self.open_map(map.name)?;
        let copy = directory.join(map.name);
        syscall::pin(opened.as_fd(), &copy).map_err(KernelError::path("pin map", copy))
    }

    /// Maps a pinned array of 64-bit words into memory.
    pub fn mapped(&self, name: &'static str, words: u32) -> Result<MappedWords, KernelError> {
        MappedWords::new(self.open_map(name)?, words).map_err(KernelError::call("map into memory", name))
    }

    /// Returns a reader of a pinned map, if only its number of entries differs from the
    /// specification.
    pub fn reader_of_other_size<K: Pod, V: Pod>(
        &self,
        map: &MapSpec,
    ) -> Result<Option<Reader<K, V>>, KernelError> {
        if !MapInfo::from_pin(self.path.join(map.name)).is_ok_and(|info| map.differs_in_size(&info)) {
            return Ok(None);
        }
        Ok(Some(Reader::new(self.open_map(map.name)?)))
    }

    /// Completes or discards the replacement of maps by a process that ended meanwhile. Programs
    /// keep discarded maps until the programs are replaced.
    pub fn recover(&self) -> Result<(), KernelError> {
        self.finish_swap()?;
        if self.next().symlink_metadata().is_ok() {
            private_directory::open(&self.next())?;
        }
        remove_pins(&self.next(), |_| true).into_iter().next().map_or(Ok(()), Err)
    }

    /// Replaces the pinned maps by those in `-next`. It can be called again after an error.
    /// Otherwise the next process completes it.
    pub fn take_next(&self) -> Result<(), KernelError> {
        let (next, swap) = (self.next(), self.swap());
        match fs::rename(&next, swap) {
            // An earlier call renamed it already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(KernelError::path("rename directory", next))?,
        }
        self.finish_swap()
    }

    fn finish_swap(&self) -> Result<(), KernelError> {
        let swap = self.swap();
        if swap.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(());
        }
        private_directory::open(&swap)?;
        for entry in fs::read_dir(&swap).map_err(KernelError::path("list", &swap))? {
            let entry = entry.map_err(KernelError::path("list", &swap))?;
            let from = entry.path();
            fs::rename(&from, self.path.join(entry.file_name()))
                .map_err(KernelError::path("move pin", from))?;
        }
        fs::remove_dir(&swap).map_err(KernelError::path("remove", swap))
    }

    /// Removes the pins of the links with these names.
    pub fn remove_links(&self, is_removed: impl Fn(&str) -> bool) -> Result<(), KernelError> {
        remove_entries(&self.path.join("links"), is_removed).into_iter().next().map_or(Ok(()), Err)
    }

    /// Adds a mark to the pins of links: an empty directory. It is no error if it exists.
    pub fn mark(&self, name: &str) -> Result<(), KernelError> {
        let mark = self.link(name);
        match fs::create_dir(&mark) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(KernelError::path("create", mark)(error))
            }
            _ => Ok(()),
        }
    }

    /// Removes a mark.
    pub fn unmark(&self, name: &str) -> Result<(), KernelError> {
        let mark = self.link(name);
        fs::remove_dir(&mark).map_err(KernelError::path("remove", mark))
    }

    /// Returns the names of the marks, and those under which links are pinned.
    pub fn link_names(&self) -> Result<Vec<String>, KernelError> {
        let links = self.path.join("links");
        let entries = match fs::read_dir(&links) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(KernelError::path("list", links))?,
        };
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    /// Checks that all these maps are pinned here and match their specification. The error
    /// describes the first map that does not.
    pub fn holds(&self, maps: &[MapSpec]) -> Result<(), String> {
        for map in maps {
            let info = MapInfo::from_pin(self.path.join(map.name))
                .map_err(|_| format!("map {} is not pinned", map.name))?;
            if !map.matches(&info) {
                return Err(format!(
                    "map {} has {} entries of {}+{} bytes, and the specification is {} of {}+{}",
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

    /// Returns the ids of the maps that are pinned here.
    pub fn map_ids(&self) -> Vec<u32> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some(MapInfo::from_pin(entry.path()).ok()?.id())).collect()
    }

    /// Returns true if a map with one of these names is pinned here.
    pub fn holds_any(&self, mut names: impl Iterator<Item = &'static str>) -> bool {
        names.any(|name| self.path.join(name).exists())
    }

    /// Removes the pins of our maps and of all links with this prefix, and the directories if
    /// nothing else is in them. Returns all errors. Pins of other owners stay.
    pub fn remove_all(&self, is_map: impl Fn(&str) -> bool, links: &str) -> Vec<KernelError> {
        // Links first: programs must stop before their maps are removed.
        let mut errors = remove_pins(&self.path.join("links"), |name| name.starts_with(links));
        for directory in [self.path.clone(), self.next(), self.swap()] {
            errors.extend(remove_pins(&directory, &is_map));
        }
        errors
    }
}

/// Returns a reader of a map that is pinned in a directory, for who only reads. Its keys and values
/// must have the sizes of these types.
pub fn pinned_reader<K: Pod, V: Pod>(directory: &Path, map: &str) -> Result<Reader<K, V>, KernelError> {
    let path = directory.join(map);
    let sizes = MapInfo::from_pin(&path).map_err(KernelError::bpf("open map", path.display().to_string()))?;
    if (sizes.key_size() as usize, sizes.value_size() as usize) != (size_of::<K>(), size_of::<V>()) {
        let error = io::Error::new(io::ErrorKind::InvalidData, "another version of shunt made it");
        return Err(KernelError::path("read map", path)(error));
    }
    syscall::open_pin(&path).map(Reader::new).map_err(KernelError::path("open map", path))
}

/// Returns the first words, in host byte order, of the first value of a pinned array. The values
/// may have any size.
pub fn first_words<const N: usize>(path: &Path) -> Result<[u32; N], KernelError> {
    let failed = || KernelError::path("read map", path);
    let size = MapInfo::from_pin(path).map_err(|error| failed()(io::Error::other(error)))?.value_size();
    let map = syscall::open_pin(path).map_err(failed())?;
    let mut value = vec![0; size as usize];
    syscall::lookup_first(map.as_fd(), &mut value).map_err(failed())?;
    let words: Vec<u32> = value.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
    words.first_chunk().copied().ok_or_else(|| failed()(io::ErrorKind::UnexpectedEof.into()))
}

/// Returns the path with a suffix. bpffs refuses names with a dot.
pub(super) fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Checks that no other user can change an existing pin directory.
pub(in crate::kernel) fn check_pin_directory(path: &Path) -> Result<(), KernelError> {
    private_directory::open(path).map(drop)
}

/// Does in a directory on bpffs what a [`PinDir`] needs: creates a directory in it, pins a map, and
/// locks the new directory. Removes everything again. If a security module denies that, the error
/// names it.
pub(in crate::kernel) fn try_pin(directory: &Path) -> Result<(), KernelError> {
    let name = format!("shunt-probe-{:016x}", RandomState::new().build_hasher().finish());
    let (trial, pin) = (directory.join(&name), directory.join(name).join("map"));
    let tried = fs::create_dir(&trial)
        .and_then(|()| syscall::create_array())
        .and_then(|map| syscall::pin(map.as_fd(), &pin))
        .and_then(|()| File::open(&trial)?.lock())
        .and_then(|()| fs::remove_file(&pin));
    if tried.is_err() {
        // It exists if locking or removing it failed.
        let _ = fs::remove_file(&pin);
    }
    let removed = fs::remove_dir(&trial);
    tried.and(removed).map_err(|error| KernelError::path("pin maps in", directory)(error).explained())
}

/// Removes our pins from a directory, and the directory if nothing else is in it. Continues after
/// errors. It is no error if the directory does not exist.
fn remove_pins(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Vec<KernelError> {
    let mut errors = remove_entries(directory, is_ours);
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && errors.is_empty() => {
            tracing::info!(path = %directory.display(), "keeping this directory: it contains files that do not belong to shunt");
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            errors.push(KernelError::path("remove", directory)(error));
        }
        _ => {}
    }
    errors
}

/// Removes the pins with these names from a directory. Continues after errors.
fn remove_entries(directory: &Path, is_removed: impl Fn(&str) -> bool) -> Vec<KernelError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![KernelError::path("list", directory)(error)],
        Ok(entries) => entries.flatten(),
    };
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&is_removed))
        .filter_map(|entry| {
            fs::remove_file(entry.path()).err().map(KernelError::path("remove", entry.path()))
        })
        .collect()
}
