//! One connection to the API server for all requests, with the credentials of the moment.
//!
//! hyper-util's pool is not used: requests that start together each open a connection there, and it
//! knows only one address and one client certificate.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{AUTHORIZATION, HOST, PROXY_AUTHORIZATION, USER_AGENT},
    uri::PathAndQuery,
};
use kube::client::Body;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};
use tower::{BoxError, Service};

use super::{
    breaker::{Breaker, CertificateReplaced, ResponseBody},
    credentials::{Credential, CredentialError, Credentials},
    dial::{Connection, DialError, Dialer, Sender, Target},
    pool::Pool,
    requests::{ApiRequest, OnApiRequest, date_of},
};
use crate::causes::with_causes;

/// Sends requests to the API server.
#[derive(Clone)]
pub(super) struct ApiConnection(Arc<Shared>);

struct Shared {
    dialer: Arc<Dialer>,
    credentials: Credentials,
    on_request: OnApiRequest,
    user_agent: HeaderValue,
    pool: Pool,
    /// Held while a connection is opened, so that requests wait for it and share it. Has the time and
    /// the cause of the last failure.
    dialing: Mutex<Option<(Instant, Arc<str>)>>,
}

/// An extension of a request: how long the head of its response may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResponseLimit(pub(super) Duration);

/// An extension of a response: the server that sends it.
#[derive(Clone)]
pub(super) struct Origin {
    shared: Arc<Shared>,
    peer: Peer,
}

impl Origin {
    /// Makes the next requests go to another server, or at least on another connection, because the
    /// rest of the response does not come in time.
    pub(super) fn leave(&self) {
        self.shared.leave(&self.peer, true);
    }
}

/// What a request is sent to: an address, and the connection once there is one.
#[derive(Clone)]
struct Peer {
    target: Arc<Target>,
    connection: Option<Breaker>,
}

/// Why there was no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Dial(Arc<str>),
    #[error("cannot get credentials")]
    Credentials(#[from] Arc<CredentialError>),
    #[error("invalid URL")]
    Url(#[from] http::Error),
    #[error("the request failed")]
    Request(#[from] hyper::Error),
    #[error(transparent)]
    Replaced(#[from] CertificateReplaced),
    #[error("nothing within {0:?}")]
    Timeout(Duration),
}

impl ApiConnection {
    pub(super) fn new(dialer: Arc<Dialer>, credentials: Credentials, on_request: &OnApiRequest) -> Self {
        let user_agent = format!(
            "shunt/{} ({}/{})",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::OS,
            std::env::consts::ARCH
        );
        let user_agent =
            HeaderValue::try_from(user_agent).unwrap_or_else(|_| HeaderValue::from_static("shunt"));
        let (pool, dialing) = (Pool::default(), Mutex::default());
        let on_request = Arc::clone(on_request);
        Self(Arc::new(Shared { dialer, credentials, on_request, user_agent, pool, dialing }))
    }
}

impl Service<Request<Body>> for ApiConnection {
    type Response = Response<ResponseBody>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move { Ok(shared.send(request).await?) })
    }
}

impl Shared {
    /// Sends a request. If a server answers that it cannot serve now, the next one gets the request
    /// at once, until each had it. Requests that change something are sent once.
    async fn send(
        self: &Arc<Self>,
        mut request: Request<Body>,
    ) -> Result<Response<ResponseBody>, ConnectionError> {
        let mut others = self.dialer.addresses().saturating_sub(1);
        loop {
            let copy = copy_of_read(&request).filter(|_| others > 0);
            let response = self.attempt(request).await?;
            match copy {
                Some(copy) if is_unable(response.status()) => request = copy,
                _ => return Ok(response),
            }
            others -= 1;
        }
    }

    /// Sends a request to one server, and reports it. Leaves a server that cannot serve now.
    async fn attempt(
        self: &Arc<Self>,
        request: Request<Body>,
    ) -> Result<Response<ResponseBody>, ConnectionError> {
        let (method, started) = (request.method().clone(), Instant::now());
        let mut peer = Peer { target: self.dialer.first(), connection: None };
        let mut response = self.authenticate_and_send(request, &mut peer).await;
        (self.on_request)(&ApiRequest {
            method: &method,
            host: peer.target.host_and_port(),
            status: response.as_ref().ok().map(Response::status),
            took: started.elapsed(),
            date: response.as_ref().ok().and_then(|response| date_of(response.headers())),
        });
        match &mut response {
            Ok(response) if !is_unable(response.status()) => {
                response.extensions_mut().insert(Origin { shared: Arc::clone(self), peer });
            }
            // A webhook may refuse what is written, with the same answer from each server.
            Ok(response) if method != Method::GET && !is_gateway_error(response.status()) => {}
            Ok(response) => self.leave(&peer, is_gateway_error(response.status())),
            Err(ConnectionError::Timeout(_)) => self.leave(&peer, true),
            Err(_) => {}
        }
        response
    }

    async fn authenticate_and_send(
        &self,
        mut request: Request<Body>,
        peer: &mut Peer,
    ) -> Result<Response<ResponseBody>, ConnectionError> {
        let limit = request.extensions_mut().remove::<ResponseLimit>();
        let credential = self.credentials.current().await?;
        request.headers_mut().insert(USER_AGENT, self.user_agent.clone());
        if let Some(authorization) = &credential.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let exchange = self.exchange(request, &credential, peer);
        let response = match limit {
            Some(ResponseLimit(limit)) => {
                timeout(limit, exchange).await.map_err(|_| ConnectionError::Timeout(limit))??
            }
            None => exchange.await?,
        };
        if response.status() == StatusCode::UNAUTHORIZED {
            self.credentials.reject(&credential).await;
            // It may still have a client certificate that was replaced since.
            if credential.identity.is_some() || self.dialer.has_identity_files() {
                self.leave_connection(peer);
            }
        }
        Ok(response)
    }

    /// Sends a request on a connection. Sets `peer` to the one that got it.
    async fn exchange(
        &self,
        mut request: Request<Body>,
        credential: &Credential,
        peer: &mut Peer,
    ) -> Result<Response<ResponseBody>, ConnectionError> {
        let path = request.uri().path_and_query().cloned();
        loop {
            let (mut connection, is_new) = self.connection(credential).await?;
            let breaker = connection.breaker.clone();
            *peer = Peer { target: Arc::clone(&connection.target), connection: Some(breaker.clone()) };
            address(&mut request, &connection, path.as_ref())?;
            let sent = match &mut connection.sender {
                Sender::Http2(sender) => sender.try_send_request(request).await,
                Sender::Http1(sender) => sender.try_send_request(request).await,
            };
            match sent {
                Ok(response) => {
                    if Arc::ptr_eq(&connection.target, &self.dialer.first()) {
                        self.pool.give_back(connection);
                    }
                    return Ok(response.map(|body| ResponseBody { body, breaker }));
                }
                // The connection ended before it took the request.
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    _ if breaker.has_broken() => return Err(CertificateReplaced.into()),
                    _ => return Err(error.into_error().into()),
                },
            }
        }
    }

    /// Returns a connection for one request, and true if it is new.
    async fn connection(&self, credential: &Credential) -> Result<(Connection, bool), ConnectionError> {
        if let Some(connection) = self.pool.take(credential) {
            return Ok((connection, false));
        }
        let began = Instant::now();
        let mut failure = self.dialing.lock().await;
        // Another request may have opened it, or failed to, meanwhile.
        if let Some(connection) = self.pool.take(credential) {
            return Ok((connection, false));
        }
        if let Some((_, why)) = failure.as_ref().filter(|(failed, _)| *failed >= began) {
            return Err(ConnectionError::Dial(Arc::clone(why)));
        }
        match self.dialer.connect(credential.identity.clone()).await {
            Ok(connection) => {
                *failure = None;
                // The server may have been left meanwhile.
                let is_shared = Arc::ptr_eq(&connection.target, &self.dialer.first());
                self.pool.add(&connection, is_shared);
                Ok((connection, true))
            }
            Err(errors) => {
                let why: Arc<str> = one_line(&errors).into();
                *failure = Some((Instant::now(), Arc::clone(&why)));
                Err(ConnectionError::Dial(why))
            }
        }
    }

    /// Makes the next requests go to another server. If there is none and the server hangs, they go
    /// at least on another connection: there may be other servers behind the same address.
    fn leave(&self, peer: &Peer, is_hung: bool) {
        if self.dialer.leave(&peer.target) {
            self.pool.leave(&peer.target);
        } else if is_hung {
            self.leave_connection(peer);
        }
    }

    /// Keeps new requests away from a connection. Its responses go on.
    fn leave_connection(&self, peer: &Peer) {
        peer.connection.iter().for_each(|connection| self.pool.leave_connection(connection));
    }
}

