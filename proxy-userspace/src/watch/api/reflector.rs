//! Keeps the receiver in step with one kind: list, watch, and start over where that is needed.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info};

use super::{
    Timing,
    failure::{Failure, FailureClass},
    kind::{self, PAGE_SIZE, Selectors},
    lines::{self, Answer, Line},
    report::Reporter,
    retries::Retries,
    wire::{Bookmark, Event, Page, Status},
};
use crate::{
    model::{Delta, NamespacedName, WatchEvent},
    watch::decode::{self, Kind},
};

/// Lists that are begun anew because a continue token has expired; the last of them asks for everything at once.
const LIST_ATTEMPTS: u32 = 3;
/// How long the server is asked to keep a watch up, in seconds; client-go spreads it over 5 to 10 minutes.
const WATCH_SECONDS: u32 = 300;

/// The list-and-watch of one kind.
pub(super) struct Reflector<K> {
    client: kube::Client,
    selectors: Selectors,
    timing: Timing,
    tx: Sender<WatchEvent>,
    reporter: Reporter,
    retries: Retries,
    /// Where to go on watching; none before a list and when a new one is needed.
    version: Option<String>,
    /// Whether the server is thought to stream lists.
    streaming: bool,
    kind: std::marker::PhantomData<fn() -> K>,
}

/// Why a list or watch is over.
enum End {
    /// The receiver is gone.
    Unwanted,
    /// The server ended the watch, which it does every few minutes, or it was silent for too long.
    Over,
    /// The server does not stream lists.
    NotStreaming(String),
    /// It failed.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// What an object is to us.
enum Found<K> {
    Object(K),
    /// Not for this proxy, by its labels.
    Excluded(NamespacedName),
    /// Nothing that can be used.
    Nothing,
}

/// The objects of a streaming list until its end; none when changes are coming in.
type Initial<K> = Option<BTreeMap<NamespacedName, K>>;

impl<K: Kind> Reflector<K> {
    pub(super) fn new(
        client: kube::Client,
        selectors: Selectors,
        timing: Timing,
        tx: Sender<WatchEvent>,
        reporter: Reporter,
    ) -> Self {
        Self {
            client,
            selectors,
            timing,
            tx,
            reporter,
            retries: Retries::new(timing),
            version: None,
            streaming: true,
            kind: std::marker::PhantomData,
        }
    }

    /// Runs until the receiver is gone.
    pub(super) async fn run(mut self) {
        let tx = self.tx.clone();
        loop {
            let end = tokio::select! {
                end = self.list_and_watch() => end,
                () = tx.closed() => End::Unwanted,
            };
            match end {
                End::Unwanted => return,
                End::Over => debug!(resource = K::PLURAL, "watch is over; watching on"),
                End::NotStreaming(why) => {
                    info!(resource = K::PLURAL, "the server does not stream lists, listing by pages: {why}");
                    self.streaming = false;
                    continue;
                }
                End::Failed(failure) => {
                    if failure.spoils_version() {
                        self.version = None;
                    }
                    self.reporter.failed(&failure);
                }
            }
            tokio::select! {
                () = sleep(self.retries.next()) => {}
                () = tx.closed() => return,
            }
        }
    }

    async fn list_and_watch(&mut self) -> End {
        if self.version.is_none()
            && !self.streaming
            && let Err(end) = self.list().await
        {
            return end;
        }
        self.watch().await.err().unwrap_or(End::Over)
    }

