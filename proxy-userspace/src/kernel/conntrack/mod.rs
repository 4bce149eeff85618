//! The connection tracking table, over ctnetlink: deletes stale entries, and replaces the
//! entries of connections that conntrack takes over ([`hand_over`]).
//!
//! The kernel dumps some hundred entries at a time. Deletions are sent in batches during the dump,
//! so that memory does not grow with the table. Since kernel 5.8, the kernel itself filters by
//! family, protocol and port (`CTA_FILTER`, cb8aa9a3affb). Older kernels dump all entries of the
//! family, and shunt filters them.

mod connection;
mod handover;
mod liberal;
mod message;
mod uapi;

use std::{io, net::SocketAddr, ops::ControlFlow, time::Duration};

use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::protocols::NETLINK_NETFILTER;

pub use self::{
    connection::{Connection, TrackedConnection},
    handover::{
        HandoverCounts, Translator, find_connections, for_each_connection, hand_over, hand_over_untracked,
        replace_entries, track,
    },
    liberal::LiberalConnections,
};
use self::{
    connection::{IPS_DST_NAT, IPS_SRC_NAT, TCP_CONNTRACK_SYN_SENT},
    message::{DeletionBatch, Entry, conntrack_type},
    uapi::{CTA_STATUS, IPCTNL_MSG_CT_GET},
};
use super::{
    KernelError,
    netlink::{Attributes, MessageBuffer, NetlinkSocket, nfgenmsg},
    sysctl::Sysctl,
};
use crate::net::{IpFamily, Protocol};

/// The number of deletions in one batch. Their errors fit into a socket's default buffer.
const BATCH_SIZE: usize = 64;

const ENTRIES: Sysctl = Sysctl("netfilter/nf_conntrack_count");
/// The kernel's limit of entries, which holds for each network namespace.
pub const LIMIT: Sysctl = Sysctl("netfilter/nf_conntrack_max");

const UDP_STREAM_TIMEOUT: Sysctl = Sysctl("netfilter/nf_conntrack_udp_timeout_stream");

/// Reads how long conntrack keeps an assured UDP flow without packets, in this network namespace.
/// Returns `None` while conntrack is not loaded.
pub fn udp_stream_timeout() -> Result<Option<Duration>, KernelError> {
    let seconds = UDP_STREAM_TIMEOUT.read()?;
    Ok(seconds.map(|seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or(0))))
}

/// How full the table of this network namespace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFill {
    /// The number of entries.
    pub entries: i64,
    /// The limit. 0 stands for no limit.
    pub limit: i64,
}

/// Reads how full the table is. Returns `None` while conntrack is not loaded.
pub fn table_fill() -> Result<Option<TableFill>, KernelError> {
    let (Some(entries), Some(limit)) = (ENTRIES.read()?, LIMIT.read()?) else { return Ok(None) };
    Ok(Some(TableFill { entries, limit }))
}

/// Source and destination of the packets in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressPair {
    /// The source.
    pub source: SocketAddr,
    /// The destination.
    pub destination: SocketAddr,
}

impl AddressPair {
    /// Returns the pair of the opposite direction.
    pub const fn swapped(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

/// Reads an answer with all readers, for fuzz targets. A deletion must name the entry.
#[cfg(feature = "fuzzing")]
pub(super) fn read_any(answer: Attributes<'_>) {
    for protocol in Protocol::ALL {
        connection::read_connection(answer, protocol, &mut |tracked| Some(tracked.original));
    }
    let Some(entry) = Entry::read(answer, Protocol::Udp) else { return };
    let mut deletion = DeletionBatch::default();
    deletion.push(&entry, 1);
    let written = deletion.finish().as_bytes();
    let message = super::netlink::messages_of(written).next().expect("a complete message");
    let tuple = Attributes::after_header(message.payload()).nested(uapi::CTA_TUPLE_ORIG);
    let named = tuple.and_then(|tuple| message::read_tuple(tuple, Protocol::Udp));
    let AddressPair { source, destination } = named.expect("a deletion has the tuple of its entry");
    assert_eq!((source, destination), (entry.flow.source, entry.flow.destination));
}

/// A tracked flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpFlow {
    /// The source of the first packet.
    pub source: SocketAddr,
    /// The destination of the first packet, before DNAT.
    pub destination: SocketAddr,
    /// The source of the replies. Without DNAT, it is the destination.
    pub reply_source: SocketAddr,
    /// The conntrack zone; 0 unless another program's rules select another.
    pub zone: u16,
}

impl UdpFlow {
    /// Returns true if conntrack translates the destination.
    pub fn is_translated(&self) -> bool {
        self.reply_source != self.destination
    }
}

/// Selects entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpFilter {
    /// The family.
    pub family: IpFamily,
    /// The destination port before DNAT. `None` for any.
    pub destination_port: Option<u16>,
}

