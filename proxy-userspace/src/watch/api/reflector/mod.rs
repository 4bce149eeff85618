//! Lists and watches one kind, and sends its objects and changes to the receiver.

mod incoming;
mod list;

use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info};

use self::incoming::Incoming;
use super::{
    Timing,
    backoff::Backoff,
    failure::{Failure, FailureClass},
    report::Reporter,
    request::{self, Freshness, RequestOptions},
    response::{self, Part, Response},
    wire::{Event, Object},
};
use crate::{
    model::{Delta, SharedValues, WatchEvent},
    net::ContentType,
    watch::decode::{INITIAL_EVENTS_END, Kind, RawMetadata, Text},
};

/// The least duration of a watch that is requested, in seconds. The duration is up to twice as
/// long, like client-go's 5 to 10 minutes.
const WATCH_SECONDS: u32 = 300;

/// After so many watches in a row that brought nothing in time, a list follows.
const MAX_SILENT_WATCHES: u32 = 2;

/// The list and watch of one kind.
pub(super) struct Reflector<K> {
    client: kube::Client,
    options: RequestOptions,
    timing: Timing,
    tx: Sender<WatchEvent>,
    reporter: Reporter,
    /// Values that many objects repeat.
    shared: SharedValues,
    backoff: Backoff,
    /// The resource version that the next watch starts from; none if a list must come first.
    version: Option<String>,
    /// How new the next list must be.
    freshness: Freshness,
    /// A list was complete.
    was_listed: bool,
    /// The server sends lists by pages, although its cache could send them whole.
    has_pages: bool,
    /// How many watches in a row brought nothing in time; none before the first bookmark of a
    /// watch. From a server that sends bookmarks, a watch that works is never silent for long.
    silent_watches: Option<u32>,
    /// When the server refused to stream a list.
    refused_streaming: Option<Instant>,
    /// When the connection was last replaced because of a new client certificate.
    replaced: Option<Instant>,
    /// The server may not have the kind, or not permit to read it.
    is_optional: bool,
    kind: std::marker::PhantomData<fn() -> K>,
}

/// Why a list or watch ended.
enum End {
    /// The receiver is gone.
    ReceiverGone,
    /// The server ended the watch, which it does every few minutes, or sent nothing for too long.
    WatchOver {
        is_settled: bool,
    },
    /// The server does not stream lists.
    NotStreaming(String),
    Failed(Failure),
}

/// When the next attempt to list and watch begins.
enum Attempt {
    AtOnce,
    AfterPause,
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The objects of a streaming list before its end; none after it, when changes come.
type InitialObjects<K> = Option<Incoming<K>>;

impl<K: Kind> Reflector<K> {
    pub(super) fn new(
        client: kube::Client,
        options: RequestOptions,
        timing: Timing,
        tx: Sender<WatchEvent>,
        reporter: Reporter,
    ) -> Self {
        Self {
            client,
            options,
            timing,
            tx,
            reporter,
            shared: SharedValues::default(),
            backoff: Backoff::new(timing),
            version: None,
            freshness: Freshness::Any,
            was_listed: false,
            has_pages: false,
            silent_watches: None,
            refused_streaming: None,
            replaced: None,
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
                () = tx.closed() => return,
            };
            match self.next_attempt(end) {
                Some(Attempt::AtOnce) => continue,
                Some(Attempt::AfterPause) => {}
                None => return,
            }
            tokio::select! {
                () = sleep(self.backoff.pause()) => {}
                () = tx.closed() => return,
            }
        }
    }

    /// Reports how an attempt ended. Returns when the next one begins; `None` if nobody receives
    /// events any more.
    fn next_attempt(&mut self, end: End) -> Option<Attempt> {
        let is_at_once = match end {
            End::ReceiverGone => return None,
            End::WatchOver { is_settled } => {
                debug!(resource = K::PLURAL, "the watch is over; starting the next one");
                is_settled
            }
            End::NotStreaming(why) => {
                if self.refused_streaming.replace(Instant::now()).is_none() {
                    info!(resource = K::PLURAL, "the server does not stream lists: {why}");
                }
                true
            }
            End::Failed(failure) => self.is_repeated_at_once(&failure),
        };
        Some(if is_at_once { Attempt::AtOnce } else { Attempt::AfterPause })
    }