    async fn list(&mut self) -> Result<(), End> {
        let mut attempt = 1;
        loop {
            let limit = (attempt < LIST_ATTEMPTS).then_some(PAGE_SIZE);
            match self.list_pages(limit).await {
                Err(End::Failed(failure))
                    if failure.class == FailureClass::Expired && attempt < LIST_ATTEMPTS =>
                {
                    debug!(resource = K::PLURAL, attempt, "the list expired between two pages: {failure}");
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    async fn list_pages(&mut self, limit: Option<u32>) -> Result<(), End> {
        let mut objects = BTreeMap::new();
        let mut token = None;
        loop {
            let request = kind::list::<K>(&self.selectors, limit, token.as_deref());
            let answer = lines::send(&self.client, request, self.timing.response).await?;
            let body = answer.read_to_end(self.timing.response).await?;
            let page: Page<'_> = serde_json::from_slice(&body).map_err(Failure::garbled)?;
            for item in page.items.unwrap_or_default() {
                if let (_, Found::Object(object)) = self.decode(item) {
                    objects.insert(object.key(), object);
                }
            }
            token = page.metadata.next.filter(|token| !token.is_empty());
            if token.is_none() {
                let version = page.metadata.resource_version.filter(|version| !version.is_empty());
                let version = version.ok_or_else(|| Failure::garbled("a list without resourceVersion"))?;
                return self.replace(objects, version).await;
            }
        }
    }

    /// Watches from the known version on; without one, streams the list first.
    async fn watch(&mut self) -> Result<(), End> {
        let mut initial: Initial<K> = self.version.is_none().then(BTreeMap::new);
        let mut answer = self.open(initial.is_some()).await?;
        let opened = Instant::now();
        let mut settled = false;
        let mut lines = 0_u64;
        loop {
            let limit = if initial.is_some() { self.timing.response } else { self.timing.idle };
            let line = tokio::select! {
                line = answer.next(limit) => line,
                () = sleep_until(opened + self.timing.settled), if !settled && initial.is_none() => {
                    settled = true;
                    self.retries.reset();
                    self.reporter.working();
                    continue;
                }
            };
            match line {
                Ok(Line::Text(line)) => self.line(&line, &mut initial).await?,
                Ok(Line::Idle) if initial.is_some() => {
                    let limit = self.timing.response;
                    return Err(End::NotStreaming(format!("no end of the initial objects in {limit:?}")));
                }
                Ok(Line::Idle) => return Ok(()),
                Ok(Line::End) if initial.is_none() && (lines > 0 || settled) => return Ok(()),
                Ok(Line::End) => {
                    let missing =
                        if initial.is_some() { "the end of the initial objects" } else { "anything" };
                    let message = format!("the watch was closed before {missing} came");
                    return Err(Failure::new(FailureClass::Cut, message).into());
                }
                Err(failure) if initial.is_none() && (lines > 0 || settled) => {
                    debug!(resource = K::PLURAL, "{failure}");
                    return Ok(());
                }
                Err(failure) => return Err(failure.into()),
            }
            lines += 1;
        }
    }

    async fn open(&mut self, initial: bool) -> Result<Answer, End> {
        // Watches of many nodes shall not end at the same moment.
        let seconds = WATCH_SECONDS + fastrand::u32(..WATCH_SECONDS);
        let request = kind::watch::<K>(&self.selectors, self.version.as_deref(), seconds);
        lines::send(&self.client, request, self.timing.response).await.map_err(|failure| {
            if initial && failure.refuses_streaming() {
                End::NotStreaming(failure.message)
            } else {
                End::Failed(failure)
            }
        })
    }

    /// Takes one line of a watch.
    async fn line(&mut self, line: &[u8], initial: &mut Initial<K>) -> Result<(), End> {
        let event: Event<'_> = serde_json::from_slice(line).map_err(Failure::garbled)?;
        match event.event_type {
            "ADDED" | "MODIFIED" => self.applied(event.object, initial).await?,
            "DELETED" => self.deleted(event.object, initial).await?,
            "BOOKMARK" => self.bookmark(event.object, initial).await?,
            "ERROR" => {
                let status: Status = serde_json::from_str(event.object.get()).map_err(Failure::garbled)?;
                return Err(Failure::status(status.code, &status.message).into());
            }
            other => debug!(resource = K::PLURAL, "unknown watch event {other:?}"),
        }
        Ok(())
    }

    async fn applied(&mut self, object: &RawValue, initial: &mut Initial<K>) -> Result<(), End> {
        let (version, object) = self.decode(object);
        match (object, initial) {
            (Found::Object(object), Some(objects)) => {
                objects.insert(object.key(), object);
            }
            (Found::Object(object), None) => {
                self.send(Delta::Apply(object)).await?;
                self.moved_on(version)?;
            }
            (Found::Excluded(name), Some(objects)) => {
                objects.remove(&name);
            }
            (Found::Excluded(name), None) => {
                self.send(Delta::Delete(name)).await?;
                self.moved_on(version)?;
            }
            (Found::Nothing, Some(_)) => {}
            (Found::Nothing, None) => self.moved_on(version)?,
        }
        Ok(())
    }

    async fn deleted(&mut self, object: &RawValue, initial: &mut Initial<K>) -> Result<(), End> {
        let metadata = decode::decode_metadata(&mut deserializer(object))
            .map_err(|problem| Failure::garbled(format!("deleted object: {problem}")))?;
        let name = K::name_in(&metadata);
        let name = name.ok_or_else(|| Failure::garbled("a deleted object without a name"))?;
        self.reporter.deleted(&name);
        if let Some(objects) = initial {
            objects.remove(&name);
            return Ok(());
        }
        self.send(Delta::Delete(name)).await?;
        self.moved_on(metadata.resource_version)
    }

    async fn bookmark(&mut self, object: &RawValue, initial: &mut Initial<K>) -> Result<(), End> {
        let bookmark: Bookmark = serde_json::from_str(object.get()).map_err(Failure::garbled)?;
        let ends_list =
            bookmark.metadata.annotations.is_some_and(|annotations| annotations.ends_list.is_some());
        match initial.take_if(|_| ends_list) {
            Some(objects) => {
                let version = bookmark.metadata.resource_version.filter(|version| !version.is_empty());
                let version =
                    version.ok_or_else(|| Failure::garbled("a bookmark without resourceVersion"))?;
                self.replace(objects, version).await
            }
            // Until the initial objects end, there are no other bookmarks.
            None if initial.is_some() => {
                Err(End::NotStreaming("a bookmark came before the end of the initial objects".to_owned()))
            }
            None => self.moved_on(bookmark.metadata.resource_version),
        }
    }

    async fn replace(&mut self, objects: BTreeMap<NamespacedName, K>, version: String) -> Result<(), End> {
        let count = objects.len();
        self.send(Delta::Replace(objects.into_values().collect())).await?;
        self.version = Some(version);
        self.reporter.listed(count);
        Ok(())
    }

    /// A change was taken, and all before it. Versions only grow (KEP-5504); where one does not, the server was restored from
    /// a backup for example, and what it has lost meanwhile will be in no watch.
    fn moved_on(&mut self, version: Option<String>) -> Result<(), End> {
        if let Some(version) = version.filter(|version| !version.is_empty()) {
            let number = |version: &str| version.parse::<u64>().ok();
            let before = self.version.as_deref().and_then(number);
            if let (Some(before), Some(now)) = (before, number(&version))
                && now < before
            {
                let message = format!("resource version {now} comes after {before}");
                return Err(Failure::new(FailureClass::WentBack, message).into());
            }
            self.version = Some(version);
        }
        self.reporter.working();
        Ok(())
    }

    async fn send(&self, delta: Delta<K>) -> Result<(), End> {
        self.tx.send(K::event(delta)).await.map_err(|_| End::Unwanted)
    }

    /// The object's version and the object.
    fn decode(&mut self, object: &RawValue) -> (Option<String>, Found<K>) {
        let decoded = match decode::decode::<K, _>(&mut deserializer(object)) {
            Ok(decoded) => decoded,
            Err(problem) => {
                let metadata = decode::decode_metadata(&mut deserializer(object)).unwrap_or_default();
                self.reporter.undecodable(K::name_in(&metadata), vec![problem]);
                return (metadata.resource_version, Found::Nothing);
            }
        };
        let Some(object) = decoded.object else {
            self.reporter.undecodable(None, decoded.problems);
            return (decoded.resource_version, Found::Nothing);
        };
        self.reporter.decoded(&object.key(), decoded.problems);
        let found = if decoded.selected { Found::Object(object) } else { Found::Excluded(object.key()) };
        (decoded.resource_version, found)
    }
}

fn deserializer(object: &RawValue) -> serde_json::Deserializer<serde_json::de::StrRead<'_>> {
    serde_json::Deserializer::from_str(object.get())
}
