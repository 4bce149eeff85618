//! The manifests directory as a source: follows it, and turns changes of files into changes of objects.

mod directory;
mod dirty;
mod documents;
mod object;
mod reading;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::{
    sync::{mpsc::Sender, watch},
    task::{self, JoinError},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tracing::{error, info};

use self::{
    directory::Directory,
    dirty::{Dirty, News},
    object::{Key, Object, ObjectKind},
};
use super::{
    WatchError,
    status::{self, KindStatus, WatchStatus},
};
use crate::model::{Delta, EndpointSlice, Node, Service, ServiceCidr, WatchEvent};

/// How often the directory is looked for: it may be moved, removed or mounted over without a word.
const LOOK_FOR_DIRECTORY: Duration = Duration::from_secs(1);
/// Every so many such looks, all files are compared with what is known of them: targets of symbolic links and files on
/// network file systems change without a word.
const LOOKS_PER_SCAN: u32 = 10;

/// The status names so many errors in full.
const ERRORS_IN_STATUS: usize = 5;

/// A directory of manifests (`--manifests`): the files `*.yaml`, `*.yml` and `*.json` in it, not those below it.
#[derive(Debug)]
pub struct ManifestSource {
    dir: PathBuf,
    status: watch::Sender<WatchStatus>,
}

impl ManifestSource {
    /// A source for `dir`, which has to exist when [`Self::run`] is called.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), status: status::channel() }
    }

    /// The source's state. Errors in manifests count for all kinds.
    pub fn status(&self) -> watch::Receiver<WatchStatus> {
        self.status.subscribe()
    }

    /// Sends the directory's objects and then their changes until the receiver is gone. An error only if the directory
    /// cannot be read and watched to begin with.
    pub async fn run(self, tx: Sender<WatchEvent>) -> Result<(), WatchError> {
        let following = Following::start(&self.dir)?;
        let directory = Directory::new(self.dir.clone());
        let (mut directory, loaded) = blocking(directory, |directory| directory.load(Instant::now())).await;
        loaded.map_err(|source| WatchError::ManifestDir { operation: "read", path: self.dir, source })?;
        if send(&tx, initial_events(&mut directory)).await.is_ok() {
            tell(&self.status, &directory, None);
            // Ends when the receiver is gone.
            let _ = follow(directory, following, &tx, &self.status).await;
        }
        Ok(())
    }
}

/// The receiver is gone.
struct Unwanted;

async fn send(tx: &Sender<WatchEvent>, events: impl IntoIterator<Item = WatchEvent>) -> Result<(), Unwanted> {
    for event in events {
        tx.send(event).await.map_err(|_| Unwanted)?;
    }
    Ok(())
}

async fn follow(
    mut directory: Directory,
    mut following: Following,
    tx: &Sender<WatchEvent>,
    status: &watch::Sender<WatchStatus>,
) -> Result<(), Unwanted> {
    let mut looks = interval(LOOK_FOR_DIRECTORY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut look = 0;
    loop {
        let check = directory.next_check();
        let looking = tokio::select! {
            () = following.dirty.arrived() => false,
            () = sleep_until(check.unwrap_or_else(Instant::now)), if check.is_some() => false,
            _ = looks.tick() => true,
            () = tx.closed() => return Err(Unwanted),
        };
        let mut news = following.dirty.take();
        look += u32::from(looking);
        news.everything |= look >= LOOKS_PER_SCAN;
        look %= LOOKS_PER_SCAN;
        if looking || news.everything {
            following.look(&mut news);
        }
        directory = digest(directory, news).await;
        send(tx, events(directory.changes())).await?;
        tell(status, &directory, following.lost.clone());
    }
}

/// Works on the directory where blocking is allowed.
async fn blocking<T: Send + 'static>(
    mut directory: Directory,
    work: impl FnOnce(&mut Directory) -> T + Send + 'static,
) -> (Directory, T) {
    let work = task::spawn_blocking(move || {
        let result = work(&mut directory);
        (directory, result)
    });
    match work.await.map_err(JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // Cancelled: the runtime is going down, and this task with it.
        Err(Err(_)) => std::future::pending().await,
    }
}

async fn digest(directory: Directory, news: News) -> Directory {
    let work = move |directory: &mut Directory| {
        let now = Instant::now();
        if news.made_anew {
            directory.made_anew(now);
        }
        for (name, file) in news.files {
            directory.file_news(&name, file, now);
        }
        directory.check(now);
        if news.everything {
            // A directory that cannot be read is reported by Following.
            let _ = directory.scan(now);
        }
    };
    blocking(directory, work).await.0
}

/// The kernel's watch on the directory.
struct Following {
    dir: PathBuf,
    dirty: Arc<Dirty>,
    watcher: Option<RecommendedWatcher>,
    /// Device and inode of what is watched.
    identity: Option<(u64, u64)>,
    /// Why the directory cannot be followed now.
    lost: Option<String>,
}

impl Following {
    fn start(dir: &Path) -> Result<Self, WatchError> {
        let failed =
            |operation| move |source| WatchError::ManifestDir { operation, path: dir.to_owned(), source };
        let identity = identity(dir).map_err(failed("open"))?;
        let dirty = Arc::new(Dirty::new(dir.to_owned()));
        let watcher = watch_directory(dir, &dirty).map_err(failed("watch"))?;
        Ok(Self { dir: dir.to_owned(), dirty, watcher: Some(watcher), identity: Some(identity), lost: None })
    }

