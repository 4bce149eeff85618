//! Opens listening sockets: wildcard addresses in both families as Go does it, and retries while an
//! address is taken.

use std::{
    convert::Infallible,
    io,
    net::{Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::Router;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use super::{BindError, server as http};
use crate::node::NodeEvents;

/// Upstream waits this long before it tries an address again (`serveHealthz`, `serveMetrics`).
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(5);
/// The number of failed attempts before an Event is sent. They take half a minute, the time that
/// the kubelet gives a former process to end.
const ATTEMPTS_BEFORE_EVENT: u32 = 6;
const BACKLOG: i32 = 1024;

/// Listens on an address. A wildcard address of either family serves both families if the kernel
/// has IPv6, as Go's `net.Listen` does for kube-proxy.
pub fn bind(server: &str, address: SocketAddr) -> Result<TcpListener, BindError> {
    let listener = if address.ip().is_unspecified() {
        let both = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port());
        match listen(both, false) {
            Err(error) if lacks_ipv6(&error) => listen(address, false),
            listener => listener,
        }
    } else {
        listen(address, true)
    };
    listener.map_err(|source| BindError { server: server.into(), address, source })
}

/// Listens on an address in the family of that address only.
pub(super) fn bind_one_family(server: &str, address: SocketAddr) -> Result<TcpListener, BindError> {
    listen(address, true).map_err(|source| BindError { server: server.into(), address, source })
}

fn listen(address: SocketAddr, only_own_family: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_own_family)?;
    }
    // After a restart, the address can be bound although old connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn lacks_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

/// A server that listens as long as shunt runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpServer {
    /// `/healthz` and `/livez`.
    Healthz,
    /// The metrics.
    Metrics,
}

impl HttpServer {
    const fn name(self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Metrics => "metrics",
        }
    }

    /// Returns the reason of kube-proxy's Event if it cannot listen
    /// (`cmd/kube-proxy/app/server.go`).
    const fn failure_reason(self) -> &'static str {
        match self {
            Self::Healthz => "FailedToStartProxierHealthcheck",
            Self::Metrics => "FailedToStartMetricServer",
        }
    }
}

/// Serves forever. With `hard_fail`, if shunt cannot listen on the address, it sends an Event and
/// returns an error. Otherwise it logs one warning, retries every few seconds, and sends one Event
/// after half a minute.
pub async fn serve(
    server: HttpServer,
    address: SocketAddr,
    routes: Router,
    hard_fail: bool,
    events: &NodeEvents,
) -> Result<Infallible, BindError> {
    let name = server.name();
    let mut failures = 0;
    loop {
        let error = match bind(name, address) {
            Ok(listener) => {
                tracing::debug!(server = name, %address, "listening");
                return Ok(http::run(listener, routes, http::SERVER).await);
            }
            Err(error) => error,
        };
        let send_event =
            |after| events.warning(server.failure_reason(), format!("{error}: {}; {after}", error.source));
        if hard_fail {
            send_event("shunt ends (bindAddressHardFail)");
            return Err(error);
        }
        if failures == 0 {
            let (error, retry) = (&error.source, RETRY_AFTER.as_secs());
            tracing::warn!(server = name, %address, %error, "cannot listen on the address; shunt tries again every {retry} s");
        } else if failures == ATTEMPTS_BEFORE_EVENT {
            send_event("shunt tries again");
        }
        failures = ATTEMPTS_BEFORE_EVENT.min(failures) + 1;
        tokio::time::sleep(RETRY_AFTER).await;
    }
}
