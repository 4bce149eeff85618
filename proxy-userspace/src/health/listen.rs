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

/// Serves forever. If shunt cannot listen on the address, it sends one Event. With `hard_fail` it
/// then returns an error. Otherwise it logs one warning and retries every few seconds.
pub async fn serve(
    server: HttpServer,
    address: SocketAddr,
    routes: Router,
    hard_fail: bool,
    events: &NodeEvents,
) -> Result<Infallible, BindError> {
    let name = server.name();
    let mut warned = false;
    loop {
        let error = match bind(name, address) {
            Ok(listener) => {
                tracing::debug!(server = name, %address, "listening");
                return Ok(http::run(listener, routes, http::SERVER).await);
            }
            Err(error) => error,
        };
        if !std::mem::replace(&mut warned, true) {
            let after = if hard_fail { "shunt ends (bindAddressHardFail)" } else { "shunt tries again" };
            events.warning(server.failure_reason(), format!("{error}: {}; {after}", error.source));
            if !hard_fail {
                let (error, retry) = (&error.source, RETRY_AFTER.as_secs());
                tracing::warn!(server = name, %address, %error, "cannot listen on the address; shunt tries again every {retry} s");
            }
        }
        if hard_fail {
            return Err(error);
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}
