//! Lists the connections that were translated at their sockets, with the sockets that have them.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    path::Path,
};

use proxy_common::layout::{Connection, Endpoint, ServiceKey, ServiceValue, SocketPeer, UdpSocket};

use crate::{
    kernel::{
        KernelError, bpf,
        netns::{self, NetnsCookie},
        sock_diag::{self, OpenSocket, SocketCookie},
    },
    net::Protocol,
};

/// A connection of a socket, or a conversation of a socket without one (UDP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownConnection {
    /// The protocol.
    pub protocol: Protocol,
    /// The network namespace of the socket. `None` before kernel 5.14.
    pub namespace: Option<NetnsCookie>,
    /// The address of the socket.
    pub client: SocketAddr,
    /// Where the process connected to. `None` for connected UDP sockets: only programs can read it.
    pub vip: Option<SocketAddr>,
    /// An address of the Service.
    pub frontend: Option<SocketAddr>,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// The state of the socket.
    pub state: &'static str,
}

/// What the maps have of a socket.
type Recorded = HashMap<SocketCookie, Vec<(Option<SocketAddr>, Option<SocketAddr>, SocketAddr)>>;

/// Returns the connections in the maps that are pinned in this directory, as far as their sockets
/// are still there and their network namespaces can be entered. An entry of a closed socket stays
/// in its map until the room is needed.
pub fn known_connections(pins: &Path) -> Result<Vec<KnownConnection>, KernelError> {
    let recorded = recorded(pins)?;
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for (path, namespace) in netns::handles() {
        // A namespace that cannot be entered, or that has just ended, shows no sockets.
        let entered =
            netns::within(&path, &namespace, || Ok((netns::current_cookie()?, sock_diag::open_sockets()?)));
        let Ok((cookie, sockets)) = entered else { continue };
        for socket in sockets {
            if recorded.contains_key(&socket.cookie) && seen.insert(socket.cookie) {
                found.extend(connections_of(&socket, cookie, &recorded[&socket.cookie]));
            }
        }
    }
    Ok(found)
}

fn connections_of(
    socket: &OpenSocket,
    namespace: Option<NetnsCookie>,
    recorded: &[(Option<SocketAddr>, Option<SocketAddr>, SocketAddr)],
) -> impl Iterator<Item = KnownConnection> {
    let OpenSocket { protocol, source, state, .. } = *socket;
    recorded.iter().map(move |(vip, frontend, endpoint)| KnownConnection {
        protocol,
        namespace,
        client: source,
        vip: *vip,
        frontend: *frontend,
        endpoint: *endpoint,
        state,
    })
}

fn recorded(pins: &Path) -> Result<Recorded, KernelError> {
    let mut recorded = Recorded::new();
    let mut add = |cookie, vip: Option<Endpoint>, frontend: Option<SocketAddr>, endpoint: Endpoint| {
        let vip = vip.map(SocketAddr::from);
        let of_socket = recorded.entry(SocketCookie(cookie)).or_default();
        of_socket.push((vip, frontend.or(vip), SocketAddr::from(endpoint)));
    };
    read(pins, "tcp_connections", |cookie: u64, Connection { vip, endpoint }| {
        add(cookie, Some(vip), None, endpoint);
    })?;
    read(pins, "udp_flows", |SocketPeer { socket, peer, .. }, endpoint: Endpoint| {
        add(socket, Some(peer), None, endpoint);
    })?;
    let mut frontends = HashMap::new();
    read(pins, "services", |key: ServiceKey, value: ServiceValue| {
        let frontend = SocketAddr::from(Endpoint::new(key.addr, key.port));
        frontends.insert(value.service, frontend);
    })?;
    read(pins, "udp_sockets", |cookie: u64, UdpSocket { service, endpoint, .. }| {
        add(cookie, None, frontends.get(&service).copied(), endpoint);
    })?;
    Ok(recorded)
}

fn read<K: aya::Pod, V: aya::Pod>(
    pins: &Path,
    map: &'static str,
    visit: impl FnMut(K, V),
) -> Result<(), KernelError> {
    let mut reader = bpf::pinned_reader::<K, V>(pins, map)?;
    reader.read_all(visit).map_err(KernelError::call("read map", map))
}
