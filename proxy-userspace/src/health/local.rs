//! Serves HTTP on an abstract unix socket of the network namespace, to processes that may ask.

use std::{
    convert::Infallible,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener as StdListener},
    },
};

use axum::Router;
use nix::unistd::Uid;
use tokio::{
    net::{UnixListener, UnixStream},
    time::sleep,
};

use super::{
    listen::RETRY_AFTER,
    server::{self, Accept, LOCAL},
};

/// Returns true for the user ID 0 and for that of this process. An abstract socket has no
/// permissions, so both sides check the other one. In another user namespace, 0 is another number
/// here.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0 || user == Uid::effective().as_raw()
}

/// Accepts connections of processes whose user is trusted.
struct OfAdministrators(UnixListener);

impl Accept for OfAdministrators {
    type Stream = UnixStream;

    async fn accept(&mut self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            if stream.peer_cred().is_ok_and(|peer| is_trusted(peer.uid())) {
                return Ok(stream);
            }
        }
    }
}

/// Serves forever. While another process has the name, such as a shunt that ends, it tries again
/// every few seconds.
pub async fn serve_local(name: &'static [u8], routes: Router) -> Infallible {
    let mut warned = false;
    loop {
        match listen(name) {
            Ok(listener) => return server::run(OfAdministrators(listener), routes, LOCAL).await,
            Err(error) if !std::mem::replace(&mut warned, true) => {
                let socket = String::from_utf8_lossy(name);
                tracing::debug!(%error, %socket, "cannot listen on the abstract socket; shunt tries again");
            }
            Err(_) => {}
        }
        sleep(RETRY_AFTER).await;
    }
}

fn listen(name: &[u8]) -> io::Result<UnixListener> {
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}
