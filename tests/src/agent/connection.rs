//! One connection of an agent: opened, used at least once, and kept open if requested.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use nix::{
    libc,
    sys::socket::{setsockopt, sockopt},
};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpSocket, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

use super::{
    message,
    protocol::{Answer, ConnectRequest, Failure, FailureKind, Protocol, SendRequest},
};

/// The longest answer that UDP can carry.
const ANSWER_SIZE: usize = 65_536;
/// The pause between two attempts to bind a source port that is in use.
const BIND_RETRY_INTERVAL: Duration = Duration::from_millis(2);
/// TCP waits this long before it retransmits its first segment. UDP attempts do the same.
const RETRANSMIT_AFTER: Duration = Duration::from_secs(1);

/// An open connection.
pub(super) struct Connection {
    destination: SocketAddr,
    source: Option<IpAddr>,
    socket: OpenSocket,
    retransmit: bool,
}

/// The number of bytes in each direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageSizes {
    question: usize,
    /// 0: as many as the answer needs.
    answer: usize,
}

enum OpenSocket {
    /// TCP or SCTP.
    Stream(BufReader<TcpStream>),
    Connected(UdpSocket),
    Unconnected(UdpSocket),
}

/// Makes the `number`th attempt. Also returns the connection if it was opened.
pub(super) async fn attempt(
    request: &ConnectRequest,
    number: usize,
) -> (Option<Connection>, Result<Answer, Failure>) {
    match open_numbered(request, number).await {
        Err(failure) => (None, Err(failure)),
        Ok(mut connection) => {
            let answer = connection.exchange_repeatedly(request).await;
            (Some(connection), answer)
        }
    }
}

/// Opens a connection without using it.
pub(super) async fn open_connection(request: &ConnectRequest) -> Result<Connection, Failure> {
    open_numbered(request, 0).await
}

async fn open_numbered(request: &ConnectRequest, number: usize) -> Result<Connection, Failure> {
    let socket = timeout(request.timeout, open(request, number))
        .await
        .unwrap_or_else(|_| Err(Failure::timed_out("connect", request.timeout)))?;
    let (source, retransmit) = (source(request, number), request.retransmit);
    Ok(Connection { destination: request.to, source, socket, retransmit })
}

async fn open(request: &ConnectRequest, number: usize) -> Result<OpenSocket, Failure> {
    let local = local_address(request, number);
    match request.protocol {
        Protocol::Tcp | Protocol::Sctp => open_stream(request.to, local, request.protocol).await,
        Protocol::Udp => open_udp(request, local).await,
    }
}

/// Opens a connection of TCP or SCTP. A fixed source port is free only after the peer has closed
/// the previous connection from it too, so this function retries until then.
async fn open_stream(to: SocketAddr, local: SocketAddr, protocol: Protocol) -> Result<OpenSocket, Failure> {
    loop {
        match connect_stream(to, local, protocol).await {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && local.port() != 0 => {
                sleep(BIND_RETRY_INTERVAL).await;
            }
            Err(error) => return Err(Failure::new("connect", &error)),
            Ok(stream) => return Ok(OpenSocket::Stream(BufReader::new(stream))),
        }
    }
}

async fn connect_stream(to: SocketAddr, local: SocketAddr, protocol: Protocol) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, stream_protocol(protocol))?;
    socket.set_nonblocking(true)?;
    // tokio only calls what both protocols have: connect, read and write.
    let socket = TcpSocket::from_std_stream(socket.into());
    if is_fixed(local) {
        // The previous connection from this port may still be in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(local)?;
    }
    socket.connect(to).await
}

async fn open_udp(request: &ConnectRequest, local: SocketAddr) -> Result<OpenSocket, Failure> {
    let socket = bind_udp(local).map_err(|error| Failure::new("bind", &error))?;
    if request.unconnected {
        return Ok(OpenSocket::Unconnected(socket));
    }
    socket.connect(request.to).await.map_err(|error| Failure::new("connect", &error))?;
    Ok(OpenSocket::Connected(socket))
}

fn bind_udp(local: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, None)?;
    // An unconnected socket reports ICMP errors only with this option.
    if local.is_ipv4() {
        setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?;
        socket.set_only_v6(true)?;
    }
    if is_fixed(local) {
        // One port may have conversations with several peers.
        socket.set_reuse_address(true)?;
        socket.bind(&local.into())?;
    }
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

/// Returns the number for a stream socket of this protocol. None stands for TCP.
pub(super) fn stream_protocol(protocol: Protocol) -> Option<socket2::Protocol> {
    (protocol == Protocol::Sctp).then(|| socket2::Protocol::from(libc::IPPROTO_SCTP))
}

fn local_address(request: &ConnectRequest, number: usize) -> SocketAddr {
    let unspecified = if request.to.is_ipv4() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    SocketAddr::new(source(request, number).unwrap_or(unspecified), request.source_port.unwrap_or(0))
}

/// Returns the source address of an attempt. Attempts use the addresses in turn.
fn source(request: &ConnectRequest, number: usize) -> Option<IpAddr> {
    request.sources.iter().cycle().nth(number % request.sources.len().max(1)).copied()
}