    /// Reports a failure. Returns true if the next attempt need not wait.
    fn is_repeated_at_once(&mut self, failure: &Failure) -> bool {
        if self.options.remove_unknown_field(failure) {
            info!(
                resource = K::PLURAL,
                "the server does not know a field selector, so more objects are read: {failure}"
            );
            return true;
        }
        if failure.class == FailureClass::Replaced {
            debug!(resource = K::PLURAL, "{failure}");
            let last = self.replaced.replace(Instant::now());
            // A plugin may return another certificate each time.
            if last.is_none_or(|last| last.elapsed() >= self.timing.settled) {
                return true;
            }
        } else {
            self.choose_next_request(failure);
        }
        if self.is_optional && failure.class.is_unavailable() {
            self.reporter.unavailable(failure);
        } else {
            self.reporter.failed(failure);
        }
        false
    }

    /// Decides whether a list must follow a failure, and how new it must be. client-go decides alike
    /// (`relistResourceVersion`, `rewatchResourceVersion`).
    fn choose_next_request(&mut self, failure: &Failure) {
        if !failure.invalidates_version() {
            return;
        }
        // The cache has everything after an expired version, and so no server reads from etcd.
        self.freshness = match self.version.take() {
            Some(version) if failure.class == FailureClass::Expired => Freshness::NotOlderThan(version),
            _ => Freshness::Newest,
        };
    }

    fn streams_lists(&self) -> bool {
        self.refused_streaming.is_none_or(|refused| refused.elapsed() >= self.timing.streaming_retry)
    }

    async fn list_and_watch(&mut self) -> End {
        if self.version.is_none()
            && !self.streams_lists()
            && let Err(end) = self.list().await
        {
            return end;
        }
        match self.watch().await {
            Ok(is_settled) => End::WatchOver { is_settled },
            Err(end) => end,
        }
    }

    /// Watches from the last version. Without one, streams the list first. Returns true if the watch
    /// was up for a while.
    async fn watch(&mut self) -> Result<bool, End> {
        let mut initial: InitialObjects<K> = self.version.is_none().then(|| Incoming::new(!self.was_listed));
        let mut response = self.open().await?;
        let opened = Instant::now();
        let mut is_settled = false;
        let mut events = 0_u64;
        loop {
            let limit = if initial.is_some() { self.timing.response } else { self.timing.idle };
            let part = match response.received_event() {
                Ok(None) => tokio::select! {
                    part = response.next_event(limit) => part,
                    () = sleep_until(opened + self.timing.settled), if !is_settled && initial.is_none() => {
                        is_settled = true;
                        self.backoff.reset();
                        self.reporter.connected();
                        continue;
                    }
                },
                // There is no timer for each object of a list.
                Ok(Some(event)) => Ok(Part::Event(event)),
                Err(failure) => Err(failure),
            };
            let has_worked = initial.is_none() && (events > 0 || is_settled);
            match part {
                Ok(Part::Event(event)) => self.read_event(&event, response.encoding(), &mut initial).await?,
                Ok(Part::Timeout) if initial.is_some() => {
                    return Err(End::NotStreaming(format!("no end of the initial objects in {limit:?}")));
                }
                Ok(Part::Timeout) => {
                    if events == 0 {
                        self.was_silent();
                    }
                    return Ok(is_settled);
                }
                Ok(Part::End) if has_worked => return Ok(is_settled),
                Ok(Part::End) => {
                    let missing =
                        if initial.is_some() { "the end of the initial objects" } else { "any event" };
                    let message = format!("the server closed the watch before {missing}");
                    return Err(Failure::new(FailureClass::Disconnected, message).into());
                }
                Err(failure) if has_worked && failure.class != FailureClass::Replaced => {
                    debug!(resource = K::PLURAL, "{failure}");
                    return Ok(is_settled);
                }
                Err(failure) => return Err(failure.into()),
            }
            events += 1;
        }
    }

    /// Decides whether a list must follow a watch that brought nothing for too long. A server that
    /// was restored from a backup accepts a watch from a version that it does not have yet. It
    /// sends nothing, not even a bookmark, until it gets there, and then only what follows.
    fn was_silent(&mut self) {
        let Some(watches) = &mut self.silent_watches else { return };
        *watches += 1;
        if *watches >= MAX_SILENT_WATCHES {
            *watches = 0;
            let version = self.version.take();
            self.freshness = version.map_or(Freshness::Newest, Freshness::NotOlderThan);
        }
    }

    async fn open(&mut self) -> Result<Response, End> {
        // The watches of many nodes must not end at the same moment.
        let seconds = WATCH_SECONDS + fastrand::u32(..WATCH_SECONDS);
        let request = match &self.version {
            Some(version) => request::watch::<K>(&self.options, version, seconds),
            None => request::streaming_list::<K>(&self.options, &self.freshness, seconds),
        };
        response::send(&self.client, request?, self.timing.response).await.map_err(|failure| {
            if self.version.is_none() && failure.refuses_streaming() {
                End::NotStreaming(failure.message)
            } else {
                End::Failed(failure)
            }
        })
    }

