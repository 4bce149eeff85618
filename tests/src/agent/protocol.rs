//! What the runner and the agents say to each other: one JSON document a line, a request and then its answer.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use proxy_userspace::kernel::bpf;
use serde::{Deserialize, Serialize};

use crate::bench::{self, order::Outcome};

/// The transport protocol of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What the runner asks an agent to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Open connections; the answer is [`Response::Tries`].
    Dial(Dial),
    /// Send on a connection kept open before; the answer is [`Response::Tries`] with one try.
    Send(Send),
    /// Fetch a page; the answer is [`Response::Page`].
    Get(Get),
    /// Close all connections kept open; the answer is [`Response::Tries`] without any.
    Close,
    /// Take part in the benchmark; the answer is [`Response::Bench`].
    Bench(bench::Order),
}

/// Connections to open, one a try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dial {
    /// The address to dial.
    pub to: SocketAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// UDP by sendto and recvfrom on a socket that is not connected.
    pub unconnected: bool,
    /// How many tries.
    pub tries: usize,
    /// Bytes to send, at least 1.
    pub size: usize,
    /// Bytes to ask for; 0: as many as the answer needs.
    pub answer: usize,
    /// A fixed source port.
    pub source_port: Option<u16>,
    /// Source addresses to use in turn; empty: the kernel's choice.
    pub sources: Vec<IpAddr>,
    /// Time between tries.
    pub pause: Duration,
    /// Which tries may be on their way together.
    pub order: Order,
    /// Keep the connection open under this name.
    pub hold: Option<String>,
    /// How often each connection is used again; the same host must answer and see the same client.
    pub again: usize,
    /// The time before each further use.
    pub between: Duration,
    /// UDP: send once more after a second, as TCP does with its first packet.
    pub send_again: bool,
    /// How long a try waits for its answer.
    pub timeout: Duration,
}

/// The order of a flow's tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// All at once.
    AtOnce,
    /// One after the other.
    InSequence,
    /// One after the other, and no more after one that failed.
    UntilFailure,
}

/// Bytes to send on a connection that is open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Send {
    /// The name the connection was kept under.
    pub id: String,
    /// Bytes to send, at least 1.
    pub size: usize,
    /// Bytes to ask for, as in [`Dial`].
    pub answer: usize,
    /// How long to wait for the answer.
    pub timeout: Duration,
}

/// A page to fetch over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Get {
    /// An `http://` URL whose host is an address.
    pub url: String,
    /// How long to wait for the whole answer.
    pub timeout: Duration,
}

/// What an agent answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Response {
    /// The servers of the host are up; sent once, unasked.
    Ready,
    /// How the tries ended, in their order.
    Tries(Vec<Try>),
    /// The page.
    Page(Result<Page, Failure>),
    /// What the benchmark asked for.
    Bench(Outcome),
    /// The request made no sense.
    Mistake(String),
}

/// How one try ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Try {
    /// A host answered.
    Answered(Answer),
    /// No answer.
    Failed(Failure),
}

/// An answer, and what the caller's own socket says of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The name of the host that answered.
    pub host: String,
    /// The client address that host saw.
    pub seen: SocketAddr,
    /// The VIP.
    pub destination: SocketAddr,
    /// The source address the caller was told to use.
    pub source: Option<IpAddr>,
    /// What the caller's socket reports: getpeername, or the sender of the answer for an unconnected socket.
    pub reported: SocketAddr,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What was being done: "bind", "connect", "send" or "receive".
    pub doing: String,
    /// The error's kind.
    pub kind: FailureKind,
    /// The error as text.
    pub message: String,
}

/// What kind of error a [`Failure`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// Connection refused.
    Refused,
    /// Nothing came within the try's timeout.
    TimedOut,
    /// The network or the kernel said no: EHOSTUNREACH, ENETUNREACH, EPERM, EACCES, or an aborted connection.
    Unreachable,
    /// The peer, or someone in its name, reset the connection.
    Reset,
    /// Another host answers than before, or the host sees another client than before.
    Moved,
    /// What was sent is too big for the path to the peer.
    TooBig,
    /// Something that does not come from the network: an address in use, an answer that is no answer.
    Other,
}

/// An answer over HTTP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// The status code.
    pub status: u16,
    /// Headers, names in lower case; of several of one name the last.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
}

impl Dial {
    /// So many plain tries of one byte, all at once, each answered within three seconds or failed.
    pub fn new(to: SocketAddr, protocol: Protocol, tries: usize) -> Self {
        Self {
            to,
            protocol,
            unconnected: false,
            tries,
            size: 1,
            answer: 0,
            source_port: None,
            sources: Vec::new(),
            pause: Duration::ZERO,
            order: Order::AtOnce,
            hold: None,
            again: 0,
            between: Duration::ZERO,
            send_again: false,
            timeout: Duration::from_secs(3),
        }
    }

    /// An upper bound of the time all tries take.
    pub fn longest(&self) -> Duration {
        // Connecting and answering each have the timeout.
        let uses = u32::try_from(self.again).unwrap_or(u32::MAX).saturating_add(2);
        let one = self.pause + (self.timeout + self.between).saturating_mul(uses);
        one.saturating_mul(u32::try_from(self.tries).unwrap_or(u32::MAX))
    }
}

impl Failure {
    /// The failure of an operation.
    pub fn new(doing: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::ConnectionRefused => FailureKind::Refused,
            // All that programs of the socket hooks can say before kernel 6.1.
            ErrorKind::PermissionDenied if !bpf::may_choose_errors() => FailureKind::Refused,
            // The kernel's own timeout, ETIMEDOUT.
            ErrorKind::TimedOut => FailureKind::TimedOut,
            ErrorKind::ConnectionReset => FailureKind::Reset,
            ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::PermissionDenied
            | ErrorKind::ConnectionAborted
            | ErrorKind::NotConnected
            | ErrorKind::BrokenPipe => FailureKind::Unreachable,
            _ if error.raw_os_error() == Some(nix::libc::EMSGSIZE) => FailureKind::TooBig,
            // What a UDP socket says that the proxy has destroyed.
            _ if error.raw_os_error() == Some(nix::libc::EDESTADDRREQ) => FailureKind::Unreachable,
            _ => FailureKind::Other,
        };
        Self { doing: doing.to_owned(), kind, message: error.to_string() }
    }

    /// Nothing came in time.
    pub fn timed_out(doing: &str, after: Duration) -> Self {
        let message = format!("timed out after {:.1} s", after.as_secs_f32());
        Self { doing: doing.to_owned(), kind: FailureKind::TimedOut, message }
    }

    /// Something other than the network went wrong.
    pub fn other(doing: &str, message: impl Into<String>) -> Self {
        Self { doing: doing.to_owned(), kind: FailureKind::Other, message: message.into() }
    }
}
