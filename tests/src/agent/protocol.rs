//! The protocol between the runner and the agents: one JSON document a line, a request and then its
//! response.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use proxy_userspace::kernel::bpf;
use serde::{Deserialize, Serialize};

use crate::{
    bench::{self, protocol::BenchResponse},
    world::Host,
};

/// The transport protocol of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP, with one association a socket (`SOCK_STREAM`).
    Sctp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// A request of the runner to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Open connections. The response is [`Response::Attempts`].
    Connect(ConnectRequest),
    /// Send on a connection that was kept open. The response is [`Response::Attempts`] with one
    /// attempt.
    Send(SendRequest),
    /// Fetch a page. The response is [`Response::Page`].
    Get(GetRequest),
    /// Close all connections that were kept open. The response is [`Response::Attempts`] without
    /// any attempt.
    Close,
    /// Execute a request of the benchmark. The response is [`Response::Bench`].
    Bench(bench::BenchRequest),
    /// Make load until [`Request::StopLoad`]. The response comes after that and is
    /// [`Response::Load`].
    Load(LoadRequest),
    /// End the load. It has no response of its own.
    StopLoad,
}

/// Connections to open, one for each attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// The destination.
    pub to: SocketAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Use sendto and recvfrom on an unconnected UDP socket.
    pub unconnected: bool,
    /// The number of attempts.
    pub attempts: usize,
    /// Bytes to send, at least 1.
    pub size: usize,
    /// The number of bytes to request; 0: as many as the answer needs.
    pub answer: usize,
    /// A fixed source port.
    pub source_port: Option<u16>,
    /// Source addresses to use in turn. If empty, the kernel chooses.
    pub sources: Vec<IpAddr>,
    /// The time between attempts.
    pub pause: Duration,
    /// The order of the attempts.
    pub order: Order,
    /// Keep the connection open under this name.
    pub hold: Option<String>,
    /// How often each connection is used again. The same host must answer and see the same client.
    pub repeats: usize,
    /// The time before each repeated use.
    pub repeat_interval: Duration,
    /// UDP: send again after a second, as TCP does with its first segment.
    pub retransmit: bool,
    /// How long an attempt waits for its answer.
    pub timeout: Duration,
}

/// Load to make, all streams at the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// Each stream makes connections like this one, one after the other, and begins the next one
    /// `pause` after the last. `attempts` is the number of connections at any time. With the largest
    /// number of `repeats`, connections stay open to the end. `sources`, `source_port`, `order` and
    /// `hold` have no effect.
    pub streams: Vec<ConnectRequest>,
}

/// What happened to the connections of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Connections that were opened.
    pub connections: usize,
    /// UDP conversations that were begun.
    pub conversations: usize,
    /// Questions that were answered.
    pub exchanges: usize,
    /// Datagrams without answer.
    pub unanswered: usize,
    /// Connections and datagrams that were refused.
    pub refused: usize,
    /// Connections and conversations that failed otherwise, and conversations without any answer.
    pub lost: usize,
    /// Of those that stay open to the end, the ones that failed.
    pub broken: usize,
    /// Connections and conversations in which another host answered, or a host saw another client.
    pub moved: usize,
    /// Connections and conversations whose socket reports another peer than the destination.
    pub wrong_peer: usize,
    /// Descriptions of the first failures, with the time since the load began.
    pub failures: Vec<String>,
    /// The same of the first datagrams without answer.
    pub unanswered_datagrams: Vec<String>,
}

/// The order of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// All at the same time.
    Concurrent,
    /// One after the other.
    Sequential,
    /// One after the other, until one fails.
    UntilFailure,
}

/// Bytes to send on a connection that is open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SendRequest {
    /// The name under which the connection was kept open.
    pub id: String,
    /// Bytes to send, at least 1.
    pub size: usize,
    /// The number of bytes to request, as in [`ConnectRequest`].
    pub answer: usize,
    /// How long to wait for the answer.
    pub timeout: Duration,
}

/// A page to fetch over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GetRequest {
    /// An `http://` URL whose host is an address.
    pub url: String,
    /// How long to wait for the whole answer.
    pub timeout: Duration,
}

/// A response of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Response {
    /// The servers of the host are running. Sent once, without a request.
    Ready,
    /// The results of the attempts, in their order.
    Attempts(Vec<Attempt>),
    /// The page.
    Page(Result<Page, Failure>),
    /// The result of a request of the benchmark.
    Bench(BenchResponse),
    /// The result of a load.
    Load(LoadReport),
    /// The request was invalid.
    InvalidRequest(String),
}