    async fn read_event(
        &mut self,
        bytes: &[u8],
        encoding: ContentType,
        initial: &mut InitialObjects<K>,
    ) -> Result<(), End> {
        let Event { event_type, object } = Event::decode(bytes, encoding)?;
        let metadata = |what| {
            let metadata = object.metadata();
            metadata.map_err(|problem| Failure::invalid(format!("{what}: {problem}")))
        };
        match &*event_type {
            "ADDED" | "MODIFIED" => {
                let (version, delta) = self.decode(&object);
                self.apply(delta, version, initial).await
            }
            "DELETED" => {
                let metadata = metadata("deleted object")?;
                let written = metadata.written_name();
                let written = written.ok_or_else(|| Failure::invalid("a deleted object without a name"))?;
                self.reporter.deleted(&written);
                // An object with an invalid name was never applied.
                let delta = K::name_in(&metadata).map(Delta::Delete);
                self.apply(delta, metadata.resource_version, initial).await
            }
            "BOOKMARK" => self.apply_bookmark(metadata("bookmark")?, initial).await,
            "ERROR" => Err(object.status()?.failure().into()),
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
        version: Option<Text<'_>>,
        initial: &mut InitialObjects<K>,
    ) -> Result<(), End> {
        match (delta, initial) {
            (Some(delta), Some(list)) => self.add(delta, list).await?,
            (None, Some(_)) => {}
            (delta, None) => {
                if let Some(delta) = delta {
                    self.send(K::event(delta)).await?;
                }
                self.advance_version(version)?;
            }
        }
        Ok(())
    }

    async fn apply_bookmark(
        &mut self,
        metadata: RawMetadata<'_>,
        initial: &mut InitialObjects<K>,
    ) -> Result<(), End> {
        let is_end = metadata.annotation(INITIAL_EVENTS_END).is_some();
        match initial.take_if(|_| is_end) {
            Some(list) => {
                self.refused_streaming = None;
                self.replace(list, metadata.resource_version).await
            }
            // A server that streams lists sends no other bookmark before the end of the initial
            // objects.
            None if initial.is_some() => {
                Err(End::NotStreaming("a bookmark came before the end of the initial objects".to_owned()))
            }
            None => {
                self.silent_watches = Some(0);
                self.advance_version(metadata.resource_version)
            }
        }
    }

    async fn replace(&mut self, list: Incoming<K>, version: Option<Text<'_>>) -> Result<(), End> {
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| Failure::invalid("a list without resourceVersion"))?;
        let count = self.complete(list).await?;
        self.version = Some(version.into_owned());
        self.was_listed = true;
        self.reporter.listed(count);
        Ok(())
    }

    /// Stores the version of the last change. Versions only grow (KEP-5504). If one is lower, the
    /// server was restored from a backup for example. What it lost will not be in any watch, so a
    /// list is needed.
    fn advance_version(&mut self, version: Option<Text<'_>>) -> Result<(), End> {
        if let Some(version) = version.filter(|version| !version.is_empty()) {
            let number = |version: &str| version.parse::<u64>().ok();
            let before = self.version.as_deref().and_then(number);
            if let (Some(before), Some(now)) = (before, number(&version))
                && now < before
            {
                let message = format!("resource version {now} comes after {before}");
                return Err(Failure::new(FailureClass::OlderData, message).into());
            }
            self.version = Some(version.into_owned());
        }
        self.silent_watches = self.silent_watches.map(|_| 0);
        self.reporter.received();
        self.reporter.connected();
        Ok(())
    }

    async fn send(&self, event: WatchEvent) -> Result<(), End> {
        self.tx.send(event).await.map_err(|_| End::ReceiverGone)
    }

    /// Decodes an object. Returns its version and its change: a deletion if its labels exclude it,
    /// and none if it cannot be decoded.
    fn decode<'a>(&mut self, object: &'a Object<'_>) -> (Option<Text<'a>>, Option<Delta<K>>) {
        let decoded = match object.decode::<K>(&mut self.shared) {
            Ok(decoded) => decoded,
            Err(problem) => {
                let metadata = object.metadata().unwrap_or_default();
                self.reporter.undecodable(metadata.written_name(), vec![problem]);
                return (metadata.resource_version, None);
            }
        };
        let delta = if let Some(object) = decoded.object {
            self.reporter.decoded(|| object.key(), decoded.problems);
            Some(if decoded.selected { Delta::Apply(object) } else { Delta::Delete(object.key()) })
        } else {
            self.reporter.undecodable(decoded.written_name, decoded.problems);
            None
        };
        (decoded.resource_version, delta)
    }
}
