//! Lists and watches one kind, and sends its objects and changes to the receiver.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info};

use super::{
    Timing,
    backoff::Backoff,
    failure::{Failure, FailureClass},
    report::Reporter,
    request::{self, PAGE_SIZE, Selectors},
    response::{self, Line, Response},
    wire::{Bookmark, Event, Page, Status},
};
use crate::{
    model::{Delta, NamespacedName, WatchEvent},
    watch::decode::{self, Kind},
};

/// How often a list is attempted while its continue token expires. The last attempt requests all
/// objects in one page.
const LIST_ATTEMPTS: u32 = 3;
/// The least duration of a watch that is requested, in seconds. The duration is up to twice as
/// long, like client-go's 5 to 10 minutes.
const WATCH_SECONDS: u32 = 300;

/// The list and watch of one kind.
pub(super) struct Reflector<K> {
    client: kube::Client,
    selectors: Selectors,
    timing: Timing,
    tx: Sender<WatchEvent>,
    reporter: Reporter,
    backoff: Backoff,
    /// The resource version that the next watch starts from; none if a list must come first.
    version: Option<String>,
    /// The server streams lists, as far as known.
    is_streaming: bool,
    /// The server may not have the kind, or not permit to read it.
    is_optional: bool,
    kind: std::marker::PhantomData<fn() -> K>,
}

