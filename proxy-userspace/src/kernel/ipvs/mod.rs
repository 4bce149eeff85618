//! IPVS, the kernel's virtual server: its virtual servers, real servers and timeouts, over generic
//! netlink.

pub(super) mod connections;
mod message;
mod protocols;

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use libc::c_int;
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};

use self::message::{IPVS_CMD_GET_CONFIG, IPVS_CMD_GET_DEST, IPVS_CMD_GET_SERVICE, IPVS_CMD_SET_CONFIG};
pub use self::{
    connections::{Persistence, connections_to, is_loaded, persistent_clients},
    protocols::lacks_sctp,
};
use super::{
    KernelError,
    command::{Command, Launcher},
    netlink::{Attributes, MessageBuffer, NetlinkSocket, generic},
};
use crate::net::Protocol;

/// The name of the netlink family.
pub(super) const FAMILY: &str = "IPVS";
const VERSION: u8 = 1;
/// The number of changes in one batch. Their acknowledgements fit into a socket's default buffer.
const BATCH_SIZE: usize = 64;
const IP_VS_SVC_F_PERSISTENT: u32 = 1;
/// `IP_VS_SVC_F_SCHED2`, which the scheduler `mh` calls `IP_VS_SVC_F_SCHED_MH_PORT`.
const IP_VS_SVC_F_SCHED2: u32 = 0x10;

/// Loads the kernel module, if IPVS is a module.
///
/// The kernel does not load it automatically for any IPVS socket. The command is not necessary
/// where IPVS is built in, or loaded on the node on which this container runs.
pub fn load_module(launcher: &Launcher) {
    if let Err(error) = Command::new("modprobe", launcher).args(["--", "ip_vs"]).run() {
        tracing::debug!(%error, "cannot load the kernel module ip_vs; it may be built in or loaded already");
    }
}

/// The key of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualKey {
    /// The protocol.
    pub protocol: Protocol,
    /// The VIP.
    pub address: SocketAddr,
}

impl fmt::Display for VirtualKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.address)
    }
}

/// The properties of a virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// The name of the scheduler, for example `rr`.
    pub scheduler: Arc<str>,
    /// `IP_VS_SVC_F_*`, without the flags that the kernel sets itself.
    pub flags: u32,
    /// A client keeps its real server for this many seconds after its last connection. 0 without
    /// persistence.
    pub timeout: u32,
    /// Persistence treats the clients of one such network as one client. For IPv4 it is a mask in
    /// network order, for IPv6 the length of a prefix.
    pub netmask: u32,
}

impl VirtualServer {
    /// Returns a virtual server for this address, without persistence.
    pub fn new(scheduler: impl Into<Arc<str>>, address: IpAddr) -> Self {
        let scheduler = scheduler.into();
        let flags = if &*scheduler == "mh" { IP_VS_SVC_F_SCHED2 } else { 0 };
        let netmask = if address.is_ipv4() { u32::MAX } else { 128 };
        Self { scheduler, flags, timeout: 0, netmask }
    }

    /// Returns the virtual server with persistence.
    #[must_use]
    pub fn persistent(self, seconds: u32) -> Self {
        Self { flags: self.flags | IP_VS_SVC_F_PERSISTENT, timeout: seconds, ..self }
    }
}

/// A real server of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// Its address and port.
    pub address: SocketAddr,
    /// Its share of new connections; 0 for none.
    pub weight: u32,
    /// The number of its connections, active and inactive.
    pub connections: u32,
}

/// The traffic of a virtual server since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections, including UDP flows.
    pub connections: u64,
    /// Bytes of IP packets to real servers.
    pub bytes_in: u64,
    /// Bytes of IP packets to clients.
    pub bytes_out: u64,
}

impl Traffic {
    fn combine(self, other: Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            connections: operation(self.connections, other.connections),
            bytes_in: operation(self.bytes_in, other.bytes_in),
            bytes_out: operation(self.bytes_out, other.bytes_out),
        }
    }

    /// Returns the increase since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.combine(before, u64::saturating_sub)
    }

    /// Returns true if no counter is smaller than in `before`.
    pub fn is_since(self, before: Self) -> bool {
        before.since(self) == Self::default()
    }

    /// Adds the traffic of another virtual server or period.
    pub fn add(&mut self, other: Self) {
        *self = self.combine(other, u64::saturating_add);
    }
}

/// The timeouts of idle connections in seconds. 0 for those that are not configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// For TCP connections.
    pub tcp: u32,
    /// For TCP connections after a FIN.
    pub tcp_fin: u32,
    /// For UDP flows.
    pub udp: u32,
}

/// A change to a virtual or real server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds a virtual server.
    AddServer(VirtualKey, VirtualServer),
    /// Changes the properties of a virtual server. Its connections continue.
    SetServer(VirtualKey, VirtualServer),
    /// Removes a virtual server and its real servers.
    RemoveServer(VirtualKey),
    /// Adds a real server with this weight.
    AddReal(VirtualKey, SocketAddr, u32),
    /// Changes the weight of a real server.
    SetReal(VirtualKey, SocketAddr, u32),
    /// Removes a real server.
    RemoveReal(VirtualKey, SocketAddr),
}

impl Change {
    /// Returns the virtual server that the change is about.
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

    /// Returns the operation and its object.
    fn describe(&self) -> (&'static str, String) {
        match self {
            Self::AddServer(key, with) => ("add", format!("the virtual server {key} ({})", with.scheduler)),
            Self::SetServer(key, with) => ("set", format!("the virtual server {key} ({})", with.scheduler)),
            Self::RemoveServer(key) => ("remove", format!("the virtual server {key}")),
            Self::AddReal(key, real, _) => ("add", format!("{real} to {key}")),
            Self::SetReal(key, real, weight) => ("set", format!("the weight of {real} in {key} to {weight}")),
            Self::RemoveReal(key, real) => ("remove", format!("{real} from {key}")),
        }
    }

