//! Hands connections over to conntrack that something else translated before or after conntrack saw
//! their packets. Replaces their entries by entries that translate.
//!
//! The kernel cannot change the addresses of an entry, so the old entry is deleted and a new one
//! created. Between both, conntrack would take a packet for the first of a new connection. The
//! caller therefore holds the packets back: with [`Translator::hold`], or from [`find_connections`]
//! to [`replace_entries`].

use std::{collections::BTreeMap, net::SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL};

use super::{
    AddressPair,
    connection::{Connection, TrackedConnection, read_connection},
    dump, failed,
    message::{conntrack_type, header},
    open,
    uapi::{IPCTNL_MSG_CT_DELETE, IPCTNL_MSG_CT_NEW},
};
use crate::{
    kernel::{
        KernelError,
        netlink::{MessageBuffer, NetlinkSocket},
    },
    net::{IpFamily, Protocol},
};

/// The number of connections that are replaced at once. Until then, their packets are held back.
const BATCH_SIZE: usize = 32;
/// A packet that was not held back may have created a conflicting entry, which is then deleted.
const MAX_ATTEMPTS: usize = 4;

/// How long the source of a masqueraded connection is reserved, in seconds. The handover replaces
/// the entry that reserves it.
const RESERVED_SECONDS: u32 = 300;

/// The translator of the connections until their handover.
pub trait Translator {
    /// Returns client and VIP of a connection. Returns `None` if it is not to be handed over.
    fn untranslated(&self, tracked: &TrackedConnection) -> Option<AddressPair>;

    /// Returns the source that the endpoint sees, if something else than conntrack masquerades the
    /// connection.
    fn masqueraded_source(&self, _: &TrackedConnection) -> Option<SocketAddr> {
        None
    }

    /// Starts to hold back the packets of the connection from conntrack. Returns false if the
    /// connection is not to be handed over any more: since its entry was read, it may have ended,
    /// and conntrack may have another one with the same addresses.
    fn hold(&mut self, connection: &Connection) -> bool;

    /// Stops holding packets back. Conntrack translates the connection from now on.
    fn release(&mut self, connection: &Connection);

    /// Stops holding packets back. Conntrack did not get the connection, which goes on as before.
    fn restore(&mut self, connection: &Connection);
}

/// The result of a handover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandoverCounts {
    /// Connections that conntrack translates now.
    pub connections: usize,
    /// Connections that are lost.
    pub lost: usize,
}

impl std::ops::AddAssign for HandoverCounts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.lost += other.lost;
    }
}

/// Hands over the connections of a family and protocol that the translator selects, in the calling
/// thread's network namespace. Connections that start during the handover may be missed.
pub fn hand_over(
    family: IpFamily,
    protocol: Protocol,
    translator: &mut dyn Translator,
) -> Result<HandoverCounts, KernelError> {
    let mut replacement = Replacement::new(family)?;
    let mut batch = Vec::new();
    dump(family, protocol, None, &mut |attributes| {
        let select = &mut |tracked: &TrackedConnection| translator.untranslated(tracked);
        let mut connection = read_connection(attributes, protocol, select);
        if let Some(connection) = &mut connection
            && let Some(source) = translator.masqueraded_source(&connection.tracked)
        {
            connection.reply.destination = source;
        }
        batch.extend(connection);
        if batch.len() < BATCH_SIZE {
            return Ok(());
        }
        replacement.replace_held(&std::mem::take(&mut batch), translator)
    })?;
    replacement.replace_held(&batch, translator)?;
    Ok(replacement.counts)
}

/// Hands over connections of a family that conntrack did not track so far
/// ([`Connection::untracked`]), in the calling thread's network namespace.
pub fn hand_over_untracked(
    family: IpFamily,
    connections: &[Connection],
    translator: &mut dyn Translator,
) -> Result<HandoverCounts, KernelError> {
    let mut replacement = Replacement::new(family)?;
    let mut batches = connections.chunks(BATCH_SIZE);
    batches.try_for_each(|batch| replacement.replace_held(batch, translator))?;
    Ok(replacement.counts)
}

/// Adds entries to conntrack for connections of a family that it may not track yet
/// ([`Connection::untracked`]), in the calling thread's network namespace. The entries translate
/// nothing. Existing entries stay.
///
/// Conntrack then gives no other connection the addresses and ports of these connections. If
/// something else masquerades a connection, the source that it chose is reserved too.
pub fn track(family: IpFamily, connections: &[Connection]) -> Result<(), KernelError> {
    let mut replacement = Replacement::new(family)?;
    connections.chunks(BATCH_SIZE).try_for_each(|batch| replacement.track(batch))
}

/// Finds the connections of a family and protocol for which `untranslated` returns client and VIP,
/// in the calling thread's network namespace.
pub fn find_connections(
    family: IpFamily,
    protocol: Protocol,
    untranslated: &mut dyn FnMut(&TrackedConnection) -> Option<AddressPair>,
) -> Result<Vec<Connection>, KernelError> {
    let mut connections = Vec::new();
    dump(family, protocol, None, &mut |attributes| {
        connections.extend(read_connection(attributes, protocol, untranslated));
        Ok(())
    })?;
    Ok(connections)
}

