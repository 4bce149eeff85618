//! What the kernel said about the directory since it was last looked at.
//!
//! A file is read when its writer closes it, or when it appears or vanishes as a whole, and not while it is written to:
//! a file that is being replaced in place is never seen empty or half done, and no time is lost waiting.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use notify::event::{AccessKind, AccessMode, CreateKind, EventKind, ModifyKind};
use tokio::sync::Notify;

/// News of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FileNews {
    /// It should be read.
    pub(super) read: bool,
    /// Whether someone is writing to it; none if nothing was said about that.
    pub(super) writing: Option<bool>,
}

/// News of the directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// By file name.
    pub(super) files: BTreeMap<OsString, FileNews>,
    /// Anything may have changed.
    pub(super) everything: bool,
    /// The directory is another one than before.
    pub(super) made_anew: bool,
}

/// News on its way from the thread that `notify` runs.
#[derive(Debug)]
pub(super) struct Dirty {
    directory: PathBuf,
    news: Mutex<News>,
    arrived: Notify,
}

impl Dirty {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory, news: Mutex::default(), arrived: Notify::new() }
    }

    /// Waits until there is news.
    pub(super) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// Takes what there is.
    pub(super) fn take(&self) -> News {
        std::mem::take(&mut self.news())
    }

    /// Notes one event.
    pub(super) fn note(&self, event: &notify::Result<notify::Event>) {
        let mut news = self.news();
        match event {
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    note_path(&mut news, &self.directory, path, event.kind);
                }
            }
            Ok(_) | Err(_) => news.everything = true,
        }
        if *news != News::default() {
            self.arrived.notify_one();
        }
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a file of this name is a manifest. Hidden files are editors' own.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let hidden = name.as_encoded_bytes().starts_with(b".");
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    !hidden && matches!(extension, Some("yaml" | "yml" | "json"))
}

fn note_path(news: &mut News, directory: &Path, path: &Path, kind: EventKind) {
    let name = path.file_name().filter(|name| path != directory && is_manifest(name));
    let Some(name) = name else {
        // The directory itself, or a name that manifests may be links through, like a ConfigMap's `..data`.
        news.everything |= !matches!(kind, EventKind::Access(_) | EventKind::Modify(ModifyKind::Data(_)));
        return;
    };
    let (read, writing) = match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) | EventKind::Modify(ModifyKind::Name(_)) => {
            (true, Some(false))
        }
        EventKind::Create(CreateKind::File) if is_complete(path) => (true, Some(false)),
        EventKind::Create(_) | EventKind::Modify(ModifyKind::Data(_)) => (false, Some(true)),
        EventKind::Remove(_) => (true, Some(false)),
        EventKind::Access(_) => return,
        _ => (true, None),
    };
    let file = news.files.entry(name.to_owned()).or_default();
    file.read |= read;
    file.writing = writing.or(file.writing);
}

/// Links appear with their content; other files are written to after they appeared.
fn is_complete(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
}
