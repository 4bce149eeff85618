//! What is reported of each request to the API server, for metrics.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, Method, StatusCode, header::DATE};
use jiff::{Timestamp, fmt::rfc2822::DateTimeParser};

/// A request to the API server whose response has begun, or which failed.
#[derive(Clone, Copy, Debug)]
pub struct ApiRequest<'a> {
    /// The HTTP method.
    pub method: &'a Method,
    /// The server as the URL names it, with its port.
    pub host: &'a str,
    /// The status of the response. `None` if there was none.
    pub status: Option<StatusCode>,
    /// The time until the head of the response.
    pub took: Duration,
    /// The time of the server in the response (`Date`), exact to a second.
    pub date: Option<Timestamp>,
}

/// Gets each request to the API server.
pub type OnApiRequest = Arc<dyn Fn(&ApiRequest<'_>) + Send + Sync>;

/// Returns a receiver of requests that does nothing with them.
pub fn ignore_api_requests() -> OnApiRequest {
    Arc::new(|_| {})
}

/// Returns the time of the server. HTTP dates are dates of RFC 2822 (RFC 9110, section 5.6.7).
pub(super) fn date_of(headers: &HeaderMap) -> Option<Timestamp> {
    let date = headers.get(DATE)?.to_str().ok()?;
    DateTimeParser::new().parse_timestamp(date).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_of_a_response_is_the_time_of_the_server() {
        let mut headers = HeaderMap::new();
        assert_eq!(date_of(&headers), None);
        headers.insert(DATE, "Sun, 06 Nov 1994 08:49:37 GMT".parse().expect("a header"));
        assert_eq!(date_of(&headers), Timestamp::from_second(784_111_777).ok());
        headers.insert(DATE, "yesterday".parse().expect("a header"));
        assert_eq!(date_of(&headers), None);
    }
}