/// The result of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attempt {
    /// A host answered.
    Answered(Answer),
    /// There was no answer.
    Failed(Failure),
}

/// An answer, and what the caller's own socket reports about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The name of the host that answered.
    pub host: String,
    /// The client address that the host saw.
    pub client: SocketAddr,
    /// The destination that the host saw before the connection was redirected (`SO_ORIGINAL_DST`).
    /// None for UDP, and if it was not redirected.
    pub original: Option<SocketAddr>,
    /// The address that the caller used.
    pub destination: SocketAddr,
    /// The source address that the request specified.
    pub source: Option<IpAddr>,
    /// The peer that the caller's socket reports: getpeername, or for an unconnected socket the
    /// sender of the answer.
    pub peer: SocketAddr,
}

/// The reason why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The operation that failed: "bind", "connect", "send" or "receive".
    pub operation: String,
    /// The error's kind.
    pub kind: FailureKind,
    /// The error as text.
    pub message: String,
}

/// The kind of a [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// Connection refused.
    Refused,
    /// Nothing arrived within the timeout of the attempt.
    TimedOut,
    /// The network or the kernel reported an error: EHOSTUNREACH, ENETUNREACH, EPERM, EACCES, or an
    /// aborted connection.
    Unreachable,
    /// The connection was reset, by the peer or in its name.
    Reset,
    /// Another host answers than before, or the host sees another client address than before.
    Moved,
    /// The message is too big for the path to the peer.
    TooBig,
    /// A failure that does not come from the network: an address in use, or an answer that does not
    /// parse.
    Other,
}

/// An HTTP response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// The status code.
    pub status: u16,
    /// The headers, with names in lower case. If a name occurs several times, the last value.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
}

impl ConnectRequest {
    /// Creates a request for plain attempts of one byte, all at the same time, each with a timeout
    /// that only a machine which stands still exceeds.
    pub fn new(to: SocketAddr, protocol: Protocol, attempts: usize) -> Self {
        Self {
            to,
            protocol,
            unconnected: false,
            attempts,
            size: 1,
            answer: 0,
            source_port: None,
            sources: Vec::new(),
            pause: Duration::ZERO,
            order: Order::Concurrent,
            hold: None,
            repeats: 0,
            repeat_interval: Duration::ZERO,
            retransmit: false,
            timeout: Duration::from_secs(30),
        }
    }

    /// Sets the timeout of each attempt.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Returns an upper bound of the time that all attempts take.
    pub fn max_duration(&self) -> Duration {
        // Connecting and answering each have the timeout.
        let uses = u32::try_from(self.repeats).unwrap_or(u32::MAX).saturating_add(2);
        let one = self.pause + (self.timeout + self.repeat_interval).saturating_mul(uses);
        one.saturating_mul(u32::try_from(self.attempts).unwrap_or(u32::MAX))
    }
}

impl Attempt {
    /// Returns true if a host answered.
    pub fn is_answered(&self) -> bool {
        matches!(self, Self::Answered(_))
    }

    /// Returns true if this host answered.
    pub fn is_answered_by(&self, host: Host) -> bool {
        matches!(self, Self::Answered(answer) if answer.host == host.name())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.message)
    }
}

impl Failure {
    /// Creates the failure of an operation.
    pub fn new(operation: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::ConnectionRefused => FailureKind::Refused,
            // Before kernel 6.1, the socket programs cannot choose another error.
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
            // A UDP socket reports this after the proxy has destroyed it.
            _ if error.raw_os_error() == Some(nix::libc::EDESTADDRREQ) => FailureKind::Unreachable,
            _ => FailureKind::Other,
        };
        Self { operation: operation.to_owned(), kind, message: error.to_string() }
    }

    /// Creates the failure of an operation that timed out.
    pub fn timed_out(operation: &str, after: Duration) -> Self {
        let message = format!("timed out after {:.1} s", after.as_secs_f32());
        Self { operation: operation.to_owned(), kind: FailureKind::TimedOut, message }
    }

    /// Creates a failure that does not come from the network.
    pub fn other(operation: &str, message: impl Into<String>) -> Self {
        Self { operation: operation.to_owned(), kind: FailureKind::Other, message: message.into() }
    }
}
