//! Lists the connected sockets of a network namespace, and destroys UDP sockets (`sock_diag`
//! netlink, `CONFIG_INET_DIAG_DESTROY`).

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
};

use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, SOCK_DESTROY},
    inet::{ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::{KernelError, netlink::NetlinkSocket};
use crate::net::Protocol;

/// The kernel's unique number of a socket, as `bpf_get_socket_cookie` returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketCookie(pub u64);

/// Returns the cookie of one of this process's sockets.
pub fn cookie(socket: &impl AsRawFd) -> io::Result<SocketCookie> {
    super::socket_option_u64(socket, libc::SO_COOKIE).map(SocketCookie)
}

/// Destroys the UDP sockets in the calling thread's namespace that have these cookies and are still
/// connected to the given peers. Returns the cookies of the destroyed sockets.
///
/// The next call on such a socket fails with ECONNABORTED, and the application connects again.
/// Unconnected sockets are never destroyed.
#[expect(clippy::implicit_hasher, reason = "one caller, one hasher")]
pub fn destroy_udp(peers: &HashMap<SocketCookie, SocketAddr>) -> Result<Vec<SocketCookie>, KernelError> {
    if peers.is_empty() {
        return Ok(Vec::new());
    }
    let socket = open()?;
    let mut destroyed = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let connected = dump(&socket, family, IPPROTO_UDP, StateFlags::ESTABLISHED)
            .map_err(KernelError::call("list", "UDP sockets"))?;
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

/// Returns the source addresses of the TCP and UDP sockets in the calling thread's namespace that
/// are connected, connecting or closing.
pub fn connected_source_addresses() -> Result<BTreeSet<IpAddr>, KernelError> {
    let socket = open()?;
    let open = StateFlags::all().difference(StateFlags::TIME_WAIT | StateFlags::CLOSE | StateFlags::LISTEN);
    let mut addresses = BTreeSet::new();
    for family in [AF_INET, AF_INET6] {
        for (protocol, states) in [(IPPROTO_TCP, open.clone()), (IPPROTO_UDP, StateFlags::ESTABLISHED)] {
            let sockets = dump(&socket, family, protocol, states);
            let sockets = sockets.map_err(KernelError::call("list", "connected sockets"))?;
            addresses.extend(sockets.into_iter().map(|id| id.source_address.to_canonical()));
        }
    }
    Ok(addresses)
}

/// A TCP or UDP socket that neither listens nor is closed (TCP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenSocket {
    /// Its cookie. Sockets in `TIME_WAIT` have none of their own.
    pub cookie: SocketCookie,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its address.
    pub source: SocketAddr,
    /// Its state, in the words of ss(8).
    pub state: &'static str,
}

/// Returns the sockets in the calling thread's namespace that may have a peer.
pub fn open_sockets() -> Result<Vec<OpenSocket>, KernelError> {
    let socket = open()?;
    let states = StateFlags::all().difference(StateFlags::TIME_WAIT | StateFlags::LISTEN);
    let mut found = Vec::new();
    for family in [AF_INET, AF_INET6] {
        for (number, protocol) in [(IPPROTO_TCP, Protocol::Tcp), (IPPROTO_UDP, Protocol::Udp)] {
            let headers = dump_headers(&socket, family, number, states.clone());
            let headers = headers.map_err(KernelError::call("list", "sockets"))?;
            found.extend(headers.into_iter().map(|header| OpenSocket {
                cookie: SocketCookie(u64::from_ne_bytes(header.socket_id.cookie)),
                protocol,
                source: source(&header.socket_id),
                state: state_name(protocol, header.state),
            }));
        }
    }
    Ok(found)
}

/// Returns the name of a state (`enum` in `net/tcp_states.h`). UDP sockets use two of them.
fn state_name(protocol: Protocol, state: u8) -> &'static str {
    const NAMES: [&str; 12] = [
        "established",
        "syn-sent",
        "syn-recv",
        "fin-wait-1",
        "fin-wait-2",
        "time-wait",
        "closed",
        "close-wait",
        "last-ack",
        "listening",
        "closing",
        "new-syn-recv",
    ];
    let name = usize::from(state).checked_sub(1).and_then(|index| NAMES.get(index)).copied();
    match (protocol, name) {
        (Protocol::Udp, Some("closed")) => "unconnected",
        (_, name) => name.unwrap_or("unknown"),
    }
}

