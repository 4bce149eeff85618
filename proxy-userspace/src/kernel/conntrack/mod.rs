//! The connection tracking table (ctnetlink): walks over its UDP entries and deletes those that the caller chooses, and replaces
//! entries of connections that it is to translate from then on ([`hand_over`]).
//!
//! Entries are looked at as the kernel hands them over, some hundred at a time, and deleted in batches meanwhile: neither costs
//! memory that grows with the table. From kernel 5.8 on the kernel itself leaves out other families, protocols and ports
//! (`CTA_FILTER`, cb8aa9a3affb); older ones hand over all entries of the family, and the rest is left out here.

mod handover;
mod message;

use std::{io, net::SocketAddr};

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};

pub use self::handover::{
    Connection, HandoverCounts, TrackedConnection, Translator, find_connections, hand_over, replace_entries,
};
use self::message::{Batch, Entry};
use super::{KernelError, netlink};
use crate::net::IpFamily;

/// Deletions sent at once: their errors, at most one each, fit into a socket's default buffer.
const MOST_AT_ONCE: usize = 64;

/// Where packets of one direction come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressPair {
    /// Where they come from.
    pub source: SocketAddr,
    /// Where they go to.
    pub destination: SocketAddr,
}

/// A tracked UDP flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpFlow {
    /// Who sent its first packet.
    pub source: SocketAddr,
    /// Where that packet was sent, before any translation.
    pub destination: SocketAddr,
    /// Where answers come from: the destination itself unless it is translated.
    pub reply_source: SocketAddr,
    /// The conntrack zone; 0 unless someone's rules choose another.
    pub zone: u16,
}

impl UdpFlow {
    /// Packets go somewhere else than they were sent to.
    pub fn is_translated(&self) -> bool {
        self.reply_source != self.destination
    }
}

/// Which entries are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpFilter {
    /// Their family.
    pub family: IpFamily,
    /// The port they were sent to, before any translation; none for any.
    pub destination_port: Option<u16>,
}

impl UdpFilter {
    /// Whether a flow is among them.
    pub fn matches(&self, flow: &UdpFlow) -> bool {
        IpFamily::of(flow.destination.ip()) == self.family
            && self.destination_port.is_none_or(|port| flow.destination.port() == port)
    }
}

/// What a walk over the table came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletionCounts {
    /// Entries looked at.
    pub seen: usize,
    /// Entries deleted; those that ended by themselves meanwhile do not count.
    pub deleted: usize,
}

/// Shows every entry that passes the filter, in the calling thread's network namespace. Entries that come or go meanwhile may
/// or may not be among them.
pub fn for_each_udp(filter: UdpFilter, show: &mut dyn FnMut(&UdpFlow)) -> Result<(), KernelError> {
    dump(filter, &mut |entry| {
        show(&entry.flow);
        Ok(())
    })
}

/// Has the kernel load connection tracking where that is a module which nothing has asked for yet. nfnetlink loads what is asked of
/// it (`nfnetlink_rcv_msg`), for which `CAP_NET_ADMIN` is enough.
pub fn load_module() -> Result<(), KernelError> {
    for_each_udp(UdpFilter { family: IpFamily::V4, destination_port: None }, &mut |_| ())
}

/// Deletes those entries that pass the filter and that `is_stale` chooses, in the calling thread's network namespace. Only the
/// entry that was chosen goes (`CTA_ID`): one that took its place meanwhile stays. An entry that cannot be deleted
/// does not keep the others from it; the first such error is returned in the end.
pub fn delete_udp(
    filter: UdpFilter,
    is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
) -> Result<DeletionCounts, KernelError> {
    let mut deletions = Deletions::new()?;
    let mut seen = 0;
    dump(filter, &mut |entry| {
        seen += 1;
        if is_stale(&entry.flow) { deletions.push(entry) } else { Ok(()) }
    })?;
    deletions.send()?;
    match deletions.failure {
        None => Ok(DeletionCounts { seen, deleted: deletions.deleted }),
        Some(failure) => Err(failed("delete")(failure)),
    }
}

fn dump(
    filter: UdpFilter,
    each: &mut dyn FnMut(&Entry<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    walk(&message::dump_request(filter), &mut |payload| match message::entry(payload) {
        Some(entry) if filter.matches(&entry.flow) => each(&entry),
        _ => Ok(()),
    })
}

/// Asks for entries, and shows the payload of each.
fn walk(request: &[u8], each: &mut dyn FnMut(&[u8]) -> Result<(), KernelError>) -> Result<(), KernelError> {
    let socket = open()?;
    socket.send(request, 0).map_err(failed("list"))?;
    let mut buffer = Vec::with_capacity(netlink::LARGEST_DATAGRAM);
    loop {
        buffer.clear();
        socket.recv(&mut buffer, 0).map_err(failed("list"))?;
        for message in netlink::borrowed_messages(&buffer) {
            match message::answer(&message) {
                message::Answer::Entry(payload) => each(payload)?,
                message::Answer::Done => return Ok(()),
                message::Answer::Error(error) => return Err(failed("list")(error)),
                message::Answer::Other => {}
            }
        }
    }
}

fn open() -> Result<Socket, KernelError> {
    netlink::open(NETLINK_NETFILTER).map_err(failed("open a socket for"))
}

/// A kernel without ctnetlink says EINVAL for every request, and one without nfnetlink opens no socket.
fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> KernelError {
    move |source| match source.raw_os_error() {
        Some(libc::EINVAL | libc::EPROTONOSUPPORT) => KernelError::NoConntrackNetlink { source },
        _ => KernelError::call(operation, "entries of conntrack")(source),
    }
}

/// Entries to be deleted, sent some at a time.
struct Deletions {
    socket: Socket,
    batch: Batch,
    answers: Vec<u8>,
    deleted: usize,
    failure: Option<io::Error>,
}

impl Deletions {
    fn new() -> Result<Self, KernelError> {
        Ok(Self {
            socket: open()?,
            batch: Batch::default(),
            answers: Vec::with_capacity(netlink::LARGEST_DATAGRAM),
            deleted: 0,
            failure: None,
        })
    }

    fn push(&mut self, entry: &Entry<'_>) -> Result<(), KernelError> {
        self.batch.push(entry);
        if self.batch.len() < MOST_AT_ONCE { Ok(()) } else { self.send() }
    }

    /// Sends what is there and waits for what came of it.
    fn send(&mut self) -> Result<(), KernelError> {
        if self.batch.len() == 0 {
            return Ok(());
        }
        self.socket.send(self.batch.finish(), 0).map_err(failed("delete"))?;
        self.deleted += self.batch.len();
        let mut is_answered = false;
        while !is_answered {
            self.answers.clear();
            self.socket.recv(&mut self.answers, 0).map_err(failed("delete"))?;
            for message in netlink::borrowed_messages(&self.answers) {
                is_answered |= message.sequence_number() == self.batch.last_sequence_number();
                if let message::Answer::Error(error) = message::answer(&message) {
                    self.deleted = self.deleted.saturating_sub(1);
                    // Gone already is as good.
                    if error.raw_os_error() != Some(libc::ENOENT) {
                        self.failure.get_or_insert(error);
                    }
                }
            }
        }
        self.batch.start_next();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_ctnetlink_is_told_from_other_errors() {
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