    /// Returns true if the error says that the object to remove does not exist.
    fn is_already_removed(&self, error: &io::Error) -> bool {
        matches!(self, Self::RemoveServer(_) | Self::RemoveReal(..))
            && matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operation, object) = self.describe();
        write!(f, "{operation} {object}")
    }
}

/// Reads an answer with all readers, for fuzz targets. What was read is written and read again.
#[cfg(feature = "fuzzing")]
pub(super) fn read_any(answer: Attributes<'_>) {
    if let Some((key, server)) = message::read_server(answer) {
        let mut written = MessageBuffer::default();
        Change::AddServer(key, server.clone()).write(&mut written);
        assert_eq!(message::read_server(Attributes(written.as_bytes())), Some((key, server)));
        message::read_real(answer, key);
    }
    message::read_traffic(answer);
    message::read_timeouts(answer);
}

/// A socket to IPVS in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Ipvs {
    socket: NetlinkSocket,
    family: u16,
}

impl Ipvs {
    /// Opens the socket. Fails with `ENOENT` if the kernel has no IPVS, or has not loaded it.
    pub fn open() -> Result<Self, KernelError> {
        let failed = |source| KernelError::call("open a socket to", "IPVS")(source);
        let socket = generic::open().map_err(failed)?;
        let family = generic::family(&socket, FAMILY).map_err(failed)?;
        Ok(Self { socket, family })
    }

    /// Returns the number of messages that were sent.
    pub const fn message_count(&self) -> u32 {
        self.socket.message_count()
    }

    /// Makes the changes in order and does not stop at errors. Returns the index and error of each
    /// change that failed. Removing an object that does not exist succeeds.
    pub fn commit(&mut self, changes: &[Change]) -> Result<Vec<(usize, KernelError)>, KernelError> {
        let mut failures = Vec::new();
        for (number, batch) in changes.chunks(BATCH_SIZE).enumerate() {
            for (index, source) in self.send(batch).map_err(KernelError::call("change", "IPVS"))? {
                let change = &batch[index];
                if !change.is_already_removed(&source) {
                    let (operation, object) = change.describe();
                    failures
                        .push((number * BATCH_SIZE + index, KernelError::call(operation, object)(source)));
                }
            }
        }
        Ok(failures)
    }

    fn send(&mut self, batch: &[Change]) -> io::Result<Vec<(usize, io::Error)>> {
        let mut messages = MessageBuffer::default();
        let mut first = None;
        for change in batch {
            let sequence = self.socket.next_sequence();
            first.get_or_insert(sequence);
            let header = generic::header(change.command(), VERSION);
            messages.message(self.family, NLM_F_ACK, sequence, header, |to| change.write(to));
        }
        let index = |sequence: u32| sequence.wrapping_sub(first.unwrap_or_default()) as usize;
        let errors = self.socket.send_batch(&messages)?.into_iter();
        Ok(errors
            .map(|(sequence, error)| (index(sequence), error))
            .filter(|(index, _)| *index < batch.len())
            .collect())
    }

    /// Lists the virtual servers that have an address and a port.
    pub fn servers(&mut self) -> Result<BTreeMap<VirtualKey, VirtualServer>, KernelError> {
        self.request(IPVS_CMD_GET_SERVICE, NLM_F_DUMP, |_| {}, message::read_server)
            .map(BTreeMap::from_iter)
            .map_err(KernelError::call("list", "the virtual servers of IPVS"))
    }

    /// Reads the traffic of these virtual servers.
    pub fn traffic(&mut self) -> Result<Vec<(VirtualKey, Traffic)>, KernelError> {
        self.request(IPVS_CMD_GET_SERVICE, NLM_F_DUMP, |_| {}, message::read_traffic)
            .map_err(KernelError::call("read the traffic of", "the virtual servers of IPVS"))
    }

    /// Lists the real servers of a virtual server. Returns none if the virtual server does not
    /// exist.
    pub fn real_servers(&mut self, key: VirtualKey) -> Result<Vec<RealServer>, KernelError> {
        let write = |to: &mut MessageBuffer| message::write_server_of(key, to);
        let read = |attributes: Attributes<'_>| message::read_real(attributes, key);
        match self.request(IPVS_CMD_GET_DEST, NLM_F_DUMP, write, read) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Vec::new()),
            servers => servers.map_err(KernelError::call("list the real servers of", key.to_string())),
        }
    }

    /// Reads the timeouts.
    pub fn timeouts(&mut self) -> Result<Timeouts, KernelError> {
        let read = |attributes: Attributes<'_>| Some(message::read_timeouts(attributes));
        self.request(IPVS_CMD_GET_CONFIG, 0, |_| {}, read)
            .map(|timeouts| timeouts.into_iter().next().unwrap_or_default())
            .map_err(KernelError::call("read", "the timeouts of IPVS"))
    }

    /// Sets the timeouts that are not zero.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), KernelError> {
        let write = |to: &mut MessageBuffer| message::write_timeouts(timeouts, to);
        self.request(IPVS_CMD_SET_CONFIG, 0, write, |_| Some(()))
            .map(drop)
            .map_err(KernelError::call("set", "the timeouts of IPVS"))
    }

    /// Sends a request and returns what `read` makes of each answer.
    fn request<T>(
        &mut self,
        command: c_int,
        flags: u16,
        write: impl FnOnce(&mut MessageBuffer),
        read: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let header = generic::header(command, VERSION);
        self.socket.request(self.family, flags, header, write)?.read(read)
    }
}
