//! One connection of an agent: opened, used once, and perhaps kept.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpSocket, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

use super::{
    message,
    protocol::{Answer, Dial, Failure, FailureKind, Protocol, Send},
};

/// The longest answer that UDP can carry.
const ANSWER_SIZE: usize = 65_536;
/// Between two tries to use a port that is busy.
const PORT_BUSY: Duration = Duration::from_millis(2);
/// As long as TCP waits before it sends its first packet again; UDP tries do the same.
const RETRANSMIT_AFTER: Duration = Duration::from_secs(1);

/// An open connection.
pub(super) struct Held {
    destination: SocketAddr,
    source: Option<IpAddr>,
    socket: Open,
    send_again: bool,
}

/// How many bytes go either way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    question: usize,
    /// 0: as many as it needs.
    answer: usize,
}

enum Open {
    Tcp(BufReader<TcpStream>),
    Connected(UdpSocket),
    Unconnected(UdpSocket),
}

/// Makes the `number`th try. The connection is returned too if it was made.
pub(super) async fn one(dial: &Dial, number: usize) -> (Option<Held>, Result<Answer, Failure>) {
    let opened = match timeout(dial.timeout, open(dial, number)).await {
        Ok(opened) => opened,
        Err(_) => Err(Failure::timed_out("connect", dial.timeout)),
    };
    match opened {
        Err(failure) => (None, Err(failure)),
        Ok(socket) => {
            let mut held = Held {
                destination: dial.to,
                source: source(dial, number),
                socket,
                send_again: dial.send_again,
            };
            let answer = held.ask_again_and_again(dial).await;
            (Some(held), answer)
        }
    }
}

async fn open(dial: &Dial, number: usize) -> Result<Open, Failure> {
    let local = local_address(dial, number);
    match dial.protocol {
        Protocol::Tcp => open_tcp(dial.to, local).await,
        Protocol::Udp => open_udp(dial, local).await,
    }
}

/// A chosen port is free only when the peer has closed the last connection from it too: until then it is asked for again.
async fn open_tcp(to: SocketAddr, local: SocketAddr) -> Result<Open, Failure> {
    loop {
        match connect_tcp(to, local).await {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && local.port() != 0 => {
                sleep(PORT_BUSY).await;
            }
            Err(error) => return Err(Failure::new("connect", &error)),
            Ok(stream) => return Ok(Open::Tcp(BufReader::new(stream))),
        }
    }
}

async fn connect_tcp(to: SocketAddr, local: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    if is_chosen(local) {
        // The last try with this port may still be in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(local)?;
    }
    socket.connect(to).await
}

async fn open_udp(dial: &Dial, local: SocketAddr) -> Result<Open, Failure> {
    let socket = bind_udp(local).map_err(|error| Failure::new("bind", &error))?;
    if dial.unconnected {
        return Ok(Open::Unconnected(socket));
    }
    socket.connect(dial.to).await.map_err(|error| Failure::new("connect", &error))?;
    Ok(Open::Connected(socket))
}

fn bind_udp(local: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, None)?;
    // Unconnected sockets hear of ICMP errors only when they ask to.
    if local.is_ipv4() {
        setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?;
        socket.set_only_v6(true)?;
    }
    if is_chosen(local) {
        // One port may have conversations with several peers.
        socket.set_reuse_address(true)?;
        socket.bind(&local.into())?;
    }
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

fn local_address(dial: &Dial, number: usize) -> SocketAddr {
    let unspecified =
        if dial.to.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    SocketAddr::new(source(dial, number).unwrap_or(unspecified), dial.source_port.unwrap_or(0))
}

/// The source addresses are used in turn.
fn source(dial: &Dial, number: usize) -> Option<IpAddr> {
    dial.sources.iter().cycle().nth(number % dial.sources.len().max(1)).copied()
}

fn is_chosen(local: SocketAddr) -> bool {
    local.port() != 0 || !local.ip().is_unspecified()
}

impl Size {
    /// As asked for.
    pub(super) fn of_send(send: &Send) -> Self {
        Self { question: send.size, answer: send.answer }
    }

    fn message(self) -> Vec<u8> {
        message::question(self.question, self.answer)
    }
}

impl Held {
    async fn ask_again_and_again(&mut self, dial: &Dial) -> Result<Answer, Failure> {
        let size = Size { question: dial.size, answer: dial.answer };
        let first = self.ask(size, dial.timeout).await?;
        for _ in 0..dial.again {
            sleep(dial.between).await;
            let now = self.ask(size, dial.timeout).await?;
            if now != first {
                let message =
                    format!("{} saw {}, then {} saw {}", first.host, first.seen, now.host, now.seen);
                return Err(Failure { kind: FailureKind::Moved, ..Failure::other("receive", message) });
            }
        }
        Ok(first)
    }

    /// Asks with as many bytes and reads the answer.
    pub(super) async fn ask(&mut self, size: Size, within: Duration) -> Result<Answer, Failure> {
        let (destination, again) = (self.destination, self.send_again);
        let asked = match &mut self.socket {
            Open::Tcp(stream) => timeout(within, ask_tcp(stream, &size.message())).await,
            Open::Connected(socket) => timeout(within, ask_udp(socket, &size.message(), None, again)).await,
            Open::Unconnected(socket) => {
                timeout(within, ask_udp(socket, &size.message(), Some(destination), again)).await
            }
        };
        let (text, reported) = asked.unwrap_or_else(|_| Err(Failure::timed_out("receive", within)))?;
        let Some((host, seen)) = message::read_answer(&text) else {
            let head = String::from_utf8_lossy(text.get(..80).unwrap_or(&text)).into_owned();
            let length = text.len();
            let message = format!("{length} bytes, {head:?}, are no answer of a host of this world");
            return Err(Failure::other("receive", message));
        };
        Ok(Answer { host, seen, destination, source: self.source, reported })
    }
}

async fn ask_tcp(
    stream: &mut BufReader<TcpStream>,
    question: &[u8],
) -> Result<(Vec<u8>, SocketAddr), Failure> {
    let failed = |doing| move |error| Failure::new(doing, &error);
    stream.write_all(question).await.map_err(failed("send"))?;
    let mut line = Vec::new();
    let length = stream.read_until(b'\n', &mut line).await.map_err(failed("receive"))?;
    if length == 0 {
        return Err(Failure::new("receive", &io::ErrorKind::ConnectionReset.into()));
    }
    let reported = stream.get_ref().peer_addr().map_err(failed("getpeername"))?;
    Ok((line, reported))
}

/// Waits for as long as the caller lets it.
async fn ask_udp(
    socket: &UdpSocket,
    question: &[u8],
    to: Option<SocketAddr>,
    send_again: bool,
) -> Result<(Vec<u8>, SocketAddr), Failure> {
    send_udp(socket, question, to).await?;
    let answer = tokio::select! {
        answer = receive_udp(socket, to) => answer,
        () = sleep(RETRANSMIT_AFTER), if send_again => {
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
    let (length, reported) = match to {
        Some(_) => socket.recv_from(&mut buffer).await?,
        None => (socket.recv(&mut buffer).await?, socket.peer_addr()?),
    };
    buffer.truncate(length);
    Ok((buffer, reported))
}
