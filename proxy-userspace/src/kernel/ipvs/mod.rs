//! IPVS, the kernel's virtual server: its virtual and real servers and its timeouts, over generic netlink.

mod connections;
mod message;

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR};
use netlink_sys::Socket;

pub use self::connections::connections_to;
use super::{
    KernelError,
    command::{Command, SearchPath},
    generic_netlink, netlink,
    nftables::attributes::Attributes,
};
use crate::net::Protocol;

/// The family's name, and the version of its messages.
pub(super) const FAMILY: &str = "IPVS";
const VERSION: u8 = 1;
/// Changes sent at once: the answers to them, one each, fit into a socket's default buffer.
const MOST_AT_ONCE: usize = 64;
/// `IP_VS_SVC_F_PERSISTENT`.
const PERSISTENT: u32 = 1;
/// `IP_VS_SVC_F_SCHED2`, which is `IP_VS_SVC_F_SCHED_MH_PORT` to the scheduler `mh`.
const HASH_PORTS: u32 = 0x10;

/// Loads the kernel's module, if it is one. The kernel does so by itself for none of IPVS' sockets; built in, or loaded on the node
/// that this container is on, it needs no command.
pub fn load_module(path: &SearchPath) {
    if let Err(error) = Command::new("modprobe", path).args(["--", "ip_vs"]).run() {
        tracing::debug!(%error, "the module ip_vs is not loaded from here");
    }
}

/// What a virtual server is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualKey {
    /// Its protocol.
    pub protocol: Protocol,
    /// The address and port that clients dial.
    pub address: SocketAddr,
}

impl fmt::Display for VirtualKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.address)
    }
}

/// How a virtual server works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// The name of its scheduler, as in `rr`.
    pub scheduler: Arc<str>,
    /// `IP_VS_SVC_F_…`, but for those that the kernel sets by itself.
    pub flags: u32,
    /// For how many seconds after its last connection a client stays with its real server; 0 without persistence.
    pub timeout: u32,
    /// Clients that persistence takes for one: a mask in network order for IPv4, the length of a prefix for IPv6.
    pub netmask: u32,
}

impl VirtualServer {
    /// One on this address, without persistence.
    pub fn new(scheduler: impl Into<Arc<str>>, address: IpAddr) -> Self {
        let scheduler = scheduler.into();
        let flags = if &*scheduler == "mh" { HASH_PORTS } else { 0 };
        let netmask = if address.is_ipv4() { u32::MAX } else { 128 };
        Self { scheduler, flags, timeout: 0, netmask }
    }

    /// The same, where clients stay with their real server for so many seconds.
    #[must_use]
    pub fn persistent(self, seconds: u32) -> Self {
        Self { flags: self.flags | PERSISTENT, timeout: seconds, ..self }
    }
}

/// One of the servers behind a virtual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// Where it is.
    pub address: SocketAddr,
    /// Its part of new connections; 0 for none.
    pub weight: u32,
    /// Connections to it, active and inactive ones.
    pub connections: u32,
}

/// What a virtual server had to do since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections, and flows of UDP.
    pub connections: u64,
    /// Bytes of IP packets to its real servers.
    pub bytes_in: u64,
    /// Bytes of IP packets to clients.
    pub bytes_out: u64,
}

impl Traffic {
    fn each(self, other: Self, take: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            connections: take(self.connections, other.connections),
            bytes_in: take(self.bytes_in, other.bytes_in),
            bytes_out: take(self.bytes_out, other.bytes_out),
        }
    }

    /// What is more than before.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.each(before, u64::saturating_sub)
    }

    /// Whether nothing is less than before.
    pub fn is_since(self, before: Self) -> bool {
        before.since(self) == Self::default()
    }

    /// Both together.
    pub fn add(&mut self, other: Self) {
        *self = self.each(other, u64::saturating_add);
    }
}

/// How long connections are remembered that are silent, in seconds; 0 where it is not said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// Of TCP connections.
    pub tcp: u32,
    /// Of TCP connections that one side closed.
    pub tcp_fin: u32,
    /// Of UDP flows.
    pub udp: u32,
}

