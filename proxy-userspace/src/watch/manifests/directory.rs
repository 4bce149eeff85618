//! What the files of the directory hold, which of it counts, and what has changed.
//!
//! A reading that takes objects away or has errors is doubtful: someone may be in the middle of replacing the file. It is
//! believed once it has stayed the same for a moment and nobody is writing. Until then, and for what cannot be used, the
//! last good version stays.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs, io,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use super::{
    dirty::{self, FileNews},
    documents::{self, Contents, DocumentError},
    object::{Key, Object},
    reading::{self, Reading, Stamp},
};
use crate::{model::Interner, watch::decode::Problem};

/// A rewritten file: time for the kernel's word that it is being written to again.
const REWRITTEN: Duration = Duration::from_millis(5);
/// A vanished file: editors move the old file away before they write the new one.
const VANISHED: Duration = Duration::from_millis(20);
/// A file that vanished with its directory: whoever makes the directory anew needs time to fill it.
const VANISHED_WITH_DIRECTORY: Duration = Duration::from_secs(1);
/// An emptied file: scripts truncate, then append.
const EMPTIED: Duration = Duration::from_millis(500);
/// A file that is open for writing and has not been written to for so long counts as complete.
const QUIET: Duration = Duration::from_secs(1);

/// The name of a file in the directory.
type FileName = Arc<OsStr>;

/// The state of the directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    files: BTreeMap<FileName, ManifestFile>,
    /// The files that hold an object, sorted; the first one counts. Hardly any object is in two.
    owners: BTreeMap<Key, SmallVec<[FileName; 1]>>,
    /// Objects that may have changed since the receiver was told of changes, as they were then.
    touched: BTreeMap<Key, Option<Object>>,
    strings: Interner<str>,
    /// Objects that several files hold, as far as told.
    shared: BTreeMap<Key, BTreeSet<FileName>>,
    /// When the directory was last made anew.
    made_anew: Option<Instant>,
}

#[derive(Debug, Default)]
struct ManifestFile {
    objects: BTreeMap<Key, Object>,
    errors: Vec<DocumentError>,
    ignored: Vec<String>,
    stamp: Option<Stamp>,
    writing: bool,
    doubt: Option<Doubt>,
    /// When to look again.
    check_at: Option<Instant>,
}

