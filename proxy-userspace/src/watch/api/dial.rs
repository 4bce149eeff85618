//! Opens connections to the API server, at the first of its addresses that answers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use http::{Uri, uri::Scheme};
use hyper::client::conn::{http1, http2};
use hyper_util::{
    client::legacy::connect::HttpConnector,
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use kube::client::Body;
use tokio::time::{sleep, timeout};
use tower::{BoxError, ServiceExt as _};
use tracing::{debug, info};

use super::{
    breaker::Breaker,
    credentials::Identity,
    proxy::Proxy,
    tls::{HTTP2, Tls},
    tunnel::{self, Stream},
};

/// The limit for a TCP connection, and for TLS after it.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an address has before the next one is tried too.
const HEAD_START: Duration = Duration::from_secs(1);
/// How often the files of the client certificate are compared with those of the connection.
const ROTATION_CHECK: Duration = Duration::from_mins(1);

/// How a server that has disappeared is noticed.
#[derive(Clone, Copy)]
struct Probing {
    /// How long nothing comes before the peer is probed.
    idle: Duration,
    /// How long the peer may take to answer.
    answer: Duration,
}

impl Probing {
    /// The values of client-go.
    const OF_ONE_ADDRESS: Self = Self { idle: Duration::from_secs(30), answer: Duration::from_secs(15) };
    /// With another address, the change to it should take less than ten seconds.
    const OF_SEVERAL_ADDRESSES: Self = Self { idle: Duration::from_secs(4), answer: Duration::from_secs(2) };
}

/// An address of the API server, and the proxy in front of it.
pub(super) struct Target {
    pub(super) url: Uri,
    pub(super) proxy: Option<Proxy>,
}

impl Target {
    /// Returns the proxy that reads the requests, if there is one.
    pub(super) fn forwarding_proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref().filter(|proxy| proxy.forwards_to(&self.url))
    }

    /// Returns true if a connection has TLS, with the server or with the proxy.
    pub(super) fn uses_tls(&self) -> bool {
        let addresses = [Some(&self.url), self.proxy.as_ref().map(|proxy| &proxy.address)];
        addresses.into_iter().flatten().any(|address| address.scheme() == Some(&Scheme::HTTPS))
    }

    /// Returns the host as the URL names it, with its port if the URL has one.
    pub(super) fn host_and_port(&self) -> &str {
        self.url.authority().map_or("", http::uri::Authority::as_str)
    }

    fn error(&self, source: impl Into<BoxError>) -> DialError {
        DialError::Server { url: self.url.clone(), source: source.into() }
    }
}

/// Sends requests on a connection.
pub(super) enum Sender {
    /// Carries any number of requests at once.
    Http2(http2::SendRequest<Body>),
    /// Carries one request after the other.
    Http1(http1::SendRequest<Body>),
}

/// An open connection. It stays open while it has a sender or a response, and is not broken.
pub(super) struct Connection {
    pub(super) sender: Sender,
    pub(super) target: Arc<Target>,
    /// The client certificate of the credential plugin.
    pub(super) identity: Option<Arc<Identity>>,
    pub(super) breaker: Breaker,
}

/// Why no address could be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("cannot connect through the proxy {proxy}")]
    Proxy { proxy: String, source: BoxError },
    #[error("{url}: no TLS within {} s", STEP_TIMEOUT.as_secs())]
    TlsTimeout { url: Uri },
    #[error("{url}")]
    Server { url: Uri, source: BoxError },
}

/// Opens connections.
pub(super) struct Dialer {
    targets: Vec<Arc<Target>>,
    /// The index of the address to try first.
    first: Arc<AtomicUsize>,
    /// The index of the address of the last connection.
    last: AtomicUsize,
    tcp: HttpConnector,
    tls: Arc<Tls>,
    probing: Probing,
}

impl Dialer {
    /// Connects to one of `targets`. Nodes start with different ones, to spread the load.
    pub(super) fn new(targets: Vec<Target>, tls: Tls) -> Arc<Self> {
        let probing = if targets.len() > 1 { Probing::OF_SEVERAL_ADDRESSES } else { Probing::OF_ONE_ADDRESS };
        let start = fastrand::usize(..targets.len().max(1));
        let (first, last) = (Arc::new(AtomicUsize::new(start)), AtomicUsize::new(start));
        let targets = targets.into_iter().map(Arc::new).collect();
        Arc::new(Self { targets, first, last, tcp: tcp_connector(probing), tls: Arc::new(tls), probing })
    }

