//! What goes wrong between us and the API server.

use std::{fmt, io, time::Duration};

use crate::causes::with_causes;

/// A failed request or watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) class: FailureClass,
    pub(super) message: String,
}

/// What sort of failure; a repetition of the same sort is no news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureClass {
    /// No connection, or it broke before there was an answer.
    Unreachable,
    /// No answer in time.
    Slow,
    /// The connection broke in the middle of an answer.
    Cut,
    /// HTTP 401: the credentials are not accepted.
    Unauthorized,
    /// HTTP 403: the credentials are not enough.
    Forbidden,
    /// HTTP 410: the resource version or continue token is too old.
    Expired,
    /// A version that is lower than one before: the server has older data than it had.
    WentBack,
    /// Any other error status.
    Status(u16),
    /// An answer that makes no sense.
    Garbled,
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable => f.write_str("the API server cannot be reached"),
            Self::Slow => f.write_str("the API server does not answer"),
            Self::Cut => f.write_str("the connection to the API server broke"),
            Self::Unauthorized => f.write_str("the API server does not accept the credentials (401)"),
            Self::Forbidden => f.write_str("the credentials do not allow to list and watch (403)"),
            Self::Expired => f.write_str("the server no longer has the history asked for (410)"),
            Self::WentBack => f.write_str("the API server has gone back to older data"),
            Self::Status(code) => write!(f, "the API server answers with an error ({code})"),
            Self::Garbled => f.write_str("the answer of the API server makes no sense"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.message)
    }
}

impl Failure {
    pub(super) fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into() }
    }

    pub(super) fn garbled(what: impl fmt::Display) -> Self {
        Self::new(FailureClass::Garbled, what.to_string())
    }

    pub(super) fn slow(limit: Duration) -> Self {
        Self::new(FailureClass::Slow, format!("nothing for {limit:?}"))
    }

    pub(super) fn cut(error: &io::Error) -> Self {
        Self::new(FailureClass::Cut, with_causes(error))
    }

    pub(super) fn status(code: u16, message: &str) -> Self {
        let class = match code {
            401 => FailureClass::Unauthorized,
            403 => FailureClass::Forbidden,
            410 => FailureClass::Expired,
            code => FailureClass::Status(code),
        };
        Self::new(class, message)
    }

    pub(super) fn request(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::status(status.code, &status.message),
            error => Self::new(FailureClass::Unreachable, with_causes(error)),
        }
    }

    /// Whether the version that was asked from is of no use any more: watching from it again would fail or mislead for ever.
    pub(super) fn spoils_version(&self) -> bool {
        // 400 and 422 are the answers to a version that is no number.
        matches!(
            self.class,
            FailureClass::Expired
                | FailureClass::Garbled
                | FailureClass::WentBack
                | FailureClass::Status(400 | 422)
        )
    }

    /// Whether a server that cannot or will not stream lists answers like this to the request for one: 400 for query
    /// parameters it does not know, 422 when the `WatchList` feature gate is off.
    pub(super) fn refuses_streaming(&self) -> bool {
        matches!(self.class, FailureClass::Status(400 | 404 | 405 | 406 | 415 | 422 | 501))
    }
}