/// A change of virtual or real servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new virtual server.
    AddServer(VirtualKey, VirtualServer),
    /// A virtual server works in another way from now on; its connections stay.
    SetServer(VirtualKey, VirtualServer),
    /// A virtual server goes, with its real servers.
    RemoveServer(VirtualKey),
    /// A new real server with its weight.
    AddReal(VirtualKey, SocketAddr, u32),
    /// A real server has this weight from now on.
    SetReal(VirtualKey, SocketAddr, u32),
    /// A real server goes.
    RemoveReal(VirtualKey, SocketAddr),
}

impl Change {
    /// The virtual server that it is about.
    pub const fn server(&self) -> VirtualKey {
        match self {
            Self::AddServer(key, _)
            | Self::SetServer(key, _)
            | Self::RemoveServer(key)
            | Self::AddReal(key, ..)
            | Self::SetReal(key, ..)
            | Self::RemoveReal(key, _) => *key,
        }
    }

    /// What is to go is gone already.
    fn is_done_anyhow(&self, error: &io::Error) -> bool {
        matches!(self, Self::RemoveServer(_) | Self::RemoveReal(..))
            && matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddServer(key, server) => write!(f, "add the virtual server {key} ({})", server.scheduler),
            Self::SetServer(key, server) => write!(f, "set the virtual server {key} ({})", server.scheduler),
            Self::RemoveServer(key) => write!(f, "remove the virtual server {key}"),
            Self::AddReal(key, real, _) => write!(f, "add {real} to {key}"),
            Self::SetReal(key, real, weight) => write!(f, "set the weight of {real} in {key} to {weight}"),
            Self::RemoveReal(key, real) => write!(f, "remove {real} from {key}"),
        }
    }
}

/// A socket to IPVS in the network namespace of the thread that opened it.
pub struct Ipvs {
    socket: Socket,
    family: u16,
    sequence: u32,
    sent: u64,
    answers: Vec<u8>,
}

impl fmt::Debug for Ipvs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ipvs").field("sent", &self.sent).finish_non_exhaustive()
    }
}

impl Ipvs {
    /// Opens it; `ENOENT` where the kernel has no IPVS, or has not loaded it.
    pub fn open() -> Result<Self, KernelError> {
        let failed = |source| KernelError::call("open a socket to", "IPVS")(source);
        let socket = generic_netlink::open().map_err(failed)?;
        let family = generic_netlink::family(&socket, FAMILY).map_err(failed)?;
        let answers = Vec::with_capacity(netlink::LARGEST_DATAGRAM);
        Ok(Self { socket, family, sequence: 0, sent: 0, answers })
    }

    /// How many messages were sent since it was opened.
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Makes changes one after the other, past those that fail, and returns these by their place. What is to go may be gone
    /// already.
    pub fn commit(&mut self, changes: &[Change]) -> Result<Vec<(usize, KernelError)>, KernelError> {
        let mut failures = Vec::new();
        for (number, some) in changes.chunks(MOST_AT_ONCE).enumerate() {
            let first = number * MOST_AT_ONCE;
            for (index, source) in self.send(some).map_err(KernelError::call("change", "IPVS"))? {
                let change = &some[index];
                if !change.is_done_anyhow(&source) {
                    failures.push((first + index, KernelError::call("IPVS:", change.to_string())(source)));
                }
            }
        }
        Ok(failures)
    }

    fn send(&mut self, changes: &[Change]) -> io::Result<Vec<(usize, io::Error)>> {
        let first = self.sequence.wrapping_add(1);
        let mut messages = Attributes::default();
        for change in changes {
            self.write(&mut messages, NLM_F_ACK, change.command(), |to| change.write(to));
        }
        self.socket.send(messages.as_bytes(), 0)?;
        let mut failures = Vec::new();
        let mut unanswered = changes.len();
        while unanswered > 0 {
            self.receive(|sequence, kind, payload| {
                let index = sequence.wrapping_sub(first) as usize;
                if kind == NLMSG_ERROR && index < changes.len() {
                    unanswered = unanswered.saturating_sub(1);
                    failures.extend(netlink::error_of(payload).map(|error| (index, error)));
                }
            })?;
        }
        Ok(failures)
    }