    /// Returns the address that is tried first.
    pub(super) fn first(&self) -> Arc<Target> {
        Arc::clone(&self.targets[self.first.load(Ordering::Relaxed)])
    }

    /// Returns the number of addresses.
    pub(super) fn addresses(&self) -> usize {
        self.targets.len()
    }

    /// Returns true if the client certificate comes from files.
    pub(super) fn has_identity_files(&self) -> bool {
        self.tls.identity_paths().is_some()
    }

    /// Makes the next connection start with the address after `target`, which does not serve now.
    /// Returns false if there is only one address.
    pub(super) fn leave(&self, target: &Arc<Target>) -> bool {
        let index = self.targets.iter().position(|other| Arc::ptr_eq(other, target));
        let Some(index) = index.filter(|_| self.targets.len() > 1) else { return false };
        // Another request may have left it before.
        move_on(&self.first, index, self.targets.len());
        true
    }

    /// Opens a connection to the address that worked last, or else to the first one that answers.
    /// Returns the errors of all addresses if none does.
    pub(super) async fn connect(
        self: &Arc<Self>,
        identity: Option<Arc<Identity>>,
    ) -> Result<Connection, Vec<DialError>> {
        let first = self.first.load(Ordering::Relaxed);
        let count = self.targets.len();
        let mut waiting = (0..count).map(|offset| (first + offset) % count);
        let mut attempts = FuturesUnordered::new();
        let mut errors = Vec::new();
        let mut next =
            || waiting.next().map(|index| Arc::clone(self).attempt(index, first, identity.clone()).boxed());
        attempts.extend(next());
        while !attempts.is_empty() {
            tokio::select! {
                Some(result) = attempts.next() => match result {
                    Ok(connection) => return Ok(connection),
                    Err(error) => {
                        errors.push(error);
                        attempts.extend(next());
                    }
                },
                () = sleep(HEAD_START), if attempts.len() + errors.len() < count => attempts.extend(next()),
            }
        }
        Err(errors)
    }

    /// Opens a connection to the address `index`. `first` is the address that was tried first.
    async fn attempt(
        self: Arc<Self>,
        index: usize,
        first: usize,
        identity: Option<Arc<Identity>>,
    ) -> Result<Connection, DialError> {
        let target = Arc::clone(&self.targets[index]);
        let files = self.tls.identity_files();
        let (stream, protocol) = self.open(&target, identity.clone()).await?;
        let (breaker, stream) = Breaker::new(stream);
        let io = TokioIo::new(stream);
        let sender = if protocol.as_deref() == Some(HTTP2) {
            let (sender, connection) =
                self.http2().handshake(io).await.map_err(|error| target.error(error))?;
            self.drive(index, connection, breaker.clone());
            Sender::Http2(sender)
        } else {
            let (sender, connection) = http1::handshake(io).await.map_err(|error| target.error(error))?;
            self.drive(index, connection, breaker.clone());
            Sender::Http1(sender)
        };
        self.follow_files(files, breaker.clone());
        // Another request may have left the address meanwhile.
        let _ = self.first.compare_exchange(first, index, Ordering::Relaxed, Ordering::Relaxed);
        if self.last.swap(index, Ordering::Relaxed) != index {
            info!(server = %target.url, "using another address of the API server");
        }
        Ok(Connection { sender, target, identity, breaker })
    }

    /// Opens a stream, with TLS if the server has it.
    async fn open(
        &self,
        target: &Target,
        identity: Option<Arc<Identity>>,
    ) -> Result<(Stream, Option<Vec<u8>>), DialError> {
        let stream = match &target.proxy {
            None => self.tcp(target.url.clone()).await.map_err(|error| target.error(error))?,
            Some(proxy) => self
                .through(proxy, target.url.clone())
                .await
                .map_err(|source| DialError::Proxy { proxy: proxy.to_string(), source })?,
        };
        if target.url.scheme() == Some(&Scheme::HTTP) {
            return Ok((stream, None));
        }
        let secured = self.tls.connect(stream, target.url.host().unwrap_or_default(), identity);
        match timeout(STEP_TIMEOUT, secured).await {
            Ok(secured) => secured.map_err(|error| target.error(error)),
            Err(_) => Err(DialError::TlsTimeout { url: target.url.clone() }),
        }
    }

    async fn through(&self, proxy: &Proxy, server: Uri) -> Result<Stream, BoxError> {
        let mut stream = self.tcp(proxy.address.clone()).await?;
        if proxy.uses_tls() {
            let host = proxy.address.host().unwrap_or_default();
            stream = timeout(STEP_TIMEOUT, self.tls.connect_to_proxy(stream, host)).await??;
        }
        if proxy.forwards_to(&server) { Ok(stream) } else { tunnel::open(stream, proxy, server).await }
    }