#[derive(Debug)]
struct Doubt {
    /// The hash of the text; none if the file is gone.
    seen: Option<u64>,
    since: Instant,
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            files: BTreeMap::new(),
            owners: BTreeMap::new(),
            touched: BTreeMap::new(),
            strings: Interner::default(),
            shared: BTreeMap::new(),
            made_anew: None,
        }
    }

    /// Reads all files for the first time, believing what it sees.
    pub(super) fn load(&mut self, now: Instant) -> io::Result<()> {
        for name in self.names()? {
            self.refresh(&name, now, true);
        }
        Ok(())
    }

    /// The directory is another one than before.
    pub(super) fn made_anew(&mut self, now: Instant) {
        self.made_anew = Some(now);
    }

    /// Looks for files that have changed without the kernel's telling.
    pub(super) fn scan(&mut self, now: Instant) -> io::Result<()> {
        let there = self.names()?;
        let known = self.files.keys().map(|name| &**name);
        let gone: Vec<OsString> = known.filter(|name| !there.contains(*name)).map(OsStr::to_owned).collect();
        for name in there.iter().chain(&gone) {
            let stamp = reading::stamp(&self.path.join(name));
            let known = self.files.get(&**name);
            let writing = known.is_some_and(|file| file.writing);
            if !writing && known.is_none_or(|file| file.stamp != stamp || stamp.is_none()) {
                self.refresh(name, now, false);
            }
        }
        Ok(())
    }

    /// Takes news of a file.
    pub(super) fn file_news(&mut self, name: &OsStr, news: FileNews, now: Instant) {
        if let Some(writing) = news.writing {
            let file = self.file(name);
            file.writing = writing;
            if writing {
                file.check_at = Some(now + QUIET);
            }
        }
        if news.read {
            self.refresh(name, now, false);
        }
    }

    /// Looks again at the files whose time has come.
    pub(super) fn check(&mut self, now: Instant) {
        let due = |file: &ManifestFile| file.check_at.is_some_and(|at| at <= now);
        let names: Vec<FileName> =
            self.files.iter().filter(|(_, file)| due(file)).map(|(name, _)| Arc::clone(name)).collect();
        for name in names {
            if let Some(file) = self.files.get_mut(&name) {
                // Quiet for long enough.
                file.writing = false;
            }
            self.refresh(&name, now, false);
        }
    }

    /// When [`Self::check`] is due.
    pub(super) fn next_check(&self) -> Option<Instant> {
        self.files.values().filter_map(|file| file.check_at).min()
    }

    /// The errors there are now, for people.
    pub(super) fn errors(&self) -> impl Iterator<Item = String> {
        self.files.iter().flat_map(|(name, file)| {
            let path = self.path.join(&**name);
            file.errors.iter().map(move |error| format!("{}: {error}", path.display()))
        })
    }

    /// Everything that counts. The receiver is told all of it, so that changes begin here.
    pub(super) fn objects(&mut self) -> impl Iterator<Item = (&Key, &Object)> {
        self.changes();
        self.owners.keys().filter_map(|key| Some((key, self.counting(key)?)))
    }

    /// What has changed since the last call: the object, or none if it is gone.
    pub(super) fn changes(&mut self) -> Vec<(Key, Option<Object>)> {
        self.report_shared();
        let touched = std::mem::take(&mut self.touched).into_iter();
        let changes = touched.filter_map(|(key, told)| {
            let object = self.counting(&key);
            (object != told.as_ref()).then(|| (key, object.cloned()))
        });
        changes.collect()
    }

    /// The object as the file has it that counts.
    fn counting(&self, key: &Key) -> Option<&Object> {
        let owner = self.owners.get(key)?.first()?;
        self.files.get(owner)?.objects.get(key)
    }

    /// To be called before the object changes.
    fn touch(&mut self, key: &Key) {
        if !self.touched.contains_key(key) {
            self.touched.insert(key.clone(), self.counting(key).cloned());
        }
    }

    fn names(&self) -> io::Result<BTreeSet<OsString>> {
        let names = fs::read_dir(&self.path)?.map(|entry| entry.map(|entry| entry.file_name()));
        let names: io::Result<BTreeSet<OsString>> = names.collect();
        Ok(names?.into_iter().filter(|name| dirty::is_manifest(name)).collect())
    }

    fn refresh(&mut self, name: &OsStr, now: Instant, believe: bool) {
        let path = self.path.join(name);
        let stamp = reading::stamp(&path);
        self.file(name).stamp = stamp;
        let (seen, contents, patience) = match reading::read(&path) {
            Reading::Unreadable(why) => {
                self.file(name).settle();
                let problem = Problem { field: String::new(), what: why };
                let errors = vec![DocumentError { document: None, line: 0, key: None, problem }];
                return self.report(name, errors, Vec::new());
            }
            // Files that went with their directory stay until it is back.
            Reading::Gone if !self.path.is_dir() => return self.file(name).settle(),
            Reading::Gone => (None, Contents::default(), self.vanishing_patience(now)),
            Reading::Text { text, hash } => {
                let json = path.extension().is_some_and(|extension| extension == "json");
                let patience = if text.trim().is_empty() { EMPTIED } else { REWRITTEN };
                (Some(hash), documents::read(&text, json), patience)
            }
        };
        let file = self.file(name);
        let contents = file.with_last_good(contents);
        let takes_away = file.objects.keys().any(|key| !contents.objects.contains_key(key));
        let new_errors = contents.errors.iter().any(|error| !file.errors.contains(error));
        let unfinished = file.writing && contents.objects != file.objects;
        if !believe && (takes_away || new_errors || unfinished) && file.doubts(seen, patience, now) {
            return;
        }
        file.settle();
        if seen.is_none() && !std::mem::take(&mut file.errors).is_empty() {
            info!(file = %path.display(), "manifest is gone, and its errors with it");
        }
        self.accept(name, contents);
        if seen.is_none() {
            self.files.remove(name);
        }
    }

    fn vanishing_patience(&self, now: Instant) -> Duration {
        let just_made = self.made_anew.is_some_and(|at| now < at + 2 * VANISHED_WITH_DIRECTORY);
        if just_made { VANISHED_WITH_DIRECTORY } else { VANISHED }
    }

    fn accept(&mut self, name: &OsStr, contents: Contents) {
        let old: Vec<Key> = self.file(name).objects.keys().cloned().collect();
        for key in old.iter().chain(contents.objects.keys()) {
            self.touch(key);
        }
        for key in old.iter().filter(|key| !contents.objects.contains_key(key)) {
            self.disown(key, name);
        }
        let objects = self.made_lean(contents.objects);
        if let Some((name, _)) = self.files.get_key_value(name) {
            let name = Arc::clone(name);
            for key in objects.keys() {
                self.own(key, &name);
            }
        }
        self.file(name).objects = objects;
        self.report(name, contents.errors, contents.ignored);
    }

    /// Names of objects and nodes are most of what objects hold: each is kept once.
    fn made_lean(&mut self, objects: BTreeMap<Key, Object>) -> BTreeMap<Key, Object> {
        let strings = &mut self.strings;
        let lean = objects.into_iter().map(|(mut key, mut object)| {
            key.name.share_strings(strings);
            object.share_strings(strings);
            (key, object)
        });
        lean.collect()
    }

    fn own(&mut self, key: &Key, name: &FileName) {
        let owners = self.owners.entry(key.clone()).or_default();
        if let Err(index) = owners.binary_search(name) {
            owners.insert(index, Arc::clone(name));
        }
    }

    fn disown(&mut self, key: &Key, name: &OsStr) {
        let Some(owners) = self.owners.get_mut(key) else { return };
        owners.retain(|owner| **owner != *name);
        if owners.is_empty() {
            self.owners.remove(key);
        }
    }

    /// What is known of a file.
    fn file(&mut self, name: &OsStr) -> &mut ManifestFile {
        self.files.entry(name.into()).or_default()
    }

    /// Logs objects that several files hold, those of the same files together. A file in doubt does not count: it may be
    /// gone, renamed to the other one.
    fn report_shared(&mut self) {
        let mut new: BTreeMap<BTreeSet<FileName>, Vec<&Key>> = BTreeMap::new();
        for key in self.touched.keys() {
            let certain = |name: &&FileName| self.files.get(*name).is_some_and(|file| file.doubt.is_none());
            let files: BTreeSet<FileName> =
                self.owners.get(key).into_iter().flatten().filter(certain).cloned().collect();
            if files.len() < 2 {
                self.shared.remove(key);
            } else if self.shared.insert(key.clone(), files.clone()).as_ref() != Some(&files) {
                new.entry(files).or_default().push(key);
            }
        }
        for (files, keys) in new {
            let files: Vec<_> = files.iter().map(|name| name.to_string_lossy()).collect();
            let (object, more) = (keys[0], keys.len() - 1);
            warn!(%object, more, files = files.join(", "), "the same object is in several manifests; the first file counts");
        }
    }

    /// Objects that several files hold, as far as told.
    #[cfg(test)]
    pub(super) fn shared(&self) -> impl Iterator<Item = String> {
        self.shared.keys().map(ToString::to_string)
    }

    /// Logs what is new: an error once when it appears, and once when the file is good again.
    fn report(&mut self, name: &OsStr, errors: Vec<DocumentError>, ignored: Vec<String>) {
        let path = self.path.join(name);
        let file = self.file(name);
        for problem in errors.iter().filter(|error| !file.errors.contains(error)) {
            error!(file = %path.display(), "{problem}; what was good before stays");
        }
        if errors.is_empty() && !file.errors.is_empty() {
            info!(file = %path.display(), "manifest is good again");
        }
        for kind in ignored.iter().filter(|kind| !file.ignored.contains(kind)) {
            debug!(file = %path.display(), kind, "not a kind that a Service proxy uses; ignored");
        }
        file.errors = errors;
        file.ignored = ignored;
    }
}

