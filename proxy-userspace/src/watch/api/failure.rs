//! Failed requests and watches.

use std::{error::Error, fmt, io, iter, time::Duration};

use super::{breaker::CertificateReplaced, connection::ConnectionError};
use crate::causes::with_causes;

/// Why a request or watch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) class: FailureClass,
    pub(super) message: String,
}

/// The class of a failure. Only a failure of another class than the last one is logged as a
/// warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureClass {
    /// There is no connection, or it broke before the response.
    Unreachable,
    /// There are no credentials, because of a plugin for example.
    Credentials,
    /// There was no response in time.
    Timeout,
    /// The connection broke within a response.
    Disconnected,
    /// shunt closed the connection, because its client certificate was replaced. A new connection
    /// works at once.
    Replaced,
    /// HTTP 401: the server rejects the credentials.
    Unauthorized,
    /// HTTP 403: the credentials do not have the permission.
    Forbidden,
    /// HTTP 410: the resource version or continue token is too old.
    Expired,
    /// The requested resource version is higher than the server's.
    TooNew,
    /// The resource version is lower than one before: the server lost data.
    OlderData,
    /// Any other error status.
    Status(u16),
    /// The response cannot be decoded.
    Invalid,
}

impl FailureClass {
    /// Returns true if the server does not have the kind, or if shunt may not read it.
    pub(super) const fn is_unavailable(self) -> bool {
        matches!(self, Self::Forbidden | Self::Status(404))
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable => f.write_str("cannot connect to the API server"),
            Self::Credentials => f.write_str("there are no credentials for the API server"),
            Self::Timeout => f.write_str("the API server does not respond"),
            Self::Disconnected => f.write_str("the connection to the API server broke"),
            Self::Replaced => f.write_str("the connection to the API server had to be replaced"),
            Self::Unauthorized => f.write_str("the API server rejects the credentials (401)"),
            Self::Forbidden => f.write_str("the credentials do not permit this (403)"),
            Self::Expired => f.write_str("the requested resource version has expired (410)"),
            Self::TooNew => f.write_str("the API server does not have the requested resource version yet"),
            Self::OlderData => f.write_str("the API server returns older data than before"),
            Self::Status(code) => write!(f, "the API server returned an error ({code})"),
            Self::Invalid => f.write_str("cannot decode the response of the API server"),
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

    pub(super) fn invalid(what: impl fmt::Display) -> Self {
        Self::new(FailureClass::Invalid, what.to_string())
    }

    pub(super) fn timeout(limit: Duration) -> Self {
        Self::new(FailureClass::Timeout, format!("nothing within {limit:?}"))
    }

    pub(super) fn disconnected(error: &(dyn Error + 'static)) -> Self {
        let class = if is_replacement(error) { FailureClass::Replaced } else { FailureClass::Disconnected };
        Self::new(class, with_causes(error))
    }

    pub(super) fn status(code: u16, message: &str) -> Self {
        let class = match code {
            401 => FailureClass::Unauthorized,
            403 => FailureClass::Forbidden,
            410 => FailureClass::Expired,
            // Not all servers name the cause `ResourceVersionTooLarge` in the details.
            504 if message.contains("Too large resource version") => FailureClass::TooNew,
            code => FailureClass::Status(code),
        };
        Self::new(class, message)
    }

    pub(super) fn request(error: &kube::Error) -> Self {
        let cause = match error {
            kube::Error::Service(cause) => cause.downcast_ref::<ConnectionError>(),
            _ => None,
        };
        match cause {
            Some(ConnectionError::Timeout(limit)) => Self::timeout(*limit),
            Some(ConnectionError::Credentials(cause)) => {
                Self::new(FailureClass::Credentials, with_causes(&**cause))
            }
            Some(ConnectionError::Replaced(replaced)) => Self::disconnected(replaced),
            _ => Self::new(FailureClass::Unreachable, with_causes(error)),
        }
    }

    /// Returns true if the requested resource version must not be used again: a watch from it would
    /// fail or miss changes forever.
    pub(super) fn invalidates_version(&self) -> bool {
        use FailureClass as Class;
        // A server answers 400 or 422 to a version that is not a number.
        matches!(
            self.class,
            Class::Expired | Class::TooNew | Class::Invalid | Class::OlderData | Class::Status(400 | 422)
        )
    }

    /// Returns true if a server that does not stream lists answers like this to the request for
    /// one: 400 for query parameters that it does not know, 422 when the `WatchList` feature gate
    /// is off.
    pub(super) fn refuses_streaming(&self) -> bool {
        matches!(self.class, FailureClass::Status(400 | 404 | 405 | 406 | 415 | 422 | 501))
    }
}

/// Returns true if shunt itself closed the connection.
fn is_replacement(error: &(dyn Error + 'static)) -> bool {
    iter::successors(Some(error), |error| cause_of(*error)).any(<dyn Error>::is::<CertificateReplaced>)
}

/// Returns the cause of an error. The `source` of an I/O error is the source of the error inside
/// it.
fn cause_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inside) => Some(inside),
        None => error.source(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_certificate_is_found_within_other_errors() {
        let inside = io::Error::other(CertificateReplaced);
        let failure = Failure::disconnected(&kube::Error::Service(Box::new(io::Error::other(inside))));
        assert_eq!(failure.class, FailureClass::Replaced);
        let failure = Failure::disconnected(&io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(failure.class, FailureClass::Disconnected);
    }
}
