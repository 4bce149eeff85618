//! The socket programs: they translate once, when a process connects or sends, and packets of the
//! socket cost nothing afterwards.
//!
//! For a connected UDP socket the VIP is kept in socket storage. It must not be lost, because each
//! datagram is translated by it. For a TCP socket only the name of its peer depends on the VIP, so
//! it is kept in a map, which costs half as much for each connection. For an unconnected UDP
//! socket, `udp_flows` has the endpoint of each VIP to which it sends, and `udp_replies` has the
//! VIP of each endpoint that replies.
#![forbid(unsafe_code)]

use proxy_common::{
    Protocol,
    layout::{
        AffinityKey, Connection, Counter, Endpoint, ProgramError, ServiceEvent, ServiceValue, SocketPeer,
        UdpSocket,
    },
    select::Slots,
    service,
    tables::Tables as _,
    verdict::{self, SocketSource, Verdict},
};

use crate::{
    ctx::{self, Family, SockAddr, Socket},
    maps::{self, EntryPoint, Kernel},
    trace,
};

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

/// A socket program.
pub trait Hook: EntryPoint {
    /// The IP family of the sockets.
    type Family: Family;
}

/// The result of the system call.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// It goes on with the current address.
    Proceed,
    /// It fails with this error, or with EPERM on kernels without `bpf_set_retval`.
    Fail(i32),
}

impl Outcome {
    /// Returns the code that the kernel expects.
    #[inline(always)]
    pub fn code(self) -> i32 {
        match self {
            Self::Proceed => 1,
            Self::Fail(errno) => {
                if maps::has_set_retval() {
                    ctx::set_errno(errno);
                }
                0
            }
        }
    }
}

/// Chooses an endpoint for a connection or conversation of a socket.
#[inline(always)]
fn choose_endpoint<H: Hook>(ctx: &SockAddr, service: &ServiceValue, slots: Slots) -> Option<Endpoint> {
    let tables = &Kernel::<H>::NEW;
    let client = || AffinityKey::of_sockets(ctx.netns(), service.service);
    service::choose_endpoint(tables, service, slots, client, || slots.pick(tables.random()))
}

/// Handles `connect`.
#[inline(always)]
pub fn connect<H: Hook>(ctx: &SockAddr) -> Outcome {
    let Some(protocol) = Protocol::of_socket(ctx.protocol()) else { return Outcome::Proceed };
    let destination = ctx.address::<H::Family>();
    let choose = |service: &ServiceValue, slots| choose_endpoint::<H>(ctx, service, slots);
    match resolve::<H>(ctx, &destination, protocol, || false, choose) {
        Resolution::Pass => {
            remove_connection(ctx, protocol);
            Outcome::Proceed
        }
        // If the socket is connected, the connection stays, as after any failed connect.
        Resolution::Fail(errno) => Outcome::Fail(errno),
        Resolution::Endpoint { service, endpoint } => {
            Kernel::<H>::NEW.count_service(service, ServiceEvent::Connection);
            trace::socket::<H>(ctx, Counter::FlowsBegun, service, &destination, &endpoint);
            write_connection::<H>(ctx, protocol, service, Connection { vip: destination, endpoint });
            ctx.set_address::<H::Family>(&endpoint);
            Outcome::Proceed
        }
    }
}

/// Handles `sendmsg` with an address. The socket may also be connected, even to that address.
#[inline(always)]
pub fn sendmsg<H: Hook>(ctx: &SockAddr) -> Outcome {
    if Protocol::of_socket(ctx.protocol()) != Some(Protocol::Udp) {
        return Outcome::Proceed;
    }
    let destination = ctx.address::<H::Family>();
    if let Some(connection) = own_connection(ctx)
        && connection.vip == destination
    {
        // A connected socket receives only from its peer. A reply of another endpoint would be
        // lost.
        ctx.set_address::<H::Family>(&connection.endpoint);
        return Outcome::Proceed;
    }
    let choose = |service: &ServiceValue, slots| endpoint_of_flow::<H>(ctx, &destination, service, slots);
    // The conversations of a namespace go on when it becomes exempt.
    let goes_on = || maps::udp_flow(&SocketPeer::new(ctx.cookie(), destination)).is_some();
    match resolve::<H>(ctx, &destination, Protocol::Udp, goes_on, choose) {
        Resolution::Pass => Outcome::Proceed,
        Resolution::Fail(errno) => Outcome::Fail(errno),
        Resolution::Endpoint { endpoint, .. } => {
            ctx.set_address::<H::Family>(&endpoint);
            Outcome::Proceed
        }
    }
}

