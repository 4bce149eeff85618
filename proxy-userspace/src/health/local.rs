//! Serves HTTP on an abstract unix socket of the network namespace, to processes that may ask.

use std::{
    convert::Infallible,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixListener as StdListener},
        },
    },
    time::Duration,
};

use axum::Router;
use nix::unistd::Uid;
use tokio::{
    net::{UnixListener, UnixStream},
    time::{Instant, sleep},
};

use super::{
    listen::RETRY_AFTER,
    second_shunt,
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

/// How long another shunt may take to end, which is longer than it does. A kubelet may start the
/// next container before the process of the last one is gone.
const ENDS_WITHIN: Duration = Duration::from_secs(25);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// A shunt that waited for another one takes the name only after this time. The other one may have
/// started itself again, and takes the name at once.
const FREE_FOR: Duration = Duration::from_secs(3);
/// A process that has the name and does not answer so many times is no shunt.
const MAX_SILENT: u32 = 5;

/// Another shunt runs in this network namespace.
#[derive(Debug, thiserror::Error)]
#[error(
    "another shunt ({}) runs in this network namespace: stop that one; two would undo each other's changes",
    .process.map_or_else(|| "in another container".into(), |process| format!("process {process}"))
)]
pub struct AlreadyRunning {
    /// The process, or `None` if it is in another PID namespace.
    process: Option<i32>,
}

/// A listening socket whose name only one process of the network namespace has.
#[derive(Debug)]
pub struct LocalListener(UnixListener);

/// Who has the name of an abstract socket.
enum Holder {
    /// A process of this user or root. `None` if it is in another PID namespace, or does not
    /// answer.
    Shunt(Option<i32>),
    /// Another program.
    Stranger,
    /// Nobody listens.
    Nobody,
}

async fn holder(name: &[u8]) -> Holder {
    let connected = UnixStream::connect(OsStr::from_bytes(&[b"\0", name].concat())).await;
    match connected.and_then(|stream| stream.peer_cred()) {
        Ok(peer) if is_trusted(peer.uid()) => Holder::Shunt(peer.pid().filter(|process| *process != 0)),
        Ok(_) => Holder::Stranger,
        // It listens, and takes no connection.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Holder::Shunt(None),
        Err(_) => Holder::Nobody,
    }
}

/// Fails if another shunt has the name of an abstract socket.
pub async fn check_alone(name: &[u8]) -> Result<(), AlreadyRunning> {
    match holder(name).await {
        Holder::Shunt(process) => Err(AlreadyRunning { process }),
        Holder::Stranger | Holder::Nobody => Ok(()),
    }
}

/// Takes the name of an abstract socket. Waits some seconds if another shunt has it, which may be
/// about to end. Returns `None` if another program has it, or if the kernel refuses the socket:
/// that must not stop shunt.
pub async fn listen_local(name: &'static [u8]) -> Result<Option<LocalListener>, AlreadyRunning> {
    let until = Instant::now() + ENDS_WITHIN;
    let (mut silent, mut has_waited) = (0, false);
    let mut free_since = None;
    loop {
        let is_free = |since: Instant| since.elapsed() >= FREE_FOR;
        let may_listen = !has_waited || free_since.is_some_and(is_free);
        match may_listen.then(|| listen(name)) {
            Some(Ok(listener)) => return Ok(Some(listener)),
            Some(Err(error)) if error.kind() != io::ErrorKind::AddrInUse => {
                tracing::warn!(%error, "cannot listen on the abstract socket");
                return Ok(None);
            }
            _ => {}
        }
        match holder(name).await {
            Holder::Stranger => return Ok(None),
            Holder::Shunt(process) if Instant::now() >= until => {
                second_shunt::tell(name).await;
                return Err(AlreadyRunning { process });
            }
            Holder::Shunt(process) => {
                free_since = None;
                if !std::mem::replace(&mut has_waited, true) {
                    let seconds = ENDS_WITHIN.as_secs();
                    tracing::info!(
                        process,
                        "another shunt runs here: waiting at most {seconds} s until it ends"
                    );
                }
            }
            Holder::Nobody => {
                free_since.get_or_insert_with(Instant::now);
                silent += u32::from(may_listen);
                if silent >= MAX_SILENT {
                    return Ok(None);
                }
            }
        }
        sleep(LOOK_AGAIN_AFTER).await;
    }
}

