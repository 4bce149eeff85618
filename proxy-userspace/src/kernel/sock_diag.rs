//! Finds and destroys connected UDP sockets of a network namespace (`sock_diag` netlink, `CONFIG_INET_DIAG_DESTROY`).

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_UDP, SOCK_DESTROY},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_SOCK_DIAG};

use super::KernelError;

/// Identifies a socket as long as it lives; what `bpf_get_socket_cookie` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketCookie(pub u64);

/// The cookie of one of our own sockets.
pub fn cookie(socket: &impl AsRawFd) -> io::Result<SocketCookie> {
    super::socket_option_u64(socket, libc::SO_COOKIE).map(SocketCookie)
}

/// How long the kernel may take for an answer.
const ANSWER_TIMEOUT_SECONDS: libc::time_t = 2;

/// Destroys those connected UDP sockets of the calling thread's namespace whose cookies are given, if they are still connected
/// to the peer given: their next call fails with ECONNABORTED, and the application connects anew. Returns those it destroyed.
/// Unconnected sockets are never touched.
#[expect(clippy::implicit_hasher, reason = "one caller, one hasher")]
pub fn destroy_udp(peers: &HashMap<SocketCookie, SocketAddr>) -> Result<Vec<SocketCookie>, KernelError> {
    if peers.is_empty() {
        return Ok(Vec::new());
    }
    let socket = open().map_err(KernelError::call("open", "a sock_diag socket"))?;
    let mut destroyed = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let connected = dump(&socket, family).map_err(KernelError::call("list", "UDP sockets"))?;
        for id in connected {
            let cookie = SocketCookie(u64::from_ne_bytes(id.cookie));
            if peers.get(&cookie) == Some(&peer(&id)) {
                let object = format!("UDP socket {}:{}", id.source_address, id.source_port);
                destroy(&socket, family, id).map_err(KernelError::call("destroy", object))?;
                destroyed.push(cookie);
            }
        }
    }
    Ok(destroyed)
}

/// Whether this kernel destroys sockets on request: asked for one that nobody has, it says so, or that it cannot.
pub fn can_destroy() -> Result<bool, KernelError> {
    let failed = KernelError::call("ask to destroy", "a socket");
    match open().and_then(|socket| destroy(&socket, AF_INET, SocketId::new_v4())) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

/// Whom a socket is connected to: an IPv6 socket that talks to an IPv4-mapped address talks to IPv4.
fn peer(id: &SocketId) -> SocketAddr {
    let address: IpAddr = id.destination_address;
    SocketAddr::new(address.to_canonical(), id.destination_port)
}

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddr::new(0, 0))?;
    super::set_receive_timeout(&socket, ANSWER_TIMEOUT_SECONDS)?;
    Ok(socket)
}

fn request(family: u8, socket_id: SocketId, states: StateFlags) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_UDP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    })
}

fn send(socket: &Socket, message_type: Option<u16>, flags: u16, message: SockDiagMessage) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut packet = NetlinkMessage::new(header, message.into());
    packet.finalize();
    if let Some(message_type) = message_type {
        packet.header.message_type = message_type;
    }
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    socket.send(&bytes, 0).map(drop)
}

/// The connected sockets of a family.
fn dump(socket: &Socket, family: u8) -> io::Result<Vec<SocketId>> {
    let any = if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() };
    send(socket, None, NLM_F_DUMP, request(family, any, StateFlags::ESTABLISHED))?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        for message in messages(&bytes) {
            match message?.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    found.push(response.header.socket_id);
                }
                NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                _ => {}
            }
        }
    }
}

fn destroy(socket: &Socket, family: u8, id: SocketId) -> io::Result<()> {
    send(socket, Some(SOCK_DESTROY), NLM_F_ACK, request(family, id, StateFlags::all()))?;
    let (bytes, _) = socket.recv_from_full()?;
    for message in messages(&bytes) {
        if let NetlinkPayload::Error(error) = message?.payload {
            let gone = error.code.is_none() || error.raw_code() == -libc::ENOENT;
            return if gone { Ok(()) } else { Err(error.to_io()) };
        }
    }
    Ok(())
}

/// The messages of one datagram.
fn messages(bytes: &[u8]) -> impl Iterator<Item = io::Result<NetlinkMessage<SockDiagMessage>>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest);
        let length = message.as_ref().map_or(rest.len(), |m| m.header.length as usize).max(1);
        // Messages are padded to four bytes.
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message.map_err(io::Error::other))
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// As root, like every test that changes the kernel.
    #[test]
    fn a_connected_socket_is_destroyed_by_its_cookie_and_peer_and_no_other_is() {
        let server = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let peer = server.local_addr().expect("bound");
        let connect = || {
            let client = UdpSocket::bind("127.0.0.1:0").expect("loopback");
            client.connect(peer).expect("loopback");
            client
        };
        let cookie = |socket| cookie(socket).expect("SO_COOKIE");
        let (doomed, spared, elsewhere) = (connect(), connect(), connect());
        let another = SocketAddr::from(([127, 0, 0, 1], 9));
        let peers = HashMap::from([(cookie(&doomed), peer), (cookie(&elsewhere), another)]);
        let destroyed = destroy_udp(&peers).expect("needs CAP_NET_ADMIN");
        assert_eq!(destroyed, [cookie(&doomed)]);
        elsewhere.send(b"x").expect("it is connected to somebody else by now");
        let error = doomed.send(b"x").expect_err("a destroyed socket");
        assert!(
            [libc::ECONNABORTED, libc::EDESTADDRREQ].contains(&error.raw_os_error().unwrap_or(0)),
            "{error}"
        );
        spared.send(b"x").expect("another socket lives on");
    }
}
