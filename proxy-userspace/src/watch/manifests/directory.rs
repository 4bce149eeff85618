//! Stores the objects of all files, decides which are in effect, and collects their changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs,
    io::{self, BufRead, Seek},
    mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::{
    documents::{self, Contents, DocumentError, Key, Object},
    file::{self, Stamp, Text, is_manifest},
    watcher::Changes,
};
use crate::model::{Delta, SharedValues, WatchEvent};

/// How long objects stay after their file is gone or empty. Editors move the old file away before
/// they write the new one, and scripts truncate a file before they append to it.
const REMOVAL_DELAY: Duration = Duration::from_millis(500);

type FileName = Arc<OsStr>;

/// The state of the directory.
#[derive(Debug, Default)]
pub(super) struct Directory {
    path: PathBuf,
    files: BTreeMap<FileName, ManifestFile>,
    /// The files that contain an object, sorted. The object of the first file is in effect. Almost
    /// all objects are in one file only.
    owners: BTreeMap<Key, SmallVec<[FileName; 1]>>,
    /// Objects that may have changed since [`Self::take_changes`], as they were then.
    touched: BTreeMap<Key, Option<Object>>,
    shared: SharedValues,
}

#[derive(Debug, Default)]
struct ManifestFile {
    objects: BTreeMap<Key, Object>,
    errors: Vec<DocumentError>,
    /// The stamp at the last read; none if there was no file.
    stamp: Option<Stamp>,
    /// Where it led, if it was a symbolic link. It stays while that file is missing.
    target: Option<PathBuf>,
    /// When the objects will be removed, because the file is gone or empty.
    removal: Option<Instant>,
    /// Objects may be missing in the file only because its writer is not done. They stay in effect.
    is_partial: bool,
}

/// Why a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// Inotify says that it is complete.
    Complete,
    /// The objects of a file that was gone or empty are to be removed.
    Removal,
    /// It differs from what was read.
    Scan,
}

