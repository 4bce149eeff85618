//! What is reported of each request to the API server, for metrics.

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode};

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
}

/// Gets each request to the API server.
pub type OnApiRequest = Arc<dyn Fn(&ApiRequest<'_>) + Send + Sync>;

/// Returns a receiver of requests that does nothing with them.
pub fn ignore_api_requests() -> OnApiRequest {
    Arc::new(|_| {})
}