    async fn tcp(&self, address: Uri) -> Result<Stream, BoxError> {
        Ok(Box::new(self.tcp.clone().oneshot(address).await?.into_inner()))
    }

    fn http2(&self) -> http2::Builder<TokioExecutor> {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.probing.idle)
            .keep_alive_timeout(self.probing.answer);
        builder
    }

    /// Runs a connection until it ends.
    fn drive(
        &self,
        index: usize,
        connection: impl Future<Output = Result<(), hyper::Error>> + Send + 'static,
        breaker: Breaker,
    ) {
        let (first, count) = (Arc::clone(&self.first), self.targets.len());
        tokio::spawn(async move {
            match connection.await {
                Err(error) if !breaker.has_broken() => {
                    debug!(%error, "a connection to the API server broke");
                    // The next connection starts with another address.
                    move_on(&first, index, count);
                }
                _ => {}
            }
        });
    }

    /// Breaks a connection once the files of its client certificate are replaced.
    fn follow_files(&self, files: Option<[Vec<u8>; 2]>, breaker: Breaker) {
        let Some(files) = files else { return };
        let tls = Arc::clone(&self.tls);
        tokio::spawn(async move {
            tokio::select! {
                () = rotated(&tls, files) => {
                    info!("the client certificate was replaced: connecting to the API server again");
                    breaker.break_now();
                }
                () = breaker.over() => {}
            }
        });
    }
}

/// Replaces the address `index` by the next one, if `first` still is that address.
fn move_on(first: &AtomicUsize, index: usize, count: usize) {
    let next = (index + 1) % count;
    let _ = first.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
}

/// Waits until the files of the client certificate differ from those of the connection, and can be
/// used.
async fn rotated(tls: &Tls, files: [Vec<u8>; 2]) {
    loop {
        sleep(ROTATION_CHECK).await;
        if tls.identity_files().is_some_and(|now| now != files) && tls.is_loadable() {
            return;
        }
    }
}

fn tcp_connector(Probing { idle, answer }: Probing) -> HttpConnector {
    const PROBES: u32 = 2;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(STEP_TIMEOUT));
    // HTTP/1.1 has no other probes.
    tcp.set_keepalive(Some(idle));
    tcp.set_keepalive_interval(Some(answer / PROBES));
    tcp.set_keepalive_retries(Some(PROBES));
    tcp.set_tcp_user_timeout(Some(idle + answer));
    tcp
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;
    use tokio::io::duplex;

    use super::*;

    /// Writes one of the client certificates of the tests, and its key.
    fn write_identity(directory: &TempDir, pem: &str) {
        let (certificate, key) = pem.split_once("-----BEGIN PRIVATE").expect("certificate and key");
        fs::write(directory.path().join("crt"), certificate).expect("written");
        fs::write(directory.path().join("key"), format!("-----BEGIN PRIVATE{key}")).expect("written");
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_client_certificate_ends_the_connection_once_it_is_complete() {
        let [first, second] = [
            include_str!("../../../../tests/tests/api_source/client-1.test.pem"),
            include_str!("../../../../tests/tests/api_source/client-2.test.pem"),
        ];
        let directory = TempDir::new().expect("a directory");
        write_identity(&directory, first);
        let url = Uri::from_static("https://192.0.2.1:6443");
        let mut config = kube::Config::new(url.clone());
        let path = |name: &str| Some(directory.path().join(name).to_string_lossy().into_owned());
        (config.auth_info.client_certificate, config.auth_info.client_key) = (path("crt"), path("key"));
        config.accept_invalid_certs = true;
        let tls = Tls::new(&config, true).expect("a certificate");
        let files = tls.identity_files();
        let dialer = Dialer::new(vec![Target { url, proxy: None }], tls);
        let (breaker, stream) = Breaker::new(Box::new(duplex(1).0));
        dialer.follow_files(files, breaker.clone());
        sleep(3 * ROTATION_CHECK).await;
        assert!(!breaker.has_broken());
        let (certificate, key) = second.split_once("-----BEGIN PRIVATE").expect("certificate and key");
        fs::write(directory.path().join("crt"), certificate).expect("written");
        sleep(3 * ROTATION_CHECK).await;
        assert!(!breaker.has_broken(), "the key is still that of the first certificate");
        fs::write(directory.path().join("key"), format!("-----BEGIN PRIVATE{key}")).expect("written");
        sleep(2 * ROTATION_CHECK).await;
        assert!(breaker.has_broken());
        drop(stream);
    }
}
