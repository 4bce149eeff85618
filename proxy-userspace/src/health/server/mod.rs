//! Serves HTTP/1 on one listener, with limits on the number and the time of connections.
//!
//! Everybody who reaches a port can hold connections. Without limits they use up the descriptors
//! and the memory that maps, commands and the connection to the API server need. Go's
//! `http.Server`, as kube-proxy sets it up, has no limits. The limits here are far above what
//! kubelets, load balancers and scrapers need.
//!
//! If all places are taken, a new connection gets the place of the one that waited longest for its
//! client. Refusing new connections instead would turn away the kubelet's probe, which opens a
//! connection for each request. An evicted keep-alive client connects again.

mod places;
#[cfg(test)]
mod tests;

use std::{convert::Infallible, future, io, time::Duration};

use axum::{Router, body::Body, http::Request, response::Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    pin, select,
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use self::places::{Place, Places};

/// The limits of one listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The number of connections at one time.
    pub(super) connections: usize,
    /// The time from a connection's start until the header of its first request is complete. It is
    /// also the time that a connection gets for its last answer when it must close.
    pub(super) header: Duration,
    /// The time from an answer until the header of the next request is complete.
    pub(super) idle: Duration,
    /// The time in which a client must read some of an answer. It bounds how long answers wait in
    /// memory for clients that do not read.
    pub(super) read: Duration,
    /// The time from a connection's start until it must close. A request that is being answered
    /// then gets [`Self::header`] to end.
    pub(super) total: Duration,
}

/// The limits of the health server and of the metrics server.
pub(super) const SERVER: Limits = Limits {
    // A kubelet, some scrapers, and the probers of all load balancers (tens).
    connections: 128,
    // Probes give up after 1 to 5 s, Prometheus after 10 s by default.
    header: Duration::from_secs(10),
    // Two times Prometheus's default scrape interval, so that scrapers keep their connection.
    idle: Duration::from_mins(2),
    // A few answers to scrapes are megabytes each, on nodes with thousands of Services.
    read: Duration::from_secs(30),
    total: Duration::from_mins(10),
};

/// The limits of the local socket, on which a trace may take a day. Its client may stop reading for
/// a while, as a pager does.
pub(super) const LOCAL: Limits =
    Limits { read: Duration::from_hours(24), total: Duration::from_hours(24), ..SERVER };

/// The limits of each health check node port, of which a node may have thousands.
pub(super) const HEALTH_CHECK_NODE_PORT: Limits = Limits { connections: 32, ..SERVER };

/// The longest header of a request. hyper answers 431 to a longer one.
const MAX_HEADER: usize = 16 << 10;
/// How long to wait after the kernel could not accept a connection, because descriptors or memory
/// are missing.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The least time between two warnings of one listener.
const WARN_EVERY: Duration = Duration::from_mins(1);

/// A source of connections.
pub(super) trait Accept: Send {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection.
    fn accept(&mut self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

/// Serves forever. If the future is dropped, the listener is closed, and then each connection after
/// the answer to its present request.
pub(super) async fn run(mut listener: impl Accept, routes: Router, limits: Limits) -> Infallible {
    let places = Places::new(limits.connections);
    let stop = CancellationToken::new();
    let _stops_connections = stop.clone().drop_guard();
    let mut may_warn = Instant::now();
    loop {
        match listener.accept().await {
            Ok(stream) => {
                let place = places.take().await;
                tokio::spawn(serve_connection(stream, place, routes.clone(), limits, stop.clone()));
            }
            Err(error) if concerns_one_connection(&error) => {}
            Err(error) => {
                if Instant::now() >= may_warn {
                    may_warn = Instant::now() + WARN_EVERY;
                    tracing::warn!(
                        %error,
                        "cannot accept a connection; shunt closes the oldest one and tries again"
                    );
                }
                places.evict_one();
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Returns true if only the connection that was to be accepted failed: accept(2) returns its
/// pending errors.
fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, Interrupted, NetworkDown,
        NetworkUnreachable,
    };
    matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | Interrupted
            | NetworkDown
            | NetworkUnreachable
    )
}

/// Serves what a client sends on one connection, and returns the answers, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub async fn answer_bytes(request: &[u8], routes: Router) -> Vec<u8> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    let (mut client, stream) = duplex(1 << 20);
    let place = Places::new(1).take().await;
    let serving = serve_connection(stream, place, routes, SERVER, CancellationToken::new());
    let asking = async {
        // The server closes a connection after a request that it cannot read.
        drop(client.write_all(request).await);
        drop(client.shutdown().await);
        let mut answers = Vec::new();
        drop(client.read_to_end(&mut answers).await);
        answers
    };
    tokio::join!(serving, asking).1
}

/// Serves one connection within its limits.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    place: Place,
    routes: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let (place, first_request) = (&place, &Notify::new());
    let service = service_fn(move |request: Request<Incoming>| {
        first_request.notify_one();
        answer(place, routes.clone(), request)
    });
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.read));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // hyper starts it when a connection starts and after each answer.
        .header_read_timeout(limits.idle)
        .max_buf_size(MAX_HEADER)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    pin!(connection);
    select! {
        _ = &mut connection => return,
        () = place.evicted() => return,
        () = is_late(first_request, limits.header) => return,
        () = sleep(limits.total) => {}
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    select! {
        _ = timeout(limits.header, connection) => {}
        () = place.evicted() => {}
    }
}

async fn answer(place: &Place, routes: Router, request: Request<Incoming>) -> Result<Response, Infallible> {
    place.set_serving(true);
    let answer = routes.oneshot(request.map(Body::new)).await;
    place.set_serving(false);
    answer
}

/// Returns if no request arrived within the limit.
async fn is_late(first_request: &Notify, limit: Duration) {
    if timeout(limit, first_request.notified()).await.is_ok() {
        future::pending::<()>().await;
    }
}
