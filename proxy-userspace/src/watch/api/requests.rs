//! Reports each request to the API server and how it ended, for metrics.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use http::{Method, Request, Response, StatusCode};
use tokio::time::Instant;
use tower::Service;

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

/// The HTTP client of the API server, which reports its requests.
#[derive(Clone)]
pub(super) struct Reported<S> {
    inner: S,
    on_request: OnApiRequest,
}

impl<S> Reported<S> {
    pub(super) fn new(inner: S, on_request: &OnApiRequest) -> Self {
        Self { inner, on_request: Arc::clone(on_request) }
    }
}

impl<S, B, R> Service<Request<B>> for Reported<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (method, on_request) = (request.method().clone(), Arc::clone(&self.on_request));
        let host = request.uri().authority().map(|authority| authority.as_str().to_owned());
        let (started, response) = (Instant::now(), self.inner.call(request));
        async move {
            let response = response.await;
            on_request(&ApiRequest {
                method: &method,
                host: host.as_deref().unwrap_or_default(),
                status: response.as_ref().ok().map(Response::status),
                took: started.elapsed(),
            });
            response
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, io, sync::Mutex};

    use tower::{ServiceExt as _, service_fn};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_is_reported_with_its_status_and_time_also_if_it_fails() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let report = Arc::clone(&seen);
        let on_request: OnApiRequest = Arc::new(move |request: &ApiRequest<'_>| {
            let line = (request.method.to_string(), request.host.to_owned(), request.status, request.took);
            report.lock().expect("no panic").push(line);
        });
        let server = service_fn(|request: Request<()>| async move {
            tokio::time::sleep(Duration::from_millis(7)).await;
            let status = if request.method() == Method::POST { 201 } else { 410 };
            Ok::<_, Infallible>(Response::builder().status(status).body(()).expect("a response"))
        });
        let request = |method: Method| Request::builder().method(method).uri("https://10.0.0.1:6443/api/v1");
        for method in [Method::GET, Method::POST] {
            let client = Reported::new(server, &on_request);
            drop(client.oneshot(request(method).body(()).expect("a request")).await);
        }
        let broken = service_fn(|_: Request<()>| async {
            Err::<Response<()>, _>(io::Error::from(io::ErrorKind::ConnectionRefused))
        });
        let client = Reported::new(broken, &on_request);
        assert!(client.oneshot(request(Method::GET).body(()).expect("a request")).await.is_err());
        let line = |method: &str, status: Option<StatusCode>, millis: u64| {
            (method.to_owned(), "10.0.0.1:6443".to_owned(), status, Duration::from_millis(millis))
        };
        let expected = [
            line("GET", Some(StatusCode::GONE), 7),
            line("POST", Some(StatusCode::CREATED), 7),
            line("GET", None, 0),
        ];
        assert_eq!(*seen.lock().expect("no panic"), expected);
    }
}