fn is_fixed(local: SocketAddr) -> bool {
    local.port() != 0 || !local.ip().is_unspecified()
}

impl MessageSizes {
    /// Returns the sizes of a request.
    pub(super) fn of(request: &SendRequest) -> Self {
        Self { question: request.size, answer: request.answer }
    }

    /// Returns the sizes of each exchange of a request.
    pub(super) fn of_connect(request: &ConnectRequest) -> Self {
        Self { question: request.size, answer: request.answer }
    }

    fn message(self) -> Vec<u8> {
        message::question(self.question, self.answer)
    }
}

impl Connection {
    async fn exchange_repeatedly(&mut self, request: &ConnectRequest) -> Result<Answer, Failure> {
        let sizes = MessageSizes::of_connect(request);
        let first = self.exchange(sizes, request.timeout).await?;
        for _ in 0..request.repeats {
            sleep(request.repeat_interval).await;
            let now = self.exchange(sizes, request.timeout).await?;
            if now != first {
                let message =
                    format!("{} saw {}, then {} saw {}", first.host, first.client, now.host, now.client);
                return Err(Failure { kind: FailureKind::Moved, ..Failure::other("receive", message) });
            }
        }
        Ok(first)
    }

    /// Returns the local port, by which a connection is found in conntrack and in the map of flows.
    pub(super) fn local_port(&self) -> Option<u16> {
        let address = match &self.socket {
            OpenSocket::Stream(stream) => stream.get_ref().local_addr(),
            OpenSocket::Connected(socket) | OpenSocket::Unconnected(socket) => socket.local_addr(),
        };
        address.ok().map(|address| address.port())
    }

    /// Sends a question and reads the answer.
    pub(super) async fn exchange(&mut self, sizes: MessageSizes, limit: Duration) -> Result<Answer, Failure> {
        let (destination, again) = (self.destination, self.retransmit);
        let question = sizes.message();
        let received = match &mut self.socket {
            OpenSocket::Stream(stream) => timeout(limit, exchange_stream(stream, &question)).await,
            OpenSocket::Connected(socket) => {
                timeout(limit, exchange_udp(socket, &question, None, again)).await
            }
            OpenSocket::Unconnected(socket) => {
                timeout(limit, exchange_udp(socket, &question, Some(destination), again)).await
            }
        };
        let (text, peer) = received.unwrap_or_else(|_| Err(Failure::timed_out("receive", limit)))?;
        let Some((host, seen)) = message::parse_answer(&text) else {
            let head = String::from_utf8_lossy(text.get(..80).unwrap_or(&text)).into_owned();
            let length = text.len();
            let message = format!("{length} bytes, {head:?}, are not the answer of a host of this world");
            return Err(Failure::other("receive", message));
        };
        let message::Seen { client, original } = seen;
        Ok(Answer { host, client, original, destination, source: self.source, peer })
    }
}

async fn exchange_stream(
    stream: &mut BufReader<TcpStream>,
    question: &[u8],
) -> Result<(Vec<u8>, SocketAddr), Failure> {
    let failed = |operation| move |error| Failure::new(operation, &error);
    stream.write_all(question).await.map_err(failed("send"))?;
    let mut line = Vec::new();
    let length = stream.read_until(b'\n', &mut line).await.map_err(failed("receive"))?;
    if length == 0 {
        return Err(Failure::new("receive", &io::ErrorKind::ConnectionReset.into()));
    }
    let peer = stream.get_ref().peer_addr().map_err(failed("getpeername"))?;
    Ok((line, peer))
}

/// Sends a datagram and waits for the answer without a time limit.
async fn exchange_udp(
    socket: &UdpSocket,
    question: &[u8],
    to: Option<SocketAddr>,
    retransmit: bool,
) -> Result<(Vec<u8>, SocketAddr), Failure> {
    send_udp(socket, question, to).await?;
    let answer = tokio::select! {
        answer = receive_udp(socket, to) => answer,
        () = sleep(RETRANSMIT_AFTER), if retransmit => {
            send_udp(socket, question, to).await?;
            receive_udp(socket, to).await
        }
    };
    answer.map_err(|error| Failure::new("receive", &error))
}

async fn send_udp(socket: &UdpSocket, question: &[u8], to: Option<SocketAddr>) -> Result<(), Failure> {
    let sent = match to {
        Some(to) => socket.send_to(question, to).await,
        None => socket.send(question).await,
    };
    sent.map(drop).map_err(|error| Failure::new("send", &error))
}

async fn receive_udp(socket: &UdpSocket, to: Option<SocketAddr>) -> io::Result<(Vec<u8>, SocketAddr)> {
    let mut buffer = vec![0; ANSWER_SIZE];
    let (length, peer) = match to {
        Some(_) => socket.recv_from(&mut buffer).await?,
        None => (socket.recv(&mut buffer).await?, socket.peer_addr()?),
    };
    buffer.truncate(length);
    Ok((buffer, peer))
}