/// Handles `recvmsg`, which returns the sender of a datagram.
#[inline(always)]
pub fn recvmsg<H: Hook>(ctx: &SockAddr) -> Outcome {
    let sender = ctx.address::<H::Family>();
    if !may_be_endpoint::<H>(&sender) {
        return Outcome::Proceed;
    }
    let vip = if ctx.socket().is_connected() {
        maps::udp_connection(ctx).filter(|own| own.endpoint == sender).map(|own| own.vip)
    } else {
        maps::udp_reply(&SocketPeer::new(ctx.cookie(), sender))
    };
    if let Some(vip) = vip {
        maps::refer_to_constants();
        ctx.set_address::<H::Family>(&vip);
    }
    Outcome::Proceed
}

/// Returns VIP and endpoint of a UDP socket that is connected to a Service.
#[inline(always)]
fn own_connection(ctx: &SockAddr) -> Option<Connection> {
    if ctx.socket().is_connected() { maps::udp_connection(ctx) } else { None }
}

/// Handles `getpeername`.
#[inline(always)]
pub fn getpeername<H: Hook>(ctx: &SockAddr) -> Outcome {
    let peer = ctx.address::<H::Family>();
    let connection = match Protocol::of_socket(ctx.protocol()) {
        // A server calls this for each connection. Its peers are clients, not endpoints.
        Some(Protocol::Tcp) if may_be_endpoint::<H>(&peer) => maps::tcp_connection(ctx.cookie()),
        Some(Protocol::Tcp) => None,
        Some(Protocol::Udp | Protocol::Sctp) | None => maps::udp_connection(ctx),
    };
    if let Some(connection) = connection
        && connection.endpoint == peer
    {
        maps::refer_to_constants();
        ctx.set_address::<H::Family>(&connection.vip);
    }
    Outcome::Proceed
}

/// The decision for a destination.
enum Resolution {
    /// The socket program does not translate it: it is no VIP, or the link programs decide.
    Pass,
    /// The system call fails with this error.
    Fail(i32),
    /// It goes to an endpoint of this service.
    Endpoint { service: u32, endpoint: Endpoint },
}

/// Userspace may remove the last slots of a Service, or all of a list that is not in use any more,
/// between two reads. Another read of the Service finds the slots that are left.
const READS: u32 = 3;

#[inline(always)]
fn resolve<H: Hook>(
    ctx: &SockAddr,
    destination: &Endpoint,
    protocol: Protocol,
    goes_on: impl Fn() -> bool,
    choose: impl Fn(&ServiceValue, Slots) -> Option<Endpoint>,
) -> Resolution {
    if !service::may_be_vip(&Kernel::<H>::NEW, &destination.addr, destination.port) {
        return Resolution::Pass;
    }
    if maps::leaves_alone(ctx.netns()) && !goes_on() {
        return Resolution::Pass;
    }
    let tables = Kernel::<H>::NEW;
    let mut last = 0;
    for _ in 0..READS {
        let service = service::find(&tables, destination, protocol, || is_in_node_netns(ctx));
        let Some(service) = service else { return Resolution::Pass };
        last = service.service;
        let slots = match verdict::for_socket(&service, || source::<H>(ctx, &service)) {
            Verdict::Translate(slots) => slots,
            Verdict::Pass => return Resolution::Pass,
            Verdict::Refuse => {
                tables.count_service(service.service, ServiceEvent::Refusal);
                trace::socket::<H>(ctx, Counter::Refused, service.service, destination, &Endpoint::NONE);
                return Resolution::Fail(ECONNREFUSED);
            }
            Verdict::Drop(reason) => {
                tables.count_service(service.service, ServiceEvent::Drop);
                trace::socket::<H>(ctx, reason.counter(), service.service, destination, &Endpoint::NONE);
                return Resolution::Fail(EHOSTUNREACH);
            }
        };
        if let Some(endpoint) = choose(&service, slots) {
            return Resolution::Endpoint { service: service.service, endpoint };
        }
    }
    tables.count_service(last, ServiceEvent::Refusal);
    tables.count_error(ProgramError::EndpointMissing);
    trace::socket::<H>(ctx, Counter::Refused, last, destination, &Endpoint::NONE);
    Resolution::Fail(ECONNREFUSED)
}

