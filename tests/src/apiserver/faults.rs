//! Faults of the API server that a test can inject.

use std::time::Duration;

use super::Request;

/// The time between a part of a body and the break of its connection. Without it, hyper closes the
/// connection before it has written the part.
pub(super) const BREAK_DELAY: Duration = Duration::from_millis(20);

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A list or a page of one.
    List,
    /// A watch without `sendInitialEvents`.
    Watch,
    /// A watch with `sendInitialEvents`: a streaming list.
    WatchList,
    /// A patch of an object. Of the faults, it knows those that are an HTTP status.
    Patch,
}

/// A fault: what the server does instead of the correct answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// 401, for credentials that are not accepted.
    Unauthorized,
    /// 403, for a missing permission.
    Forbidden,
    /// HTTP 410, as for a resource version that has expired.
    Gone,
    /// HTTP 410 for requests with a continue token. Other requests are answered.
    ExpireContinue,
    /// HTTP 500.
    InternalError,
    /// HTTP 503.
    Unavailable,
    /// HTTP 422, the answer to `sendInitialEvents` without the `WatchList` feature gate.
    RefuseStreaming,
    /// Ignores `sendInitialEvents`, as servers before 1.27 do: an ordinary watch, without the
    /// bookmark that ends the initial objects.
    IgnoreStreaming,
    /// Never answers.
    Hang,
    /// Sends the response headers and then nothing.
    HangAfterHead,
    /// Breaks the connection in the middle of the body.
    BreakMidBody,
    /// 200 and an empty body.
    EmptyBody,
    /// A watch whose first event is an `ERROR` with 410.
    ExpiredInStream,
    /// 200 and a body that is neither JSON nor protobuf.
    NotJson,
    /// Answers correctly after a delay.
    Slow,
    /// A watch whose changes have wrong resource versions.
    WrongVersions(WrongVersion),
}

/// How the resource versions of changes are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrongVersion {
    /// Each version is 1.
    Low,
    /// The versions are far ahead of the real ones.
    High,
    /// The versions are not numbers.
    NotANumber,
    /// The versions are missing.
    Missing,
}

impl WrongVersion {
    /// Returns the text to send in place of a version.
    pub(super) fn text(self, version: u64) -> String {
        match self {
            Self::Low => "1".to_owned(),
            Self::High => (version + 1_000_000).to_string(),
            Self::NotANumber => "nonsense".to_owned(),
            Self::Missing => String::new(),
        }
    }
}

/// What to do to the watches that are open now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    /// End the watches between two events, as the server does after `timeoutSeconds`.
    End,
    /// Break the connection in the middle of an event.
    BreakMidEvent,
    /// Send an `ERROR` with 410, and end.
    Expire,
    /// Keep the watches open, but send nothing any more.
    Stall,
    /// Send a bookmark.
    Bookmark,
}

/// The requests that a fault applies to, and how often.
#[derive(Clone, Debug)]
pub(super) struct FaultRule {
    pub(super) plural: Option<&'static str>,
    pub(super) verb: Option<Verb>,
    pub(super) faults: Fault,
    pub(super) times: usize,
}

impl FaultRule {
    pub(super) fn matches(&self, request: &Request) -> bool {
        let continues = request.query.get("continue").is_some();
        self.times > 0
            && self.plural.is_none_or(|plural| plural == request.plural)
            && self.verb.is_none_or(|verb| verb == request.verb)
            && (continues || self.faults != Fault::ExpireContinue)
    }
}
