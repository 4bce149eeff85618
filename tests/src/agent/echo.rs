//! The servers of a host: TCP and UDP on three ports, both families, and SCTP where the kernel has
//! it. An answer has the host's name, and the client address and original destination that the
//! server saw.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
};

use anyhow::{Context as _, Result};
use nix::{
    cmsg_space,
    libc::{self, in_pktinfo, in6_pktinfo},
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrStorage, getsockopt,
        recvmsg, sendmsg, setsockopt, sockopt,
    },
};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Interest},
    net::{TcpListener, TcpStream, UdpSocket},
};

use super::{connection::stream_protocol, message, protocol::Protocol};

/// The ports on which every pod and node answers.
const PORTS: [u16; 3] = [8080, 8081, 5353];
const BACKLOG: i32 = 512;
const LARGEST_DATAGRAM: usize = 65_536;

/// The address to which a datagram was sent. Its answer must come from this address.
enum LocalAddress {
    V4(in_pktinfo),
    V6(in6_pktinfo),
}

/// Starts all servers on the current runtime.
pub(super) fn start(host: &'static str) -> Result<()> {
    for port in PORTS {
        for any in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
            let address = SocketAddr::new(any, port);
            let listener =
                listen(address, Protocol::Tcp).with_context(|| format!("listen on TCP {address}"))?;
            tokio::spawn(serve_streams(listener, host));
            match listen(address, Protocol::Sctp) {
                Ok(listener) => drop(tokio::spawn(serve_streams(listener, host))),
                Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => {}
                Err(error) => return Err(error).with_context(|| format!("listen on SCTP {address}")),
            }
            let socket = bind_udp(address).with_context(|| format!("bind UDP {address}"))?;
            tokio::spawn(serve_udp(socket, host));
        }
    }
    Ok(())
}

fn listen(address: SocketAddr, protocol: Protocol) -> io::Result<TcpListener> {
    let socket = bind(address, Type::STREAM, stream_protocol(protocol))?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn bind_udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = bind(address, Type::DGRAM, None)?;
    if address.is_ipv4() {
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    }
    UdpSocket::from_std(socket.into())
}

fn bind(address: SocketAddr, kind: Type, protocol: Option<socket2::Protocol>) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, protocol)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if kind == Type::STREAM {
        socket.set_reuse_address(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

async fn serve_streams(listener: TcpListener, host: &'static str) {
    loop {
        match listener.accept().await {
            Ok((stream, client)) => drop(tokio::spawn(serve_connection(stream, client, host))),
            Err(error) => eprintln!("{host}: accept: {error}"),
        }
    }
}

/// Answers every line until the client closes the connection.
async fn serve_connection(stream: TcpStream, client: SocketAddr, host: &'static str) -> io::Result<()> {
    let seen = message::Seen { client, original: original_destination(&stream) };
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    while stream.read_until(b'\n', &mut line).await? > 0 {
        stream.write_all(&message::answer(host, seen, &line)).await?;
        line.clear();
    }
    Ok(())
}

/// Returns where a client connected to, if netfilter on this host sent the connection elsewhere.
fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    let local = stream.local_addr().ok()?;
    // There is none without connection tracking.
    let original = if local.is_ipv4() {
        SocketAddr::V4(SockaddrIn::from(getsockopt(stream, sockopt::OriginalDst).ok()?).into())
    } else {
        SocketAddr::V6(SockaddrIn6::from(getsockopt(stream, sockopt::Ip6tOriginalDst).ok()?).into())
    };
    (original != local).then_some(original)
}

async fn serve_udp(socket: UdpSocket, host: &'static str) {
    loop {
        // An error concerns one datagram only.
        if let Err(error) = socket.async_io(Interest::READABLE, || answer_datagram(&socket, host)).await {
            eprintln!("{host}: answer a datagram: {error}");
        }
    }
}

fn answer_datagram(socket: &UdpSocket, host: &str) -> io::Result<()> {
    let mut buffer = vec![0; LARGEST_DATAGRAM];
    let mut control = cmsg_space!(in_pktinfo, in6_pktinfo);
    let (length, client, local_address) = {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_DONTWAIT;
        let received = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
        (received.bytes, received.address, received.cmsgs()?.find_map(|message| local_address(&message)))
    };
    let client = client.ok_or(io::ErrorKind::AddrNotAvailable)?;
    let client_address = socket_address(&client).ok_or(io::ErrorKind::AddrNotAvailable)?;
    let seen = message::Seen { client: client_address, original: None };
    let text = message::answer(host, seen, buffer.get(..length).unwrap_or_default());
    let from: Vec<_> = local_address.iter().map(LocalAddress::control_message).collect();
    let parts = [IoSlice::new(&text)];
    sendmsg(socket.as_raw_fd(), &parts, &from, MsgFlags::MSG_DONTWAIT, Some(&client))?;
    Ok(())
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|address| SocketAddr::V4((*address).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::V6((*address).into())))
}

/// Returns the packet information for the answer: the local address of the datagram, any interface.
fn local_address(message: &ControlMessageOwned) -> Option<LocalAddress> {
    match message {
        ControlMessageOwned::Ipv4PacketInfo(info) => {
            Some(LocalAddress::V4(in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: info.ipi_addr, ..*info }))
        }
        ControlMessageOwned::Ipv6PacketInfo(info) => {
            Some(LocalAddress::V6(in6_pktinfo { ipi6_ifindex: 0, ..*info }))
        }
        _ => None,
    }
}

impl LocalAddress {
    fn control_message(&self) -> ControlMessage<'_> {
        match self {
            Self::V4(info) => ControlMessage::Ipv4PacketInfo(info),
            Self::V6(info) => ControlMessage::Ipv6PacketInfo(info),
        }
    }
}
