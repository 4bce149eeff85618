//! The entries that the socket programs write: which VIP and endpoint a socket has.

use proxy_common::{
    layout::{Connection, Endpoint, ProgramError, SocketPeer, UdpSocket},
    tables::Tables as _,
};

use super::{
    EntryPoint, Kernel, TCP_CONNECTIONS, UDP_CONNECTIONS, UDP_FLOWS, UDP_REPLIES, UDP_SOCKETS, copy,
};
use crate::ctx::SockAddr;

impl<P: EntryPoint> Kernel<P> {
    /// Writes the endpoint for datagrams of a socket to a VIP.
    #[inline(always)]
    pub fn set_udp_flow(&self, vip: &SocketPeer, endpoint: &Endpoint) {
        self.check_write(UDP_FLOWS.insert(vip, endpoint, 0), ProgramError::UdpFlows);
    }

    /// Writes the VIP that a socket sees as the source of replies of an endpoint.
    #[inline(always)]
    pub fn set_udp_reply(&self, endpoint: &SocketPeer, vip: &Endpoint) {
        self.check_write(UDP_REPLIES.insert(endpoint, vip, 0), ProgramError::UdpReplies);
    }

    /// Writes a connected UDP socket, so that userspace can destroy it if its endpoint goes.
    #[inline(always)]
    pub fn set_udp_socket(&self, cookie: u64, socket: &UdpSocket) {
        self.check_write(UDP_SOCKETS.insert(cookie, socket, 0), ProgramError::UdpSockets);
    }

    /// Writes VIP and endpoint of a UDP socket that connects.
    #[inline(always)]
    pub fn set_udp_connection(&self, ctx: &SockAddr, mut connection: Connection) {
        // SAFETY: as in `udp_connection`. An existing value is overwritten in place.
        match unsafe { UDP_CONNECTIONS.get_or_insert_ptr_mut(ctx.raw(), Some(&mut connection)).as_mut() } {
            Some(stored) => *stored = connection,
            None => self.count_error(ProgramError::UdpConnections),
        }
    }

    /// Writes VIP and endpoint of a TCP socket that connects.
    #[inline(always)]
    pub fn set_tcp_connection(&self, socket: u64, connection: &Connection) {
        self.check_write(TCP_CONNECTIONS.insert(&socket, connection, 0), ProgramError::TcpConnections);
    }
}

/// Returns the last endpoint for datagrams of an unconnected socket to a VIP.
#[inline(always)]
pub fn udp_flow(key: &SocketPeer) -> Option<Endpoint> {
    copy!(UDP_FLOWS, key)
}

/// Returns the VIP to which a socket sent when it reached an endpoint.
#[inline(always)]
pub fn udp_reply(key: &SocketPeer) -> Option<Endpoint> {
    copy!(UDP_REPLIES, key)
}

/// Removes the entry of a connected UDP socket.
#[inline(always)]
pub fn remove_udp_socket(cookie: u64) {
    let _ = UDP_SOCKETS.remove(cookie);
}

/// Returns VIP and endpoint of a UDP socket that was connected to a Service.
#[inline(always)]
pub fn udp_connection(ctx: &SockAddr) -> Option<Connection> {
    // SAFETY: the pointer is null or valid until the program ends. The system call holds the lock
    // of the socket.
    unsafe { UDP_CONNECTIONS.get_ptr_mut(ctx.raw()).as_ref() }.copied()
}

/// Removes VIP and endpoint of a UDP socket.
#[inline(always)]
pub fn remove_udp_connection(ctx: &SockAddr) {
    // SAFETY: the socket of the context is valid while the program runs.
    let _ = unsafe { UDP_CONNECTIONS.delete(ctx.socket().raw()) };
}

/// Returns VIP and endpoint of a TCP socket that was connected to a Service.
#[inline(always)]
pub fn tcp_connection(socket: u64) -> Option<Connection> {
    copy!(TCP_CONNECTIONS, &socket)
}

/// Removes VIP and endpoint of a TCP socket.
#[inline(always)]
pub fn remove_tcp_connection(socket: u64) {
    let _ = TCP_CONNECTIONS.remove(&socket);
}