/// Why a list or watch ended.
enum End {
    /// The receiver is gone.
    ReceiverGone,
    /// The server ended the watch, which it does every few minutes, or sent nothing for too long.
    WatchOver,
    /// The server does not stream lists.
    NotStreaming(String),
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The objects of a streaming list before its end; none after it, when changes come.
type InitialObjects<K> = Option<BTreeMap<NamespacedName, K>>;

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
            backoff: Backoff::new(timing),
            version: None,
            is_streaming: true,
            is_optional: false,
            kind: std::marker::PhantomData,
        }
    }

    /// Makes the kind one that the server may not have, or not permit to read.
    pub(super) fn optional(mut self) -> Self {
        self.is_optional = true;
        self
    }

    /// Runs until the receiver is gone.
    pub(super) async fn run(mut self) {
        let tx = self.tx.clone();
        loop {
            let end = tokio::select! {
                end = self.list_and_watch() => end,
                () = tx.closed() => End::ReceiverGone,
            };
            match end {
                End::ReceiverGone => return,
                End::WatchOver => debug!(resource = K::PLURAL, "the watch is over; starting the next one"),
                End::NotStreaming(why) => {
                    info!(resource = K::PLURAL, "the server does not stream lists; listing by pages: {why}");
                    self.is_streaming = false;
                    continue;
                }
                End::Failed(failure) => {
                    if failure.invalidates_version() {
                        self.version = None;
                    }
                    if self.is_optional && failure.class.is_unavailable() {
                        self.reporter.unavailable(&failure);
                    } else {
                        self.reporter.failed(&failure);
                    }
                }
            }
            tokio::select! {
                () = sleep(self.backoff.pause()) => {}
                () = tx.closed() => return,
            }
        }
    }

    async fn list_and_watch(&mut self) -> End {
        if self.version.is_none()
            && !self.is_streaming
            && let Err(end) = self.list().await
        {
            return end;
        }
        self.watch().await.err().unwrap_or(End::WatchOver)
    }

    async fn list(&mut self) -> Result<(), End> {
        for attempt in 1..LIST_ATTEMPTS {
            match self.list_pages(Some(PAGE_SIZE)).await {
                Err(End::Failed(failure)) if failure.class == FailureClass::Expired => {
                    debug!(resource = K::PLURAL, attempt, "the list expired between two pages: {failure}");
                }
                result => return result,
            }
        }
        self.list_pages(None).await
    }

    async fn list_pages(&mut self, limit: Option<u32>) -> Result<(), End> {
        let mut objects = BTreeMap::new();
        let mut token = None;
        loop {
            let request = request::list::<K>(&self.selectors, limit, token.as_deref());
            let response = response::send(&self.client, request, self.timing.response).await?;
            let body = response.read_to_end(self.timing.response).await?;
            let page: Page<'_> = serde_json::from_slice(&body).map_err(Failure::invalid)?;
            for item in page.items.unwrap_or_default() {
                if let (_, Some(delta)) = self.decode(item) {
                    delta.apply_to(&mut objects, K::key);
                }
            }
            token = page.metadata.continue_token.filter(|token| !token.is_empty());
            if token.is_none() {
                return self.replace(objects, page.metadata.resource_version).await;
            }
        }
    }

    /// Watches from the last version. Without one, streams the list first.
    async fn watch(&mut self) -> Result<(), End> {
        let mut initial: InitialObjects<K> = self.version.is_none().then(BTreeMap::new);
        let mut response = self.open(initial.is_some()).await?;
        let opened = Instant::now();
        let mut is_settled = false;
        let mut lines = 0_u64;
        loop {
            let limit = if initial.is_some() { self.timing.response } else { self.timing.idle };
            let line = tokio::select! {
                line = response.next_line(limit) => line,
                () = sleep_until(opened + self.timing.settled), if !is_settled && initial.is_none() => {
                    is_settled = true;
                    self.backoff.reset();
                    self.reporter.connected();
                    continue;
                }
            };
            let has_worked = initial.is_none() && (lines > 0 || is_settled);
            match line {
                Ok(Line::Complete(line)) => self.read_line(&line, &mut initial).await?,
                Ok(Line::Timeout) if initial.is_some() => {
                    return Err(End::NotStreaming(format!("no end of the initial objects in {limit:?}")));
                }
                Ok(Line::Timeout) => return Ok(()),
                Ok(Line::End) if has_worked => return Ok(()),
                Ok(Line::End) => {
                    let missing =
                        if initial.is_some() { "the end of the initial objects" } else { "any line" };
                    let message = format!("the server closed the watch before {missing}");
                    return Err(Failure::new(FailureClass::Disconnected, message).into());
                }
                Err(failure) if has_worked => {
                    debug!(resource = K::PLURAL, "{failure}");
                    return Ok(());
                }
                Err(failure) => return Err(failure.into()),
            }
            lines += 1;
        }
    }

    async fn open(&mut self, is_initial: bool) -> Result<Response, End> {
        // The watches of many nodes must not end at the same moment.
        let seconds = WATCH_SECONDS + fastrand::u32(..WATCH_SECONDS);
        let request = request::watch::<K>(&self.selectors, self.version.as_deref(), seconds);
        response::send(&self.client, request, self.timing.response).await.map_err(|failure| {
            if is_initial && failure.refuses_streaming() {
                End::NotStreaming(failure.message)
            } else {
                End::Failed(failure)
            }
        })
    }

    async fn read_line(&mut self, line: &[u8], initial: &mut InitialObjects<K>) -> Result<(), End> {
        let event: Event<'_> = serde_json::from_slice(line).map_err(Failure::invalid)?;
        match event.event_type {
            "ADDED" | "MODIFIED" => {
                let (version, delta) = self.decode(event.object);
                self.apply(delta, version, initial).await
            }
            "DELETED" => {
                let metadata = decode::decode_metadata(&mut deserializer(event.object))
                    .map_err(|problem| Failure::invalid(format!("deleted object: {problem}")))?;
                let written = metadata.written_name();
                let written = written.ok_or_else(|| Failure::invalid("a deleted object without a name"))?;
                self.reporter.deleted(&written);
                // An object with an invalid name was never applied.
                let delta = K::name_in(&metadata).map(Delta::Delete);
                self.apply(delta, metadata.resource_version, initial).await
            }
            "BOOKMARK" => {
                let bookmark = serde_json::from_str(event.object.get()).map_err(Failure::invalid)?;
                self.apply_bookmark(bookmark, initial).await
            }
            "ERROR" => {
                let status: Status = serde_json::from_str(event.object.get()).map_err(Failure::invalid)?;
                Err(Failure::status(status.code, &status.message).into())
            }
            other => {
                debug!(resource = K::PLURAL, "unknown watch event {other:?}");
                Ok(())
            }
        }
    }

    /// Applies a change, if the object could be decoded. `version` is the object's.
    async fn apply(
        &mut self,
        delta: Option<Delta<K>>,
        version: Option<String>,
        initial: &mut InitialObjects<K>,
    ) -> Result<(), End> {
        match (delta, initial) {
            (Some(delta), Some(objects)) => delta.apply_to(objects, K::key),
            (None, Some(_)) => {}
            (delta, None) => {
                if let Some(delta) = delta {
                    self.send(delta).await?;
                }
                self.advance_version(version)?;
            }
        }
        Ok(())
    }

    async fn apply_bookmark(
        &mut self,
        bookmark: Bookmark,
        initial: &mut InitialObjects<K>,
    ) -> Result<(), End> {
        let metadata = bookmark.metadata;
        let is_end = metadata.annotations.is_some_and(|annotations| annotations.initial_events_end.is_some());
        match initial.take_if(|_| is_end) {
            Some(objects) => self.replace(objects, metadata.resource_version).await,
            // A server that streams lists sends no other bookmark before the end of the initial
            // objects.
            None if initial.is_some() => {
                Err(End::NotStreaming("a bookmark came before the end of the initial objects".to_owned()))
            }
            None => self.advance_version(metadata.resource_version),
        }
    }

    async fn replace(
        &mut self,
        objects: BTreeMap<NamespacedName, K>,
        version: Option<String>,
    ) -> Result<(), End> {
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| Failure::invalid("a list without resourceVersion"))?;
        let count = objects.len();
        self.send(Delta::Replace(objects.into_values().collect())).await?;
        self.version = Some(version);
        self.reporter.listed(count);
        Ok(())
    }

    /// Stores the version of the last change. Versions only grow (KEP-5504). If one is lower, the
    /// server was restored from a backup for example. What it lost will not be in any watch, so a
    /// list is needed.
    fn advance_version(&mut self, version: Option<String>) -> Result<(), End> {
        if let Some(version) = version.filter(|version| !version.is_empty()) {
            let number = |version: &str| version.parse::<u64>().ok();
            let before = self.version.as_deref().and_then(number);
            if let (Some(before), Some(now)) = (before, number(&version))
                && now < before
            {
                let message = format!("resource version {now} comes after {before}");
                return Err(Failure::new(FailureClass::OlderData, message).into());
            }
            self.version = Some(version);
        }
        self.reporter.connected();
        Ok(())
    }

    async fn send(&self, delta: Delta<K>) -> Result<(), End> {
        self.tx.send(K::event(delta)).await.map_err(|_| End::ReceiverGone)
    }

    /// Decodes an object. Returns its version and its change: a deletion if its labels exclude it,
    /// and none if it cannot be decoded.
    fn decode(&mut self, object: &RawValue) -> (Option<String>, Option<Delta<K>>) {
        let decoded = match decode::decode_json::<K>(object.get()) {
            Ok(decoded) => decoded,
            Err(problem) => {
                let metadata = decode::decode_metadata(&mut deserializer(object)).unwrap_or_default();
                self.reporter.undecodable(metadata.written_name(), vec![problem]);
                return (metadata.resource_version, None);
            }
        };
        let delta = if let Some(object) = decoded.object {
            self.reporter.decoded(&object.key(), decoded.problems);
            Some(if decoded.selected { Delta::Apply(object) } else { Delta::Delete(object.key()) })
        } else {
            self.reporter.undecodable(decoded.written_name, decoded.problems);
            None
        };
        (decoded.resource_version, delta)
    }
}

fn deserializer(object: &RawValue) -> serde_json::Deserializer<serde_json::de::StrRead<'_>> {
    serde_json::Deserializer::from_str(object.get())
}