    /// All virtual servers that go by address and port.
    pub fn servers(&mut self) -> Result<BTreeMap<VirtualKey, VirtualServer>, KernelError> {
        let mut servers = BTreeMap::new();
        let take = |attributes: &[u8]| servers.extend(message::read_server(attributes));
        self.dump(message::GET_SERVICE, |_| {}, take)
            .map_err(KernelError::call("list", "IPVS' virtual servers"))?;
        Ok(servers)
    }

    /// What each of these had to do.
    pub fn traffic(&mut self) -> Result<Vec<(VirtualKey, Traffic)>, KernelError> {
        let mut found = Vec::new();
        let take = |attributes: &[u8]| found.extend(message::read_traffic(attributes));
        self.dump(message::GET_SERVICE, |_| {}, take)
            .map_err(KernelError::call("read the traffic of", "IPVS' virtual servers"))?;
        Ok(found)
    }

    /// The real servers of a virtual one.
    pub fn real_servers(&mut self, key: VirtualKey) -> Result<Vec<RealServer>, KernelError> {
        let mut found = Vec::new();
        let ask = |to: &mut Attributes| message::write_server_of(key, to);
        let take = |attributes: &[u8]| found.extend(message::read_real(attributes, key));
        match self.dump(message::GET_DEST, ask, take) {
            // It went meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Vec::new()),
            Err(error) => Err(KernelError::call("list the real servers of", key.to_string())(error)),
            Ok(()) => Ok(found),
        }
    }

    /// The timeouts.
    pub fn timeouts(&mut self) -> Result<Timeouts, KernelError> {
        let mut timeouts = Timeouts::default();
        self.ask(message::GET_CONFIG, 0, |_| {}, |attributes| timeouts = message::read_timeouts(attributes))
            .map_err(KernelError::call("read", "IPVS' timeouts"))?;
        Ok(timeouts)
    }

    /// Sets those of the timeouts that are not zero.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), KernelError> {
        let write = |to: &mut Attributes| message::write_timeouts(timeouts, to);
        self.ask(message::SET_CONFIG, NLM_F_ACK, write, |_| {})
            .map_err(KernelError::call("set", "IPVS' timeouts"))
    }

    fn dump(
        &mut self,
        command: u8,
        write: impl FnOnce(&mut Attributes),
        take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.ask(command, NLM_F_DUMP, write, take)
    }

    /// Asks, and takes the attributes of all answers until the last.
    fn ask(
        &mut self,
        command: u8,
        flags: u16,
        write: impl FnOnce(&mut Attributes),
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut request = Attributes::default();
        self.write(&mut request, flags, command, write);
        self.socket.send(request.as_bytes(), 0)?;
        let asked = self.sequence;
        let is_single = flags == 0;
        let mut outcome = None;
        while outcome.is_none() {
            self.receive(|sequence, kind, payload| match kind {
                _ if sequence != asked => {}
                NLMSG_DONE | NLMSG_ERROR => outcome = Some(netlink::error_of(payload)),
                _ => {
                    take(payload.get(generic_netlink::HEAD..).unwrap_or_default());
                    if is_single {
                        outcome = Some(None);
                    }
                }
            })?;
        }
        outcome.flatten().map_or(Ok(()), Err)
    }

    fn write(
        &mut self,
        to: &mut Attributes,
        flags: u16,
        command: u8,
        attributes: impl FnOnce(&mut Attributes),
    ) {
        self.sequence = self.sequence.wrapping_add(1);
        self.sent += 1;
        let flags = flags | NLM_F_REQUEST;
        let start = to.begin_generic(self.family, flags, self.sequence, command, VERSION);
        attributes(to);
        to.end_message(start, flags);
    }

    /// One datagram's messages: number, type and what follows the head.
    fn receive(&mut self, mut each: impl FnMut(u32, u16, &[u8])) -> io::Result<()> {
        self.answers.clear();
        self.socket.recv(&mut self.answers, 0)?;
        for message in netlink::borrowed_messages(&self.answers) {
            each(message.sequence_number(), message.message_type(), message.payload());
        }
        Ok(())
    }
}