impl UdpFilter {
    /// Returns true if the filter selects this flow.
    pub fn matches(&self, flow: &UdpFlow) -> bool {
        IpFamily::of(flow.destination.ip()) == self.family
            && self.destination_port.is_none_or(|port| flow.destination.port() == port)
    }
}

/// The result of [`delete_udp`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletionCounts {
    /// Entries that were examined.
    pub seen: usize,
    /// Entries that were deleted, without those that expired before their deletion.
    pub deleted: usize,
}

/// Calls `each` for the entries that the filter selects, in the calling thread's network namespace.
/// Entries that are added or deleted during the dump may be missing or present.
pub fn for_each_udp(filter: UdpFilter, each: &mut dyn FnMut(&UdpFlow)) -> Result<(), KernelError> {
    dump_udp(filter, &mut |entry| {
        each(&entry.flow);
        Ok(())
    })
}

/// Lets the kernel load connection tracking, if it is a module that is not loaded yet.
///
/// nfnetlink loads the module of a requested subsystem (`nfnetlink_rcv_msg`), for which
/// `CAP_NET_ADMIN` is sufficient.
pub fn load_module() -> Result<(), KernelError> {
    for_each_udp(UdpFilter { family: IpFamily::V4, destination_port: None }, &mut |_| ())
}

/// Deletes the entries that the filter and `is_stale` select, in the calling thread's network
/// namespace.
///
/// A deletion names the entry's identifier (`CTA_ID`), so that a new entry for the same flow stays.
/// If an entry cannot be deleted, the others are deleted nevertheless, and the first such error is
/// returned.
pub fn delete_udp(
    filter: UdpFilter,
    is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
) -> Result<DeletionCounts, KernelError> {
    delete(|each| dump_udp(filter, &mut |entry| each(entry, is_stale(&entry.flow))))
}

/// Deletes the TCP entries of a family whose connection was not answered yet, whose destination is
/// not translated, and that `is_stale` selects by its original destination. The next segment of the
/// client then is the first one of its connection.
pub fn delete_tcp_attempts(
    family: IpFamily,
    is_stale: &mut dyn FnMut(SocketAddr) -> bool,
) -> Result<DeletionCounts, KernelError> {
    delete(|each| {
        dump(family, Protocol::Tcp, None, &mut |attributes| {
            let is_attempt = message::tcp_state(attributes) == Some(TCP_CONNTRACK_SYN_SENT);
            match Entry::read(attributes, Protocol::Tcp) {
                Some(entry) => {
                    let UdpFlow { destination, .. } = entry.flow;
                    let is_untranslated = is_attempt && !entry.flow.is_translated();
                    each(&entry, is_untranslated && is_stale(destination))
                }
                None => Ok(()),
            }
        })
    })
}

