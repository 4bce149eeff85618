//! The socket hooks: an address is translated once, when a process dials it, and its packets cost nothing after that.
//!
//! A connected UDP socket keeps the VIP in socket storage: it must not be lost, since datagrams are translated by it. Of a TCP
//! socket only its name for the other end depends on it; a map does, which costs half as much a connection. An
//! unconnected UDP socket keeps, an address it sends to, the endpoint (`udp_flows`), and, an endpoint that answers, the
//! address (`udp_replies`).
#![forbid(unsafe_code)]

use proxy_common::{
    Protocol,
    layout::{
        AffinityKey, Connection, Counter, Endpoint, ProgramError, ServiceValue, SocketPeer, Tally, UdpSocket,
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

/// A program on a hook of socket addresses.
pub trait Hook: EntryPoint {
    /// The sockets it is for.
    type Family: Family;
}

/// What the hooked system call does next.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// Goes on, with the address as it now is.
    Proceed,
    /// Fails with this error; with EPERM on kernels that leave no choice.
    Fail(i32),
}

impl Outcome {
    /// What the kernel expects of the program.
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

/// A process connects a socket.
#[inline(always)]
pub fn connect<H: Hook>(ctx: &SockAddr) -> Outcome {
    let Some(protocol) = Protocol::of_socket(ctx.protocol()) else { return Outcome::Proceed };
    let destination = ctx.address::<H::Family>();
    let choose = |service: &ServiceValue, slots| {
        service::choose(&Kernel::<H>::NEW, service, slots, || {
            AffinityKey::of_sockets(ctx.netns(), service.service)
        })
    };
    match resolve::<H>(ctx, &destination, protocol, choose) {
        Resolution::Pass => {
            forget(ctx, protocol);
            Outcome::Proceed
        }
        // The connection the socket may have goes on, as the kernel has it with any connect that fails.
        Resolution::Fail(errno) => Outcome::Fail(errno),
        Resolution::Endpoint { service, endpoint } => {
            Kernel::<H>::NEW.tally(service, Tally::Connection);
            trace::socket::<H>(Counter::FlowsBegun, protocol, service, &destination, &endpoint);
            remember::<H>(ctx, protocol, service, Connection { vip: destination, endpoint });
            ctx.set_address::<H::Family>(&endpoint);
            Outcome::Proceed
        }
    }
}

/// A process sends a datagram to an address it names. The socket may be connected all the same, perhaps to that address.
#[inline(always)]
pub fn sendmsg<H: Hook>(ctx: &SockAddr) -> Outcome {
    if Protocol::of_socket(ctx.protocol()) != Some(Protocol::Udp) {
        return Outcome::Proceed;
    }
    let destination = ctx.address::<H::Family>();
    if let Some(connection) = own_connection(ctx)
        && connection.vip == destination
    {
        // A connected socket hears its peer only: an answer from another endpoint would be lost.
        ctx.set_address::<H::Family>(&connection.endpoint);
        return Outcome::Proceed;
    }
    let choose = |service: &ServiceValue, slots| flow_endpoint::<H>(ctx, &destination, service, slots);
    match resolve::<H>(ctx, &destination, Protocol::Udp, choose) {
        Resolution::Pass => Outcome::Proceed,
        Resolution::Fail(errno) => Outcome::Fail(errno),
        Resolution::Endpoint { endpoint, .. } => {
            ctx.set_address::<H::Family>(&endpoint);
            Outcome::Proceed
        }
    }
}

/// A process received a datagram and is told from where.
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
        ctx.set_address::<H::Family>(&vip);
    }
    Outcome::Proceed
}

/// What a UDP socket is connected to through a Service now.
#[inline(always)]
fn own_connection(ctx: &SockAddr) -> Option<Connection> {
    if ctx.socket().is_connected() { maps::udp_connection(ctx) } else { None }
}

/// A process asks what its socket is connected to.
#[inline(always)]
pub fn getpeername<H: Hook>(ctx: &SockAddr) -> Outcome {
    let connection = match Protocol::of_socket(ctx.protocol()) {
        Some(Protocol::Tcp) => maps::tcp_connection(ctx.cookie()),
        Some(Protocol::Udp | Protocol::Sctp) | None => maps::udp_connection(ctx),
    };
    if let Some(connection) = connection
        && connection.endpoint == ctx.address::<H::Family>()
    {
        ctx.set_address::<H::Family>(&connection.vip);
    }
    Outcome::Proceed
}

/// What a destination comes to.
enum Resolution {
    /// It is no Service's, or one whose packets must tell.
    Pass,
    /// It cannot be had.
    Fail(i32),
    /// It goes to an endpoint of this Service.
    Endpoint { service: u32, endpoint: Endpoint },
}

/// A chosen slot may be gone: userspace switched the Service to other slots and removed the old ones between the two reads.
/// The Service, read again, then leads to slots that are there.
const READS: u32 = 3;