impl ManifestFile {
    /// Adds the last good version of what the new contents should hold but cannot be read from them.
    fn with_last_good(&self, mut contents: Contents) -> Contents {
        let anything = contents.errors.iter().any(|error| error.key.is_none());
        let faulty: BTreeSet<&Key> = contents.errors.iter().filter_map(|error| error.key.as_ref()).collect();
        let missing = self.objects.iter().filter(|(key, _)| !contents.objects.contains_key(key));
        let kept: Vec<_> = missing
            .filter(|(key, _)| anything || faulty.contains(key))
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        contents.objects.extend(kept);
        contents
    }

    /// Whether to wait before what was seen is believed; arranges for another look if so.
    fn doubts(&mut self, seen: Option<u64>, patience: Duration, now: Instant) -> bool {
        let since = match &self.doubt {
            Some(doubt) if doubt.seen == seen => doubt.since,
            _ => now,
        };
        let until = since + if self.writing { QUIET } else { patience };
        self.doubt = Some(Doubt { seen, since });
        self.check_at = Some(until);
        self.writing &= until > now;
        until > now
    }

    /// What was seen is believed, and there is no need to look again unless someone goes on writing.
    fn settle(&mut self) {
        self.doubt = None;
        if !self.writing {
            self.check_at = None;
        }
    }
}
