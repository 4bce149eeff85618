//! Finds connected sockets of a network namespace, and destroys those of UDP (`sock_diag` netlink,
//! `CONFIG_INET_DIAG_DESTROY`).

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
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use netlink_sys::{Socket, protocols::NETLINK_SOCK_DIAG};

use super::{KernelError, netlink};

/// Identifies a socket as long as it lives; what `bpf_get_socket_cookie` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketCookie(pub u64);

/// The cookie of one of our own sockets.
pub fn cookie(socket: &impl AsRawFd) -> io::Result<SocketCookie> {
    super::socket_option_u64(socket, libc::SO_COOKIE).map(SocketCookie)
}

/// Destroys those connected UDP sockets of the calling thread's namespace whose cookies are given, if they are still connected
/// to the peer given: their next call fails with ECONNABORTED, and the application connects anew. Returns those it destroyed.
/// Unconnected sockets are never touched.
#[expect(clippy::implicit_hasher, reason = "one caller, one hasher")]
pub fn destroy_udp(peers: &HashMap<SocketCookie, SocketAddr>) -> Result<Vec<SocketCookie>, KernelError> {
    if peers.is_empty() {
        return Ok(Vec::new());
    }
    let socket = netlink::open(NETLINK_SOCK_DIAG).map_err(KernelError::call("open", "a sock_diag socket"))?;
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

/// The addresses of the calling thread's namespace from which TCP and UDP sockets are connected, or are being so, or are not yet
/// done with it.
pub fn connected_source_addresses() -> Result<BTreeSet<IpAddr>, KernelError> {
    let socket = netlink::open(NETLINK_SOCK_DIAG).map_err(KernelError::call("open", "a sock_diag socket"))?;
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

/// Whether this kernel destroys sockets on request: asked for one that nobody has, it says so, or that it cannot.
pub fn can_destroy() -> Result<bool, KernelError> {
    let failed = KernelError::call("ask to destroy", "a socket");
    match netlink::open(NETLINK_SOCK_DIAG).and_then(|socket| destroy(&socket, AF_INET, SocketId::new_v4())) {
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

fn request(family: u8, protocol: u8, socket_id: SocketId, states: StateFlags) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    })
}

/// The sockets of a family and protocol in these states.
fn dump(socket: &Socket, family: u8, protocol: u8, states: StateFlags) -> io::Result<Vec<SocketId>> {
    let any = if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() };
    let answers = netlink::ask(socket, None, NLM_F_DUMP, request(family, protocol, any, states))?;
    let id = |message| match message {
        SockDiagMessage::InetResponse(response) => Some(response.header.socket_id),
        _ => None,
    };
    Ok(answers.into_iter().filter_map(id).collect())
}

fn destroy(socket: &Socket, family: u8, id: SocketId) -> io::Result<()> {
    match netlink::tell(socket, Some(SOCK_DESTROY), 0, request(family, IPPROTO_UDP, id, StateFlags::all())) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done,
    }
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