/// What a walk calls for each entry, with true if the entry is to be deleted.
type Visit<'a> = &'a mut dyn FnMut(&Entry<'_>, bool) -> Result<(), KernelError>;

/// Deletes entries during a walk.
fn delete(walk: impl FnOnce(Visit<'_>) -> Result<(), KernelError>) -> Result<DeletionCounts, KernelError> {
    let mut deletions = Deletions::new()?;
    let mut seen = 0;
    walk(&mut |entry, is_stale| {
        seen += 1;
        if is_stale { deletions.push(entry) } else { Ok(()) }
    })?;
    deletions.send()?;
    match deletions.first_error {
        None => Ok(DeletionCounts { seen, deleted: deletions.deleted }),
        Some(error) => Err(failed("delete")(error)),
    }
}

fn dump_udp(
    filter: UdpFilter,
    each: &mut dyn FnMut(&Entry<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    dump(filter.family, Protocol::Udp, filter.destination_port, &mut |attributes| match Entry::read(
        attributes,
        Protocol::Udp,
    ) {
        Some(entry) if filter.matches(&entry.flow) => each(&entry),
        _ => Ok(()),
    })
}

/// Returns true if conntrack translates a connection. Reads entries until it finds one.
///
/// Since kernel 5.15, the kernel itself filters by status (`CTA_STATUS_MASK`). Older kernels list
/// all entries.
pub fn translates_connections() -> Result<bool, KernelError> {
    const TRANSLATED: u32 = IPS_SRC_NAT | IPS_DST_NAT;
    let is_translated =
        |attributes: Attributes<'_>| attributes.be32(CTA_STATUS).unwrap_or(0) & TRANSLATED != 0;
    for bit in [IPS_SRC_NAT, IPS_DST_NAT] {
        let filter = |to: &mut MessageBuffer| message::write_status_filter(bit, to);
        let end = list(nfgenmsg(libc::AF_UNSPEC, 0), filter, &mut |attributes| {
            Ok(if is_translated(attributes) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if end.is_break() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Dumps the entries of a family. Older kernels ignore protocol and port.
fn dump(
    family: IpFamily,
    protocol: Protocol,
    destination_port: Option<u16>,
    each: &mut dyn FnMut(Attributes<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let filter = |to: &mut MessageBuffer| message::write_filter(protocol, destination_port, to);
    let each = &mut |attributes: Attributes<'_>| each(attributes).map(ControlFlow::Continue);
    list(message::header(family), filter, each).map(drop)
}

/// Lists entries until `each` breaks.
fn list(
    header: [u8; 4],
    filter: impl FnOnce(&mut MessageBuffer),
    each: &mut dyn FnMut(Attributes<'_>) -> Result<ControlFlow<()>, KernelError>,
) -> Result<ControlFlow<()>, KernelError> {
    let socket = open()?;
    let mut answers = socket
        .request(conntrack_type(IPCTNL_MSG_CT_GET), NLM_F_DUMP, header, filter)
        .map_err(failed("list"))?;
    while let Some(answer) = answers.next().map_err(failed("list"))? {
        if each(Attributes::after_header(answer.payload()))?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn open() -> Result<NetlinkSocket, KernelError> {
    NetlinkSocket::open(NETLINK_NETFILTER).map_err(failed("open a socket for"))
}

/// A kernel without ctnetlink answers every request with EINVAL. A kernel without nfnetlink opens
/// no socket.
fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> KernelError {
    move |source| match source.raw_os_error() {
        Some(libc::EINVAL | libc::EPROTONOSUPPORT) => KernelError::NoConntrackNetlink(source),
        _ => KernelError::call(operation, "conntrack entries")(source),
    }
}

/// Deletes entries in batches.
struct Deletions {
    socket: NetlinkSocket,
    batch: DeletionBatch,
    deleted: usize,
    first_error: Option<io::Error>,
}

impl Deletions {
    fn new() -> Result<Self, KernelError> {
        Ok(Self { socket: open()?, batch: DeletionBatch::default(), deleted: 0, first_error: None })
    }

    fn push(&mut self, entry: &Entry<'_>) -> Result<(), KernelError> {
        self.batch.push(entry, self.socket.next_sequence());
        if self.batch.len() < BATCH_SIZE { Ok(()) } else { self.send() }
    }

    /// Sends the batch and waits for its result.
    fn send(&mut self) -> Result<(), KernelError> {
        let mut batch = std::mem::take(&mut self.batch);
        if batch.len() == 0 {
            return Ok(());
        }
        let errors = self.socket.send_batch(batch.finish()).map_err(failed("delete"))?;
        self.deleted += batch.len().saturating_sub(errors.len());
        // An entry that does not exist any more is as good as deleted.
        let mut errors =
            errors.into_iter().map(|(_, error)| error).filter(|e| e.raw_os_error() != Some(libc::ENOENT));
        self.first_error = self.first_error.take().or_else(|| errors.next());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ctnetlink_has_an_error_of_its_own() {
        for (code, is_missing) in [
            (libc::EINVAL, true),
            (libc::EPROTONOSUPPORT, true),
            (libc::EPERM, false),
            (libc::ENOBUFS, false),
        ] {
            let error = failed("list")(io::Error::from_raw_os_error(code));
            assert_eq!(matches!(error, KernelError::NoConntrackNetlink { .. }), is_missing, "{error}");
        }
    }
}
