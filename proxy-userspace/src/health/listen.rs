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

/// Serves forever. If shunt cannot listen on the address, the function returns an error with
/// `hard_fail`. Otherwise it logs one warning and retries every few seconds.
pub async fn serve(
    server: &str,
    address: SocketAddr,
    routes: Router,
    hard_fail: bool,
) -> Result<Infallible, BindError> {
    let mut warned = false;
    loop {
        match bind(server, address) {
            Ok(listener) => {
                tracing::debug!(server, %address, "listening");
                return Ok(http::run(listener, routes, http::SERVER).await);
            }
            Err(error) if hard_fail => return Err(error),
            Err(BindError { source, .. }) => {
                if !std::mem::replace(&mut warned, true) {
                    let retry = RETRY_AFTER.as_secs();
                    tracing::warn!(server, %address, error = %source, "cannot listen on the address; shunt tries again every {retry} s");
                }
            }
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}