/// Returns what is known of the source of a socket before it sends packets.
#[inline(always)]
fn source<H: Hook>(ctx: &SockAddr, service: &ServiceValue) -> SocketSource {
    match H::Family::bound_source(ctx) {
        Some(address) => {
            SocketSource::Bound { in_ranges: Kernel::<H>::NEW.in_source_ranges(service.service, address) }
        }
        None if is_in_node_netns(ctx) => SocketSource::Node,
        None => SocketSource::Elsewhere,
    }
}

/// Returns true if a socket is in the network namespace of the node.
#[inline(always)]
fn is_in_node_netns(ctx: &SockAddr) -> bool {
    ctx.netns() == maps::node_netns()
}

/// Returns the endpoint for datagrams of an unconnected socket. The last endpoint stays while it is
/// serving, as with conntrack. This is checked for each datagram: a terminating endpoint is in no
/// slot, so no slot changes when it is gone.
#[inline(always)]
fn endpoint_of_flow<H: Hook>(
    ctx: &SockAddr,
    destination: &Endpoint,
    service: &ServiceValue,
    slots: Slots,
) -> Option<Endpoint> {
    let flow = SocketPeer::new(ctx.cookie(), *destination);
    let endpoint = match maps::udp_flow(&flow) {
        Some(last) if service::is_serving(&Kernel::<H>::NEW, service.service, last) => last,
        _ => {
            let chosen = choose_endpoint::<H>(ctx, service, slots)?;
            Kernel::<H>::NEW.set_udp_flow(&flow, &chosen);
            Kernel::<H>::NEW.count_service(service.service, ServiceEvent::Connection);
            trace::socket::<H>(ctx, Counter::FlowsBegun, service.service, destination, &chosen);
            chosen
        }
    };
    // The entry for replies is checked for each datagram, too: the socket may have used another VIP
    // of the same endpoint, or the map may have evicted the entry.
    let reply = SocketPeer::new(flow.socket, endpoint);
    if maps::udp_reply(&reply) != Some(*destination) {
        Kernel::<H>::NEW.set_udp_reply(&reply, destination);
    }
    Some(endpoint)
}

#[inline(always)]
fn write_connection<H: Hook>(ctx: &SockAddr, protocol: Protocol, service: u32, connection: Connection) {
    match protocol {
        Protocol::Tcp => Kernel::<H>::NEW.set_tcp_connection(ctx.cookie(), &connection),
        Protocol::Udp | Protocol::Sctp => {
            Kernel::<H>::NEW.set_udp_connection(ctx, connection);
            let socket = UdpSocket { netns: ctx.netns(), service, endpoint: connection.endpoint };
            Kernel::<H>::NEW.set_udp_socket(ctx.cookie(), &socket);
        }
    }
}

/// Removes VIP and endpoint of a socket that connects again, now to no Service.
#[inline(always)]
fn remove_connection(ctx: &SockAddr, protocol: Protocol) {
    match protocol {
        Protocol::Tcp => {
            let socket = ctx.cookie();
            if maps::tcp_connection(socket).is_some() {
                maps::remove_tcp_connection(socket);
            }
        }
        Protocol::Udp | Protocol::Sctp => {
            if maps::udp_connection(ctx).is_some() {
                maps::remove_udp_connection(ctx);
                maps::remove_udp_socket(ctx.cookie());
            }
        }
    }
}

/// Handles the release of a socket.
#[inline(always)]
pub fn release<P: EntryPoint>(socket: &Socket) {
    match Protocol::of_socket(socket.protocol()) {
        Some(Protocol::Udp) => maps::remove_udp_socket(socket.cookie()),
        // Most sockets are connected to no endpoint and have no entry.
        Some(Protocol::Tcp) if may_be_endpoint::<P>(&socket.peer()) => {
            maps::refer_to_constants();
            maps::remove_tcp_connection(socket.cookie());
        }
        Some(Protocol::Tcp | Protocol::Sctp) | None => {}
    }
}

#[inline(always)]
fn may_be_endpoint<P: EntryPoint>(address: &Endpoint) -> bool {
    service::may_be_endpoint(&Kernel::<P>::NEW, &address.addr, address.port)
}
