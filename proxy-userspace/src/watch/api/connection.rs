//! One connection to the API server for all requests, with the credentials of the moment.
//!
//! hyper-util's pool is not used: requests that start together each open a connection there, and it
//! knows only one address and one client certificate.

use std::{
    sync::{Arc, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::{
    HeaderValue, Request, Response, StatusCode, Uri,
    header::{AUTHORIZATION, HOST, PROXY_AUTHORIZATION, USER_AGENT},
    uri::PathAndQuery,
};
use hyper::body::Incoming;
use kube::client::Body;
use tokio::{sync::Mutex, time::Instant};
use tower::{BoxError, Service};

use super::{
    credentials::{Credential, CredentialError, Credentials, Identity},
    dial::{Connection, DialError, Dialer, Sender, Target},
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
    /// One connection with HTTP/2, or one with HTTP/1.1 for each request at a time.
    open: std::sync::Mutex<Vec<Connection>>,
    /// Held while a connection is opened, so that requests wait for it and share it. Has the time and
    /// the cause of the last failure.
    dialing: Mutex<Option<(Instant, Arc<str>)>>,
}

/// Why there was no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Dial(Arc<str>),
    #[error("cannot get credentials")]
    Credentials(#[from] CredentialError),
    #[error("invalid URL")]
    Url(#[from] http::Error),
    #[error("the request failed")]
    Request(#[from] hyper::Error),
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
        let (open, dialing) = (std::sync::Mutex::default(), Mutex::default());
        let on_request = Arc::clone(on_request);
        Self(Arc::new(Shared { dialer, credentials, on_request, user_agent, open, dialing }))
    }
}

impl Service<Request<Body>> for ApiConnection {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let (method, started) = (request.method().clone(), Instant::now());
            let mut target = shared.dialer.first();
            let response = shared.send(request, &mut target).await;
            (shared.on_request)(&ApiRequest {
                method: &method,
                host: target.host_and_port(),
                status: response.as_ref().ok().map(Response::status),
                took: started.elapsed(),
                date: response.as_ref().ok().and_then(|response| date_of(response.headers())),
            });
            Ok(response?)
        })
    }
}

impl Shared {
    /// Sends a request. Sets `target` to the address that got it.
    async fn send(
        &self,
        mut request: Request<Body>,
        target: &mut Arc<Target>,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let credential = self.credentials.current().await?;
        request.headers_mut().insert(USER_AGENT, self.user_agent.clone());
        if let Some(authorization) = &credential.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let path = request.uri().path_and_query().cloned();
        loop {
            let (mut connection, is_new) = self.connection(&credential).await?;
            target.clone_from(&connection.target);
            address(&mut request, &connection, path.as_ref())?;
            let sent = match &mut connection.sender {
                Sender::Http2(sender) => sender.try_send_request(request).await,
                Sender::Http1(sender) => sender.try_send_request(request).await,
            };
            match sent {
                Ok(response) => {
                    self.give_back(connection);
                    if response.status() == StatusCode::UNAUTHORIZED {
                        self.credentials.reject(&credential).await;
                    }
                    return Ok(response);
                }
                // The connection ended before it took the request.
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    _ => return Err(error.into_error().into()),
                },
            }
        }
    }

    /// Returns a connection for one request, and true if it is new.
    async fn connection(&self, credential: &Credential) -> Result<(Connection, bool), ConnectionError> {
        let identity = credential.identity.as_ref();
        if let Some(connection) = self.take(identity) {
            return Ok((connection, false));
        }
        let began = Instant::now();
        let mut failure = self.dialing.lock().await;
        // Another request may have opened it, or failed to, meanwhile.
        if let Some(connection) = self.take(identity) {
            return Ok((connection, false));
        }
        if let Some((_, why)) = failure.as_ref().filter(|(failed, _)| *failed >= began) {
            return Err(ConnectionError::Dial(Arc::clone(why)));
        }
        match self.dialer.connect(credential.identity.clone()).await {
            Ok(connection) => {
                *failure = None;
                self.open().extend(connection.share());
                Ok((connection, true))
            }
            Err(errors) => {
                let why: Arc<str> = one_line(&errors).into();
                *failure = Some((Instant::now(), Arc::clone(&why)));
                Err(ConnectionError::Dial(why))
            }
        }
    }

    /// Makes a connection with HTTP/1.1 available again, once its response was read.
    fn give_back(&self, connection: Connection) {
        if matches!(connection.sender, Sender::Http1(_)) {
            self.open().push(connection);
        }
    }

    /// Returns a connection that can take a request. Breaks connections whose client certificate
    /// was replaced.
    fn take(&self, identity: Option<&Arc<Identity>>) -> Option<Connection> {
        let mut open = self.open();
        open.retain(|connection| {
            let is_current = connection.identity.as_ref() == identity;
            if !is_current {
                connection.task.abort();
            }
            is_current && !connection.is_closed()
        });
        let ready = open.iter().position(Connection::is_ready)?;
        match open[ready].share() {
            Some(shared) => Some(shared),
            None => Some(open.swap_remove(ready)),
        }
    }

    fn open(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Returns another sender for the same connection, if it carries several requests at once.
    fn share(&self) -> Option<Self> {
        let Sender::Http2(sender) = &self.sender else { return None };
        Some(Self {
            sender: Sender::Http2(sender.clone()),
            target: Arc::clone(&self.target),
            identity: self.identity.clone(),
            task: self.task.clone(),
        })
    }

    fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::Http2(sender) => sender.is_closed(),
            Sender::Http1(sender) => sender.is_closed(),
        }
    }

    fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http2(sender) => sender.is_ready(),
            Sender::Http1(sender) => sender.is_ready(),
        }
    }
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
