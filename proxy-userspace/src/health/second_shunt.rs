//! Two shunts on one node, for example of two releases of the chart: the one that cannot run says
//! so to the one that runs. The running one answers doctor. Doctor could not find the other one by
//! itself: it may be in another PID namespace, and runs for half a minute only.

use std::{ffi::OsStr, fmt::Display, io, os::unix::ffi::OsStrExt as _, time::Duration};

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
/// How the answer begins.
const EXPECTED: &str = "HTTP/1.1 204";
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

/// Tells the shunt that has the name of an abstract socket that this one ends because of it. Logs a
/// warning if that one does not confirm it: an older version does not know the request.
pub(super) async fn tell(name: &[u8]) {
    let warn = |why: &dyn Display| {
        tracing::warn!(
            %why,
            "cannot tell the other shunt that this one ends because of it: shunt doctor and Events do not report it"
        );
    };
    match timeout(ANSWER_TIMEOUT, send(name)).await {
        Ok(Ok(status)) if status == EXPECTED => {}
        Ok(Ok(status)) => warn(&format_args!("its answer is {status:?}, not {EXPECTED:?}")),
        Ok(Err(error)) => warn(&error),
        Err(_) => warn(&format_args!("no answer within {} s", ANSWER_TIMEOUT.as_secs())),
    }
}

/// Returns the beginning of the answer. The other one may drop a request whose sender is gone, so
/// this waits for it.
async fn send(name: &[u8]) -> io::Result<String> {
    let mut stream = UnixStream::connect(OsStr::from_bytes(&[b"\0", name].concat())).await?;
    stream.write_all(REQUEST).await?;
    let mut status = [0; EXPECTED.len()];
    stream.read_exact(&mut status).await?;
    Ok(String::from_utf8_lossy(&status).into_owned())
}