fn open() -> Result<NetlinkSocket, KernelError> {
    NetlinkSocket::open(NETLINK_SOCK_DIAG).map_err(KernelError::call("open", "a sock_diag socket"))
}

/// Returns true if this kernel can destroy sockets. Asks it to destroy a socket that does not
/// exist.
pub fn can_destroy() -> Result<bool, KernelError> {
    match destroy(&open()?, AF_INET, SocketId::new_v4()) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(KernelError::call("destroy", "a socket that does not exist")(error)),
    }
}

fn source(id: &SocketId) -> SocketAddr {
    SocketAddr::new(id.source_address.to_canonical(), id.source_port)
}

/// Returns the peer of a socket. An IPv6 socket with an IPv4-mapped peer is connected over IPv4.
fn peer(id: &SocketId) -> SocketAddr {
    let address: IpAddr = id.destination_address;
    SocketAddr::new(address.to_canonical(), id.destination_port)
}

fn request(family: u8, protocol: u8, socket_id: SocketId, states: StateFlags) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    })
}

/// Lists the sockets of a family and protocol in these states.
fn dump(socket: &NetlinkSocket, family: u8, protocol: u8, states: StateFlags) -> io::Result<Vec<SocketId>> {
    let headers = dump_headers(socket, family, protocol, states)?;
    Ok(headers.into_iter().map(|header| header.socket_id).collect())
}

fn dump_headers(
    socket: &NetlinkSocket,
    family: u8,
    protocol: u8,
    states: StateFlags,
) -> io::Result<Vec<InetResponseHeader>> {
    let any = if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() };
    let answers = match socket.query(None, NLM_F_DUMP, request(family, protocol, any, states)) {
        // The kernel has no sock_diag for this protocol, or for IPv6.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Vec::new(),
        answers => answers?,
    };
    let header = |message| match message {
        SockDiagMessage::InetResponse(response) => Some(response.header),
        _ => None,
    };
    Ok(answers.into_iter().filter_map(header).collect())
}

fn destroy(socket: &NetlinkSocket, family: u8, id: SocketId) -> io::Result<()> {
    match socket.query(Some(SOCK_DESTROY), 0, request(family, IPPROTO_UDP, id, StateFlags::all())) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_open_socket_has_its_address_and_state() {
        let server = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let client = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        client.connect(server.local_addr().expect("bound")).expect("loopback");
        let sockets = open_sockets().expect("sock_diag");
        for (socket, state) in [(&client, "established"), (&server, "unconnected")] {
            let cookie = cookie(socket).expect("SO_COOKIE");
            let found = sockets.iter().find(|found| found.cookie == cookie).expect("the socket");
            assert_eq!((found.protocol, found.state), (Protocol::Udp, state));
            assert_eq!(found.source, socket.local_addr().expect("bound"));
        }
    }

    /// As root, like every test that changes the kernel.
    #[test]
    fn only_the_socket_with_this_cookie_and_peer_is_destroyed() {
        let server = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let peer = server.local_addr().expect("bound");
        let connect = || {
            let client = UdpSocket::bind("127.0.0.1:0").expect("loopback");
            client.connect(peer).expect("loopback");
            client
        };
        let cookie = |socket| cookie(socket).expect("SO_COOKIE");
        let (selected, other, reconnected) = (connect(), connect(), connect());
        let another = SocketAddr::from(([127, 0, 0, 1], 9));
        let peers = HashMap::from([(cookie(&selected), peer), (cookie(&reconnected), another)]);
        let destroyed = destroy_udp(&peers).expect("needs CAP_NET_ADMIN");
        assert_eq!(destroyed, [cookie(&selected)]);
        reconnected.send(b"x").expect("it has another peer than the given one");
        let error = selected.send(b"x").expect_err("a destroyed socket");
        assert!(
            [libc::ECONNABORTED, libc::EDESTADDRREQ].contains(&error.raw_os_error().unwrap_or(0)),
            "{error}"
        );
        other.send(b"x").expect("other sockets stay");
    }
}