#[inline(always)]
fn resolve<H: Hook>(
    ctx: &SockAddr,
    destination: &Endpoint,
    protocol: Protocol,
    choose: impl Fn(&ServiceValue, Slots) -> Option<Endpoint>,
) -> Resolution {
    if !service::may_be(&Kernel::<H>::NEW, &destination.addr, destination.port) {
        return Resolution::Pass;
    }
    let tables = Kernel::<H>::NEW;
    let mut last = 0;
    for _ in 0..READS {
        let found = service::find(&tables, destination, protocol, || in_node(ctx));
        let Some(service) = found else { return Resolution::Pass };
        last = service.service;
        let slots = match verdict::for_socket(&service, || source::<H>(ctx, &service)) {
            Verdict::Translate(slots) => slots,
            Verdict::Pass(_) => return Resolution::Pass,
            Verdict::Refuse => {
                tables.tally(service.service, Tally::Refusal);
                trace::socket::<H>(Counter::Refused, protocol, service.service, destination, &Endpoint::NONE);
                return Resolution::Fail(ECONNREFUSED);
            }
            Verdict::Drop(why) => {
                tables.tally(service.service, Tally::Drop);
                trace::socket::<H>(why.counter(), protocol, service.service, destination, &Endpoint::NONE);
                return Resolution::Fail(EHOSTUNREACH);
            }
        };
        if let Some(endpoint) = choose(&service, slots) {
            return Resolution::Endpoint { service: service.service, endpoint };
        }
    }
    tables.tally(last, Tally::Refusal);
    tables.failed(ProgramError::EndpointMissing);
    trace::socket::<H>(Counter::Refused, protocol, last, destination, &Endpoint::NONE);
    Resolution::Fail(ECONNREFUSED)
}

/// Where a socket dials from, as far as it is known before its packets are.
#[inline(always)]
fn source<H: Hook>(ctx: &SockAddr, service: &ServiceValue) -> SocketSource {
    match H::Family::bound_source(ctx) {
        Some(address) => {
            SocketSource::Bound { in_ranges: Kernel::<H>::NEW.in_source_ranges(service.service, address) }
        }
        None if in_node(ctx) => SocketSource::Node,
        None => SocketSource::Pod,
    }
}

/// Whether a socket is in the node's network namespace.
#[inline(always)]
fn in_node(ctx: &SockAddr) -> bool {
    ctx.netns() == maps::node_netns()
}

/// The endpoint for datagrams of an unconnected socket: the last one as long as it serves, so that a conversation stays in
/// one place as it does with conntrack. Whether it serves is asked anew each time: an endpoint that drains is in no list of
/// slots any more, so none changes when it is gone.
#[inline(always)]
fn flow_endpoint<H: Hook>(
    ctx: &SockAddr,
    destination: &Endpoint,
    service: &ServiceValue,
    slots: Slots,
) -> Option<Endpoint> {
    let flow = SocketPeer::new(ctx.cookie(), *destination);
    let endpoint = match maps::udp_flow(&flow) {
        Some(last) if service::still_serves(&Kernel::<H>::NEW, service.service, last) => last,
        _ => {
            let chosen = service::choose(&Kernel::<H>::NEW, service, slots, || {
                AffinityKey::of_sockets(ctx.netns(), service.service)
            })?;
            Kernel::<H>::NEW.set_udp_flow(&flow, &chosen);
            Kernel::<H>::NEW.tally(service.service, Tally::Connection);
            trace::socket::<H>(Counter::FlowsBegun, Protocol::Udp, service.service, destination, &chosen);
            chosen
        }
    };
    // The name of its answers is looked at each time, too: the socket may have asked the same endpoint under another address
    // meanwhile, and the map may have dropped the name to make room.
    let reply = SocketPeer::new(flow.socket, endpoint);
    if maps::udp_reply(&reply) != Some(*destination) {
        Kernel::<H>::NEW.set_udp_reply(&reply, destination);
    }
    Some(endpoint)
}

#[inline(always)]
fn remember<H: Hook>(ctx: &SockAddr, protocol: Protocol, service: u32, connection: Connection) {
    match protocol {
        Protocol::Tcp => Kernel::<H>::NEW.set_tcp_connection(ctx.cookie(), &connection),
        Protocol::Udp | Protocol::Sctp => {
            Kernel::<H>::NEW.set_udp_connection(ctx, connection);
            let socket = UdpSocket { netns: ctx.netns(), service, endpoint: connection.endpoint };
            Kernel::<H>::NEW.set_udp_socket(ctx.cookie(), &socket);
        }
    }
}

/// A socket that was connected through a Service may be connected anew, past any Service.
#[inline(always)]
fn forget(ctx: &SockAddr, protocol: Protocol) {
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

/// A process closes a socket.
#[inline(always)]
pub fn release<P: EntryPoint>(socket: &Socket) {
    match Protocol::of_socket(socket.protocol()) {
        Some(Protocol::Udp) => maps::remove_udp_socket(socket.cookie()),
        // Most are connected to no endpoint, and have nothing to be forgotten.
        Some(Protocol::Tcp) if may_be_endpoint::<P>(&socket.peer()) => {
            maps::remove_tcp_connection(socket.cookie())
        }
        Some(Protocol::Tcp | Protocol::Sctp) | None => {}
    }
}

#[inline(always)]
fn may_be_endpoint<P: EntryPoint>(address: &Endpoint) -> bool {
    service::may_be_endpoint(&Kernel::<P>::NEW, &address.addr, address.port)
}