/// Serves forever. Without a listener, it tries to get one every few seconds.
pub async fn serve_local(listener: Option<LocalListener>, name: &'static [u8], routes: Router) -> Infallible {
    if listener.is_none() {
        let socket = String::from_utf8_lossy(name);
        tracing::warn!(
            %socket,
            "another program has the abstract socket: subcommands such as get do not work until it ends"
        );
    }
    let mut listener = listener;
    loop {
        match listener.map_or_else(|| listen(name), Ok) {
            Ok(LocalListener(listener)) => {
                return server::run(OfAdministrators(listener), routes, LOCAL).await;
            }
            Err(_) => listener = None,
        }
        sleep(RETRY_AFTER).await;
    }
}

fn listen(name: &[u8]) -> io::Result<LocalListener> {
    let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener).map(LocalListener)
}

#[cfg(test)]
mod tests {
    use std::{future::pending, process};

    use socket2::{Domain, SockAddr, Socket, Type};
    use tokio::io::AsyncWriteExt as _;

    use super::*;
    use crate::{
        captured_log::CapturedLog,
        health::{NodeReport, ProxyHealth, Status, second_shunt_routes},
        node::NodeEvents,
    };

    #[tokio::test(start_paused = true)]
    async fn a_second_shunt_waits_for_the_first_and_then_names_it() {
        const NAME: &[u8] = b"shunt/test-of-two";
        let first = listen_local(NAME).await.expect("nobody has the name");
        let error = listen_local(NAME).await.expect_err("the first has it").to_string();
        let expected = format!("another shunt (process {}) runs in this network namespace: ", process::id());
        assert!(error.starts_with(&expected), "{error}");
        let ends = async {
            sleep(ENDS_WITHIN / 2).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(listen_local(NAME), ends);
        assert!(second.expect("the first has ended").is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_shunt_that_ends_is_reported_once_by_the_first() {
        const NAME: &[u8] = b"shunt/test-of-a-report";
        let first = listen_local(NAME).await.expect("nobody has the name");
        let (events, mut sent) = NodeEvents::channel();
        let status = Status::default();
        let report = || NodeReport::new(&status, &ProxyHealth::new(Duration::ZERO), String::new());
        let routes = second_shunt_routes(status.clone(), events);
        let serving = tokio::spawn(serve_local(first, NAME, routes));
        assert_eq!(report().second_shunt_seconds_ago, None);
        for _ in 0..2 {
            second_shunt::tell(NAME).await;
        }
        assert!(report().second_shunt_seconds_ago.is_some_and(|seconds| seconds < 60));
        assert_eq!(sent.try_recv().map(|event| event.reason), Ok("SecondShunt"));
        assert!(sent.try_recv().is_err(), "one Event for all attempts");
        serving.abort();
    }

    /// Returns what a second shunt logs if the first one answers so, or not at all.
    async fn logged(name: &'static [u8], answer: Option<&'static str>) -> String {
        let first = listen(name).expect("nobody has the name").0;
        let answering = async move {
            let (mut stream, _) = first.accept().await.expect("a connection");
            if let Some(answer) = answer {
                stream.write_all(answer.as_bytes()).await.expect("written");
            }
            pending::<()>().await;
        };
        let log = CapturedLog::start();
        tokio::select! {
            () = second_shunt::tell(name) => {}
            () = answering => {}
        }
        log.end()
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_shunt_that_is_not_heard_logs_why() {
        let heard = logged(b"shunt/test-204", Some("HTTP/1.1 204 No Content\r\n\r\n")).await;
        assert_eq!(heard, "");
        let unknown = logged(b"shunt/test-404", Some("HTTP/1.1 404 Not Found\r\n\r\n")).await;
        assert!(unknown.contains("its answer is \"HTTP/1.1 404\", not \"HTTP/1.1 204\""), "{unknown}");
        let silent = logged(b"shunt/test-no-answer", None).await;
        assert!(silent.contains("WARN") && silent.contains("no answer within 2 s"), "{silent}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_shunt_that_starts_itself_again_keeps_the_name_before_one_that_waits() {
        const NAME: &[u8] = b"shunt/test-of-a-restart";
        let first = listen_local(NAME).await.expect("nobody has the name");
        let restarts = async {
            sleep(ENDS_WITHIN / 2).await;
            drop(first);
            sleep(FREE_FOR / 2).await;
            listen_local(NAME).await.expect("nobody has the name")
        };
        let (waiting, restarted) = tokio::join!(listen_local(NAME), restarts);
        assert!(restarted.is_some());
        waiting.expect_err("the restarted one has it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_does_not_answer_is_of_another_program() {
        const NAME: &[u8] = b"shunt/test-of-silence";
        let silent = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
        let address = [b"\0", NAME].concat();
        silent.bind(&SockAddr::unix(OsStr::from_bytes(&address)).expect("a name")).expect("bound");
        assert!(listen_local(NAME).await.expect("it is no shunt").is_none());
    }
}
