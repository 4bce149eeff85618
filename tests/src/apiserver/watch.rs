//! Answers watches and streaming lists.

use std::{io, sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::StatusCode;
use serde_json::Value;
use tokio::{
    sync::{
        broadcast::{self, error::TryRecvError},
        mpsc, watch,
    },
    time::{Instant, interval, sleep, sleep_until},
};

use super::{
    Encoding, Request, Resource, Shared,
    faults::{BREAK_DELAY, Fault, Interruption, WrongVersion},
    kept_list::KeptList,
    responses,
    selectors::Selectors,
    store::{Change, Store},
    stored::Stored,
};

/// The interval of bookmarks.
const BOOKMARK_INTERVAL: Duration = Duration::from_mins(1);
/// The maximum duration of a watch in seconds, if the client does not ask for less.
const MAX_SECONDS: u32 = 1800;

/// One watch.
struct Watch {
    shared: Arc<Shared>,
    resource: &'static Resource,
    selectors: Selectors,
    bookmarks: bool,
    encoding: Encoding,
    /// All changes up to this version were sent.
    version: u64,
    /// The requested start version. If it is in the future, the watch waits for it, as upstream
    /// does.
    from: u64,
    wrong_version: Option<WrongVersion>,
    out: mpsc::Sender<io::Result<Bytes>>,
}

/// The type of an event, and its object.
type Event = (&'static str, Arc<Stored>);

/// The connection is closed, or the watch has ended.
struct WatchEnded;

/// Answers a watch request. `fault` must be one that leaves the response headers intact.
pub(super) fn answer(
    shared: &Arc<Shared>,
    resource: &'static Resource,
    request: &Request,
    fault: Option<Fault>,
) -> Response {
    let query = &request.query;
    let encoding = request.encoding();
    let streaming = query.is("sendInitialEvents") && fault != Some(Fault::IgnoreStreaming);
    if streaming && query.get("resourceVersionMatch") != Some("NotOlderThan") {
        let message = "resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to \
                       NotOlderThan";
        return responses::failure(encoding, responses::status(422, "Invalid", message));
    }
    let (out, lines) = mpsc::channel(64);
    let from: u64 = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
    let current = shared.store().version();
    if streaming && from > current {
        return responses::failure(encoding, responses::too_large(from, current));
    }
    let watch = Watch {
        shared: Arc::clone(shared),
        resource,
        selectors: query.selectors(),
        bookmarks: query.is("allowWatchBookmarks"),
        encoding,
        version: from,
        from,
        wrong_version: match fault {
            Some(Fault::WrongVersions(wrong_version)) => Some(wrong_version),
            _ => None,
        },
        out,
    };
    let seconds: u32 = query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(MAX_SECONDS);
    let until = Instant::now() + Duration::from_secs(u64::from(seconds));
    // Subscribed before the first read of the store, so that no change is missed.
    let changes = shared.changed.subscribe();
    let interruptions = shared.interruptions.subscribe();
    tokio::spawn(watch.run(streaming, fault, until, changes, interruptions));
    let lines =
        stream::unfold(lines, |mut lines| async move { lines.recv().await.map(|line| (line, lines)) });
    let content_type = encoding.content_type_of_watch();
    if streaming && request.accepts_gzip() && shared.version().compresses_streams() {
        // Each flush ends a gzip member (`perFlushGzipWriter`).
        let members = lines.map(|line| line.map(|line| responses::gzip(&line)));
        return responses::compressed(content_type, Body::from_stream(members));
    }
    responses::stream(content_type, StatusCode::OK, Body::from_stream(lines))
}

impl Watch {
    async fn run(
        mut self,
        streaming: bool,
        fault: Option<Fault>,
        until: Instant,
        changes: watch::Receiver<u64>,
        interruptions: broadcast::Receiver<Interruption>,
    ) {
        let mut down = self.shared.down.subscribe();
        let going_down = async move { down.wait_for(|down| *down).await.is_ok() };
        let broken = tokio::select! {
            _ = self.follow(streaming, fault, until, changes, interruptions) => false,
            down = going_down => down,
        };
        if broken {
            let _ = self.out.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
        }
    }

    async fn follow(
        &mut self,
        streaming: bool,
        fault: Option<Fault>,
        until: Instant,
        mut changes: watch::Receiver<u64>,
        mut interruptions: broadcast::Receiver<Interruption>,
    ) -> Result<(), WatchEnded> {
        self.inject_fault(fault).await?;
        self.begin(streaming).await?;
        let mut bookmarks = interval(BOOKMARK_INTERVAL);
        bookmarks.reset();
        loop {
            self.catch_up(&mut interruptions).await?;
            tokio::select! {
                result = changes.changed() => result.map_err(|_| WatchEnded)?,
                interruption = interruptions.recv() => self.interrupt(interruption.map_err(|_| WatchEnded)?).await?,
                _ = bookmarks.tick() => self.bookmark(false).await?,
                () = sleep_until(until) => return Ok(()),
                () = self.out.closed() => return Err(WatchEnded),
            }
        }
    }

    /// Sends what precedes the changes: the existing objects, for a watch without a version or from
    /// version 0.
    async fn begin(&mut self, streaming: bool) -> Result<(), WatchEnded> {
        if streaming && let Some((list, version)) = self.kept_list() {
            return self.stream(&list, version).await;
        }
        let (events, version) = {
            let store = self.shared.store();
            if !streaming && self.version > 0 && self.version < store.compacted() {
                (Err(responses::too_old(self.version, store.compacted())), 0)
            } else if streaming || self.version == 0 {
                (Ok(self.initial(&store)), store.version())
            } else {
                (Ok(Vec::new()), self.version)
            }
        };
        match events {
            Ok(events) => self.send_all(events).await?,
            Err(expired) => return self.fail(expired).await,
        }
        self.version = version;
        if streaming { self.bookmark(true).await } else { Ok(()) }
    }

    /// Returns a streaming list and its version. `None` if an object has no encoding.
    fn kept_list(&self) -> Option<(Arc<KeptList>, u64)> {
        let mut store = self.shared.store();
        let list = KeptList::of(&mut store, self.resource, &self.selectors, self.encoding).ok()?;
        Some((list, store.version()))
    }

    /// Sends a streaming list, and the bookmark that ends it.
    async fn stream(&mut self, list: &KeptList, version: u64) -> Result<(), WatchEnded> {
        for part in &list.parts {
            self.send(part.clone()).await?;
        }
        self.version = version;
        self.bookmark(true).await
    }

    fn initial(&self, store: &Store) -> Vec<Event> {
        let objects = store.list(self.resource.plural, store.version());
        let selected = objects.values().filter(|object| self.selectors.matches(object.value()));
        selected.map(|object| ("ADDED", Arc::clone(object))).collect()
    }

    /// Sends the changes since the last call, after the interruptions that preceded them.
    async fn catch_up(
        &mut self,
        interruptions: &mut broadcast::Receiver<Interruption>,
    ) -> Result<(), WatchEnded> {
        let (events, version) = {
            let store = self.shared.store();
            let changes = store.since(self.resource.plural, self.version);
            let changes = changes.filter(|change| change.version > self.from);
            let events: Vec<Event> = changes.filter_map(|change| self.event(change)).collect();
            (events, store.version())
        };
        // A bookmark must not have the version of changes that are not sent yet.
        if events.is_empty() {
            self.version = version;
        }
        // Interruptions are read after the store. So one that a test made before a change is
        // handled before that change.
        loop {
            match interruptions.try_recv() {
                Ok(interruption) => self.interrupt(interruption).await?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Lagged(_) | TryRecvError::Closed) => return Err(WatchEnded),
            }
        }
        self.send_all(events).await?;
        self.version = version;
        Ok(())
    }

    /// Returns the event of a change as a watcher with these selectors sees it.
    fn event(&self, change: &Change) -> Option<Event> {
        let selected = |object: &Option<Arc<Stored>>| {
            object.as_ref().filter(|object| self.selectors.matches(object.value())).cloned()
        };
        let (event, object) = match (selected(&change.old), selected(&change.new)) {
            (None, Some(new)) => ("ADDED", new),
            (Some(_), Some(new)) => ("MODIFIED", new),
            (Some(old), None) => ("DELETED", old),
            (None, None) => return None,
        };
        let version = self
            .wrong_version
            .map_or_else(|| change.version.to_string(), |wrong_version| wrong_version.text(change.version));
        Some((event, with_version(object, version)))
    }

    /// Sends a bookmark. Upstream drops those that are not newer than the start of the watch. Tests
    /// of servers that lost data would then wait for two silent watches, which takes minutes.
    async fn bookmark(&mut self, ends_list: bool) -> Result<(), WatchEnded> {
        if !self.bookmarks && !ends_list {
            return Ok(());
        }
        let object = responses::bookmark(self.resource, self.version, ends_list);
        self.send_all(vec![("BOOKMARK", Arc::new(Stored::new(object)))]).await
    }

    /// Sends a Status as the last event.
    async fn fail(&self, status: Value) -> Result<(), WatchEnded> {
        // Each Status has an encoding.
        let event = self.encoding.event("ERROR", &Stored::new(status)).map_err(|_| WatchEnded)?;
        self.send(event).await?;
        Err(WatchEnded)
    }

    /// Sends events. If an object has no encoding, the watch ends with an error that says so.
    async fn send_all(&self, events: Vec<Event>) -> Result<(), WatchEnded> {
        for (event_type, object) in events {
            match self.encoding.event(event_type, &object) {
                Ok(event) => self.send(event).await?,
                Err(error) => return self.fail(responses::internal_error(&error)).await,
            }
        }
        Ok(())
    }

    async fn inject_fault(&mut self, fault: Option<Fault>) -> Result<(), WatchEnded> {
        match fault {
            Some(Fault::HangAfterHead) => self.interrupt(Interruption::Stall).await,
            Some(Fault::BreakMidBody) => self.interrupt(Interruption::BreakMidEvent).await,
            Some(Fault::ExpiredInStream) => self.interrupt(Interruption::Expire).await,
            Some(Fault::EmptyBody) => Err(WatchEnded),
            Some(Fault::NotJson) => self.send(Bytes::from_static(b"<html>no JSON</html>\n")).await,
            _ => Ok(()),
        }
    }

    async fn interrupt(&mut self, interruption: Interruption) -> Result<(), WatchEnded> {
        match interruption {
            Interruption::End => Err(WatchEnded),
            Interruption::Bookmark => self.bookmark(false).await,
            Interruption::Stall => {
                self.out.closed().await;
                Err(WatchEnded)
            }
            Interruption::Expire => {
                let version = self.shared.store().version();
                self.fail(responses::too_old(self.version, version)).await
            }
            Interruption::BreakMidEvent => {
                let object = Stored::new(responses::bookmark(self.resource, self.version, false));
                if let Ok(event) = self.encoding.event("MODIFIED", &object) {
                    self.send(event.slice(..event.len() / 2)).await?;
                }
                sleep(BREAK_DELAY).await;
                let _ = self.out.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
                Err(WatchEnded)
            }
        }
    }

    async fn send(&self, part: Bytes) -> Result<(), WatchEnded> {
        self.out.send(Ok(part)).await.map_err(|_| WatchEnded)
    }
}

/// Returns an object with this resource version. If the object has it, it is returned itself,
/// because its encodings may be made already.
fn with_version(object: Arc<Stored>, version: String) -> Arc<Stored> {
    if object.value()["metadata"]["resourceVersion"] == version {
        return object;
    }
    let mut value = object.value().clone();
    value["metadata"]["resourceVersion"] = version.into();
    Arc::new(Stored::new(value))
}
