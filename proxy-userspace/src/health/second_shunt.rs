//! Two shunts on one node, for example of two releases of the chart: the one that cannot run says
//! so to the one that runs. The running one answers doctor. Doctor could not find the other one by
//! itself: it may be in another PID namespace, and runs for half a minute only.

use std::{ffi::OsStr, io, os::unix::ffi::OsStrExt as _, time::Duration};

use axum::{Router, extract::State, http::StatusCode, routing::post};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::timeout,
};

use super::Status;
use crate::node::NodeEvents;

const REQUEST: &[u8] =
    b"POST /v1/second-shunt HTTP/1.1\r\nHost: shunt\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the path of the local socket to which a second shunt sends.
pub fn second_shunt_routes(status: Status, events: NodeEvents) -> Router {
    Router::new().route("/v1/second-shunt", post(refused)).with_state((status, events))
}

/// The first attempt is reported. The others only renew the time that `shunt doctor` shows.
async fn refused(State((status, events)): State<(Status, NodeEvents)>) -> StatusCode {
    if status.refused_second_shunt() {
        const NOTE: &str = "another shunt tried to run on this node and ended: only one can run; look for a second \
                            DaemonSet or a service of the node that starts shunt";
        tracing::warn!("{NOTE}");
        events.warning("SecondShunt", NOTE);
    }
    StatusCode::NO_CONTENT
}

/// Tells the shunt that has the name of an abstract socket that this one ends because of it. One of
/// an older version does not know the request.
pub(super) async fn tell(name: &[u8]) {
    if let Ok(Err(error)) = timeout(ANSWER_TIMEOUT, send(name)).await {
        tracing::debug!(%error, "cannot tell the other shunt");
    }
}

async fn send(name: &[u8]) -> io::Result<()> {
    let mut stream = UnixStream::connect(OsStr::from_bytes(&[b"\0", name].concat())).await?;
    stream.write_all(REQUEST).await?;
    // The other one may drop a request whose sender is gone.
    stream.read_u8().await.map(drop)
}