/// Returns true for an answer of a server that is overloaded, broken, or not ready. Another server
/// may be able to serve.
fn is_unable(status: StatusCode) -> bool {
    is_gateway_error(status) || matches!(status.as_u16(), 429 | 500)
}

fn is_gateway_error(status: StatusCode) -> bool {
    matches!(status.as_u16(), 502..=504)
}

/// Copies a request, if it only reads.
fn copy_of_read(request: &Request<Body>) -> Option<Request<Body>> {
    if request.method() != Method::GET {
        return None;
    }
    let mut copy = Request::new(request.body().try_clone()?);
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    copy.extensions_mut().extend(request.extensions().clone());
    Some(copy)
}

/// Writes URL and headers for a connection.
fn address(
    request: &mut Request<Body>,
    connection: &Connection,
    path: Option<&PathAndQuery>,
) -> Result<(), http::Error> {
    let Target { url, .. } = &*connection.target;
    let path = format!("{}{}", url.path().trim_end_matches('/'), path.map_or("/", PathAndQuery::as_str));
    let authority = connection.target.host_and_port();
    let absolute = || {
        let scheme = url.scheme_str().unwrap_or("https");
        Uri::builder().scheme(scheme).authority(authority).path_and_query(&*path).build()
    };
    if matches!(connection.sender, Sender::Http2(_)) {
        *request.uri_mut() = absolute()?;
        return Ok(());
    }
    request.headers_mut().insert(HOST, HeaderValue::try_from(authority)?);
    if let Some(proxy) = connection.target.forwarding_proxy() {
        *request.uri_mut() = absolute()?;
        if let Some(credentials) = &proxy.credentials {
            request.headers_mut().insert(PROXY_AUTHORIZATION, credentials.authorization());
        }
    } else {
        *request.uri_mut() = path.parse().map_err(http::Error::from)?;
    }
    Ok(())
}

fn one_line(errors: &[DialError]) -> String {
    errors.iter().map(|error| with_causes(error)).collect::<Vec<_>>().join("; ")
}