impl ManifestFile {
    /// Returns where a symbolic link leads to, through all links behind it. A file that is missing
    /// there is written again.
    fn link_target(&self, path: &Path) -> Option<PathBuf> {
        let target = path.is_symlink().then(|| fs::canonicalize(path))?;
        target.ok().or_else(|| self.target.clone())
    }
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, ..Self::default() }
    }

    /// Reads the files that changed, and removes the objects of files that stay gone or empty.
    pub(super) fn update(&mut self, changes: Changes, now: Instant) -> io::Result<()> {
        let is_due = |file: &ManifestFile| file.removal.is_some_and(|removal| removal <= now);
        let due = self.files.iter().filter(|(_, file)| is_due(file)).map(|(name, _)| name.to_os_string());
        let due: BTreeSet<OsString> = due.filter(|name| !changes.files.contains(name)).collect();
        for (names, reason) in [(changes.files, Reason::Complete), (due, Reason::Removal)] {
            for name in names {
                self.read_file(&name, now, reason);
            }
        }
        if changes.all { self.scan(now) } else { Ok(()) }
    }

    /// Returns the current errors as text.
    pub(super) fn errors(&self) -> impl Iterator<Item = String> {
        self.files.iter().flat_map(|(name, file)| {
            let path = self.path.join(&**name);
            file.errors.iter().map(move |(_, error)| format!("{}: {error}", path.display()))
        })
    }

    /// Returns a list for each kind, and forgets all changes. There is no list of ServiceCIDRs if
    /// the directory has none, like most directories.
    pub(super) fn list(&mut self) -> Vec<WatchEvent> {
        self.touched.clear();
        let (mut cidrs, mut nodes, mut slices, mut services) = (vec![], vec![], vec![], vec![]);
        for object in self.owners.keys().filter_map(|key| self.object(key)) {
            match WatchEvent::clone(object) {
                WatchEvent::ServiceCidrs(Delta::Apply(object)) => cidrs.push(object),
                WatchEvent::Nodes(Delta::Apply(object)) => nodes.push(object),
                WatchEvent::EndpointSlices(Delta::Apply(object)) => slices.push(object),
                WatchEvent::Services(Delta::Apply(object)) => services.push(object),
                _ => {}
            }
        }
        let cidrs = (!cidrs.is_empty()).then_some(WatchEvent::ServiceCidrs(Delta::Replace(cidrs)));
        let lists = [
            WatchEvent::Nodes(Delta::Replace(nodes)),
            WatchEvent::EndpointSlices(Delta::Replace(slices)),
            WatchEvent::Services(Delta::Replace(services)),
        ];
        cidrs.into_iter().chain(lists).collect()
    }

    /// Returns what changed since the last call: endpoints before the Services that need them,
    /// deletions last.
    pub(super) fn take_changes(&mut self) -> Vec<WatchEvent> {
        let mut events = Vec::new();
        for (key, before) in mem::take(&mut self.touched) {
            let object = self.object(&key);
            if object != before.as_ref() {
                events.push(object.map_or_else(|| key.deletion(), |object| WatchEvent::clone(object)));
            }
        }
        events.sort_by_key(|event| match event {
            WatchEvent::Services(Delta::Delete(_)) => 3,
            WatchEvent::EndpointSlices(Delta::Delete(_)) => 4,
            WatchEvent::Nodes(Delta::Delete(_)) | WatchEvent::ServiceCidrs(Delta::Delete(_)) => 5,
            WatchEvent::Nodes(_) | WatchEvent::ServiceCidrs(_) => 0,
            WatchEvent::EndpointSlices(_) | WatchEvent::EndpointSlicePart(_) => 1,
            WatchEvent::Services(_) | WatchEvent::ServicePart(_) => 2,
        });
        events
    }

    /// Returns the object that is in effect.
    fn object(&self, key: &Key) -> Option<&Object> {
        let owner = self.owners.get(key)?.first()?;
        self.files.get(owner)?.objects.get(key)
    }

    /// Reads all files that changed since they were read.
    fn scan(&mut self, now: Instant) -> io::Result<()> {
        let mut names: BTreeSet<OsString> = self.files.keys().map(|name| name.to_os_string()).collect();
        for entry in fs::read_dir(&self.path)? {
            names.insert(entry?.file_name());
        }
        for name in names.iter().filter(|name| is_manifest(name)) {
            let file = self.files.get(&**name);
            let (last, is_partial) = file.map_or((None, false), |file| (file.stamp, file.is_partial));
            let stamp = Stamp::of(&self.path.join(name));
            let is_unchanged = stamp.is_some() && stamp == last;
            // What is missing in it will not come any more.
            let is_final = is_partial && stamp.is_some_and(Stamp::is_complete);
            if (!is_unchanged || is_final) && !stamp.is_some_and(|stamp| stamp.is_being_written(last)) {
                self.read_file(name, now, Reason::Scan);
            }
        }
        Ok(())
    }

    /// Reads a file, or delays the removal of its objects if it is gone or empty. While the file
    /// may be incomplete, objects that it lacks stay.
    fn read_file(&mut self, name: &OsStr, now: Instant, reason: Reason) {
        let path = self.path.join(name);
        let file = self.files.entry(name.into()).or_default();
        let stamp = Stamp::of(&path);
        let last = mem::replace(&mut file.stamp, stamp);
        let removal = file.removal.take();
        let target = file.link_target(&path);
        // Whoever changes a link does so when the file is complete. If another file is at the same
        // place, its writer may not be done.
        let is_relinked = target.is_some() && target != file.target;
        let is_complete = reason == Reason::Complete
            || (reason == Reason::Removal && stamp == last)
            || is_relinked
            || stamp.is_none_or(Stamp::is_complete);
        let text = file::open(&path);
        let is_empty = matches!(&text, Ok(None | Some(Text { first: None, .. })));
        if is_empty && !file.objects.is_empty() {
            file.is_partial = !is_complete;
            let removal = removal.unwrap_or(now + REMOVAL_DELAY);
            if file.is_partial || removal > now || !self.path.is_dir() {
                file.removal = (is_complete && self.path.is_dir()).then_some(removal);
                return;
            }
        }
        let is_gone = matches!(text, Ok(None));
        let mut contents = contents(&path, text, &file.objects, &mut self.shared);
        // Another writer may have begun meanwhile.
        file.is_partial = !is_complete || Stamp::of(&path) != stamp;
        let is_partial = file.is_partial;
        if is_partial {
            contents.keep_missing(&file.objects);
        } else {
            file.target = target;
        }
        self.accept(name, contents);
        if is_gone && !is_partial {
            self.files.remove(name);
        }
    }

    /// Replaces the contents of a file.
    fn accept(&mut self, name: &OsStr, mut contents: Contents) {
        let Some((name, file)) = self.files.get_key_value(name) else { return };
        let name = Arc::clone(name);
        contents.keep_unreadable(&file.objects);
        let is_changed = |key: &&Key| match (file.objects.get(key), contents.objects.get(key)) {
            (Some(last), Some(object)) => !Arc::ptr_eq(last, object),
            _ => true,
        };
        let keys = file.objects.keys().chain(contents.objects.keys());
        let keys: BTreeSet<Key> = keys.filter(is_changed).cloned().collect();
        let mut duplicates = Vec::new();
        for key in keys {
            let before = self.object(&key).cloned();
            let owners = self.owners.entry(key.clone()).or_default();
            match (owners.binary_search(&name), contents.objects.contains_key(&key)) {
                (Ok(index), false) => drop(owners.remove(index)),
                (Err(index), true) => {
                    // If another file was renamed to this one, it does not exist any more.
                    if owners.iter().any(|owner| self.path.join(&**owner).exists()) {
                        duplicates.push(key.clone());
                    }
                    owners.insert(index, Arc::clone(&name));
                }
                _ => {}
            }
            if owners.is_empty() {
                self.owners.remove(&key);
            }
            self.touched.entry(key).or_insert(before);
        }
        if let Some(object) = duplicates.first() {
            let files: Vec<_> = self.owners[object].iter().map(|name| name.to_string_lossy()).collect();
            let (files, more) = (files.join(", "), duplicates.len() - 1);
            warn!(%object, more, files, "an object is in several manifests; the one in the first file is used");
        }
        let path = self.path.join(&*name).display().to_string();
        let Some(file) = self.files.get_mut(&name) else { return };
        for (object, error) in contents.errors.iter().filter(|error| !file.errors.contains(error)) {
            // Objects of the last good version are kept.
            let is_in_effect = object
                .as_ref()
                .map_or(!contents.objects.is_empty(), |object| contents.objects.contains_key(object));
            let consequence = if is_in_effect {
                "its last good version stays in effect"
            } else {
                "it had no good version, so nothing of it is in effect"
            };
            error!(file = path, "cannot use manifest: {error}; {consequence}");
        }
        if contents.errors.is_empty() && !file.errors.is_empty() {
            info!(file = path, "the manifest's errors are gone");
        }
        (file.objects, file.errors) = (contents.objects, contents.errors);
    }
}

fn contents<R: BufRead + Seek>(
    path: &Path,
    text: Result<Option<Text<R>>, String>,
    last: &BTreeMap<Key, Object>,
    shared: &mut SharedValues,
) -> Contents {
    match text {
        Ok(Some(text)) => documents::read(path, text, last, shared),
        Ok(None) => Contents::default(),
        Err(error) => Contents { errors: vec![(None, error)], ..Contents::default() },
    }
}