    /// Finds out whether the directory is still the one that is watched, and watches the one that is there if not.
    fn look(&mut self, news: &mut News) {
        let found = identity(&self.dir);
        if found.as_ref().ok() == self.identity.as_ref() && self.watcher.is_some() {
            return;
        }
        self.watcher = None;
        self.identity = None;
        let watched = found.and_then(|identity| {
            self.watcher = Some(watch_directory(&self.dir, &self.dirty)?);
            self.identity = Some(identity);
            Ok(())
        });
        let lost = watched.err().map(|error| format!("manifests directory {}: {error}", self.dir.display()));
        match (&lost, &self.lost) {
            (Some(lost), None) => error!("{lost}; its objects stay as they were"),
            (None, _) => {
                info!(dir = %self.dir.display(), "following the manifests directory that is there now");
                news.everything = true;
                news.made_anew = true;
            }
            (Some(_), Some(_)) => {}
        }
        self.lost = lost;
    }
}

fn identity(dir: &Path) -> io::Result<(u64, u64)> {
    let metadata = dir.metadata()?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok((metadata.dev(), metadata.ino()))
}

fn watch_directory(dir: &Path, dirty: &Arc<Dirty>) -> io::Result<RecommendedWatcher> {
    let io_error = |error: notify::Error| match error.kind {
        notify::ErrorKind::Io(error) => error,
        _ => io::Error::other(error),
    };
    let noting = Arc::clone(dirty);
    let mut watcher = notify::recommended_watcher(move |event| noting.note(&event)).map_err(io_error)?;
    watcher.watch(dir, RecursiveMode::NonRecursive).map_err(io_error)?;
    Ok(watcher)
}

fn initial_events(directory: &mut Directory) -> Vec<WatchEvent> {
    let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    let mut service_cidrs = Vec::new();
    for (_, object) in directory.objects() {
        match object {
            Object::Service(service) => services.push(Service::clone(service)),
            Object::EndpointSlice(slice) => slices.push(EndpointSlice::clone(slice)),
            Object::Node(node) => nodes.push(Node::clone(node)),
            Object::ServiceCidr(object) => service_cidrs.push(ServiceCidr::clone(object)),
        }
    }
    // Most directories have none.
    let service_cidrs =
        (!service_cidrs.is_empty()).then_some(WatchEvent::ServiceCidrs(Delta::Replace(service_cidrs)));
    let kinds = [
        WatchEvent::Nodes(Delta::Replace(nodes)),
        WatchEvent::EndpointSlices(Delta::Replace(slices)),
        WatchEvent::Services(Delta::Replace(services)),
    ];
    service_cidrs.into_iter().chain(kinds).collect()
}

/// Endpoints before the Services that need them; what is gone comes last, Services first.
fn events(mut changes: Vec<(Key, Option<Object>)>) -> Vec<WatchEvent> {
    changes.sort_by_key(|(key, object)| match (object, key.kind) {
        (Some(_), ObjectKind::Node | ObjectKind::ServiceCidr) => 0,
        (Some(_), ObjectKind::EndpointSlice) => 1,
        (Some(_), ObjectKind::Service) => 2,
        (None, ObjectKind::Service) => 3,
        (None, ObjectKind::EndpointSlice) => 4,
        (None, ObjectKind::Node | ObjectKind::ServiceCidr) => 5,
    });
    changes.into_iter().map(|(key, object)| event(key, object)).collect()
}

fn event(key: Key, object: Option<Object>) -> WatchEvent {
    match (object, key.kind) {
        (Some(Object::Service(service)), _) => {
            WatchEvent::Services(Delta::Apply(Arc::unwrap_or_clone(service)))
        }
        (Some(Object::EndpointSlice(slice)), _) => {
            WatchEvent::EndpointSlices(Delta::Apply(Arc::unwrap_or_clone(slice)))
        }
        (Some(Object::Node(node)), _) => WatchEvent::Nodes(Delta::Apply(Arc::unwrap_or_clone(node))),
        (Some(Object::ServiceCidr(object)), _) => {
            WatchEvent::ServiceCidrs(Delta::Apply(Arc::unwrap_or_clone(object)))
        }
        (None, ObjectKind::Service) => WatchEvent::Services(Delta::Delete(key.name)),
        (None, ObjectKind::EndpointSlice) => WatchEvent::EndpointSlices(Delta::Delete(key.name)),
        (None, ObjectKind::Node) => WatchEvent::Nodes(Delta::Delete(key.name)),
        (None, ObjectKind::ServiceCidr) => WatchEvent::ServiceCidrs(Delta::Delete(key.name)),
    }
}

/// Brings the status up to date; receivers only hear of changes.
fn tell(status: &watch::Sender<WatchStatus>, directory: &Directory, lost: Option<String>) {
    let connected = lost.is_none();
    let mut errors = lost.into_iter().chain(directory.errors());
    let first: Vec<String> = errors.by_ref().take(ERRORS_IN_STATUS).collect();
    let more = match errors.count() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let last_error = (!first.is_empty()).then(|| first.join("; ") + &more);
    status.send_if_modified(|status| {
        let mut kind = KindStatus { synced: true, ..status.services.clone() };
        if connected {
            kind.connected();
        } else {
            kind.connected_since = None;
        }
        kind.last_error = last_error;
        let of_all = || kind.clone();
        let new = WatchStatus {
            services: of_all(),
            endpoint_slices: of_all(),
            nodes: of_all(),
            service_cidrs: of_all(),
        };
        let changed = *status != new;
        *status = new;
        changed
    });
}