/// Makes conntrack translate these connections of a family. Their old entries may be gone already.
/// The caller holds their packets back.
pub fn replace_entries(family: IpFamily, connections: &[Connection]) -> Result<HandoverCounts, KernelError> {
    let mut replacement = Replacement::new(family)?;
    let mut batches = connections.chunks(BATCH_SIZE);
    batches.try_for_each(|batch| replacement.replace(batch.iter().collect()).map(drop))?;
    Ok(replacement.counts)
}

/// Calls `each` for the connections of a family and protocol, in the calling thread's network
/// namespace. Entries that are added or deleted during the dump may be missing or present.
pub fn for_each_connection(
    family: IpFamily,
    protocol: Protocol,
    each: &mut dyn FnMut(&Connection),
) -> Result<(), KernelError> {
    dump(family, protocol, None, &mut |attributes| {
        let all = &mut |tracked: &TrackedConnection| Some(tracked.original);
        read_connection(attributes, protocol, all).iter().for_each(&mut *each);
        Ok(())
    })
}

/// Returns true if conntrack translates a TCP or UDP connection.
pub fn translates_connections() -> Result<bool, KernelError> {
    let mut translates = false;
    for family in IpFamily::ALL {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for_each_connection(family, protocol, &mut |connection| {
                let TrackedConnection { original, reply, .. } = connection.tracked;
                translates |= reply != original.swapped();
            })?;
        }
    }
    Ok(translates)
}

/// Replaces entries and counts the results.
struct Replacement {
    family: IpFamily,
    socket: NetlinkSocket,
    counts: HandoverCounts,
}

impl Replacement {
    fn new(family: IpFamily) -> Result<Self, KernelError> {
        Ok(Self { family, socket: open()?, counts: HandoverCounts::default() })
    }

    fn replace_held(
        &mut self,
        connections: &[Connection],
        translator: &mut dyn Translator,
    ) -> Result<(), KernelError> {
        let held: Vec<&Connection> =
            connections.iter().filter(|connection| translator.hold(connection)).collect();
        let replaced = self.replace(held.clone());
        let is_lost = |connection: &Connection| match &replaced {
            Ok(lost) => lost.iter().any(|lost| std::ptr::eq(*lost, connection)),
            // Some of them may be replaced. The next attempt finds the conflicting entries.
            Err(_) => true,
        };
        for connection in held {
            if is_lost(connection) {
                translator.restore(connection);
            } else {
                translator.release(connection);
            }
        }
        replaced.map(drop)
    }

    /// Creates entries that translate nothing. The kernel refuses those that it has.
    fn track(&mut self, connections: &[Connection]) -> Result<(), KernelError> {
        let mut messages = MessageBuffer::default();
        for connection in connections {
            self.create(&connection.untranslated_entry(connection.tracked.original), &mut messages);
            if connection.reply.destination != connection.tracked.original.source {
                let reserved = connection.untranslated_entry(connection.reply).with_timeout(RESERVED_SECONDS);
                self.create(&reserved, &mut messages);
            }
        }
        let refused = self.socket.send_batch(&messages).map_err(failed("track"))?.len();
        tracing::debug!(refused, of = connections.len(), "conntrack has entries for connections already");
        Ok(())
    }

    /// Replaces the entries of connections. Returns the connections that are lost.
    fn replace<'a>(
        &mut self,
        mut remaining: Vec<&'a Connection>,
    ) -> Result<Vec<&'a Connection>, KernelError> {
        for attempt in 0..MAX_ATTEMPTS {
            if remaining.is_empty() {
                break;
            }
            let before = remaining.len();
            remaining = self.try_replace(&remaining, attempt > 0)?;
            self.counts.connections += before - remaining.len();
        }
        self.counts.lost += remaining.len();
        Ok(remaining)
    }

    /// Tries once to replace the entries. Returns the connections that conflict with other entries.
    fn try_replace<'a>(
        &mut self,
        connections: &[&'a Connection],
        delete_conflicting: bool,
    ) -> Result<Vec<&'a Connection>, KernelError> {
        let mut messages = MessageBuffer::default();
        let mut creations = BTreeMap::new();
        for connection in connections {
            let original = connection.tracked.original;
            let conflicting =
                [connection.reply, connection.untranslated].into_iter().filter(|_| delete_conflicting);
            for tuple in [original].into_iter().chain(conflicting) {
                self.delete(connection, tuple, &mut messages);
            }
            creations.insert(self.create(connection, &mut messages), *connection);
        }
        let mut conflicting = Vec::new();
        // Errors of deletions do not matter: the creation fails if an entry is still there.
        for (sequence, error) in self.socket.send_batch(&messages).map_err(failed("replace"))? {
            if let Some(connection) = creations.remove(&sequence) {
                tracing::debug!(%error, ?connection, "cannot hand connection over to conntrack yet");
                conflicting.push(connection);
            }
        }
        Ok(conflicting)
    }

    fn delete(&self, connection: &Connection, tuple: AddressPair, to: &mut MessageBuffer) {
        let message_type = conntrack_type(IPCTNL_MSG_CT_DELETE);
        to.message(message_type, 0, self.socket.next_sequence(), header(self.family), |to| {
            connection.write_name(tuple, to);
        });
    }

    /// Writes the creation of an entry. Returns the message's sequence number.
    fn create(&self, connection: &Connection, to: &mut MessageBuffer) -> u32 {
        let sequence = self.socket.next_sequence();
        let flags = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK;
        let header = header(self.family);
        to.message(conntrack_type(IPCTNL_MSG_CT_NEW), flags, sequence, header, |to| connection.write(to));
        sequence
    }
}
