//! Hands connections over to conntrack that something else translated before or after conntrack saw
//! their packets. Replaces their entries by entries that translate.
//!
//! The kernel cannot change the addresses of an entry, so the old entry is deleted and a new one
//! created. Between both, conntrack would take a packet for the first of a new connection. The
//! caller therefore holds the packets back: with [`Translator::hold`], or from [`find_connections`]
//! to [`replace_entries`].

use std::{borrow::Cow, collections::BTreeMap, net::SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL};

use super::{
    AddressPair,
    connection::{Connection, Obstacle, TrackedConnection, read_connection},
    dump, failed,
    message::{conntrack_type, header},
    open,
    uapi::{IPCTNL_MSG_CT_DELETE, IPCTNL_MSG_CT_GET, IPCTNL_MSG_CT_NEW},
};
use crate::{
    kernel::{
        KernelError,
        netlink::{Attributes, MessageBuffer, NetlinkSocket},
    },
    net::{IpFamily, Protocol},
};

/// The number of connections that are replaced at once. Until then, their packets are held back.
const BATCH_SIZE: usize = 32;
/// A packet that was not held back may have created an entry that is in the way. It is then
/// deleted.
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

/// Whether a connection can get its new entry.
enum Way<'a> {
    /// It can, once these entries are deleted.
    Open(Vec<Cow<'a, Connection>>),
    /// Conntrack has that entry already.
    Needless,
    /// Conntrack translates another connection with the same addresses, which stays.
    Closed,
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
        let mut lost = Vec::new();
        for attempt in 0..MAX_ATTEMPTS {
            if remaining.is_empty() {
                break;
            }
            remaining = self.try_replace(&remaining, attempt > 0, &mut lost)?;
        }
        lost.extend(remaining);
        self.counts.lost += lost.len();
        Ok(lost)
    }

    /// Tries once to replace the entries. Returns the connections for which other entries are in
    /// the way. Adds those to `lost` for which they stay there.
    fn try_replace<'a>(
        &mut self,
        connections: &[&'a Connection],
        is_refused: bool,
        lost: &mut Vec<&'a Connection>,
    ) -> Result<Vec<&'a Connection>, KernelError> {
        let mut possible = Vec::new();
        for connection in connections {
            match self.way(connection, is_refused)? {
                Way::Open(stale) => possible.push((*connection, stale)),
                Way::Needless => self.counts.connections += 1,
                Way::Closed => lost.push(*connection),
            }
        }
        let mut messages = MessageBuffer::default();
        let mut creations = BTreeMap::new();
        for (connection, stale) in possible {
            for entry in &stale {
                self.delete(entry, &mut messages);
            }
            creations.insert(self.create(connection, &mut messages), connection);
        }
        if creations.is_empty() {
            return Ok(Vec::new());
        }
        let attempted = creations.len();
        let mut refused = Vec::new();
        // Errors of deletions do not matter: the creation fails if an entry is still there.
        for (sequence, error) in self.socket.send_batch(&messages).map_err(failed("replace"))? {
            if let Some(connection) = creations.remove(&sequence) {
                tracing::debug!(%error, ?connection, "cannot hand connection over to conntrack yet");
                refused.push(connection);
            }
        }
        self.counts.connections += attempted - refused.len();
        Ok(refused)
    }

    /// Finds out whether a connection can get its new entry. The entry from which it was read has
    /// to be deleted for that, or, if that was refused, all that have its addresses.
    ///
    /// An entry is named by its identifier: another connection may have the same addresses since
    /// the entry was read.
    fn way<'a>(&self, connection: &'a Connection, is_refused: bool) -> Result<Way<'a>, KernelError> {
        if !is_refused && connection.has_entry() {
            return Ok(Way::Open(vec![Cow::Borrowed(connection)]));
        }
        let Connection { untranslated, reply, tracked, .. } = connection;
        let mut stale = Vec::new();
        let count = if is_refused { 3 } else { 1 };
        for tuple in [tracked.original, *reply, *untranslated].into_iter().take(count) {
            let Some(entry) = self.entry(connection, tuple)? else { continue };
            match connection.obstacle(&entry) {
                Obstacle::Same => return Ok(Way::Needless),
                // One of the client to the endpoint itself is not in the way.
                Obstacle::Other if tuple == tracked.original && tuple != *untranslated => {}
                Obstacle::Other => return Ok(Way::Closed),
                Obstacle::Stale => stale.push(Cow::Owned(entry)),
            }
        }
        Ok(Way::Open(stale))
    }

    /// Reads the entry that has these addresses in one of its directions.
    fn entry(&self, connection: &Connection, tuple: AddressPair) -> Result<Option<Connection>, KernelError> {
        let message = conntrack_type(IPCTNL_MSG_CT_GET);
        let name = |to: &mut MessageBuffer| connection.write_name(tuple, to);
        let all = |attributes: Attributes<'_>| {
            let protocol = connection.tracked.protocol;
            read_connection(attributes, protocol, &mut |tracked| Some(tracked.original))
        };
        let answers = self.socket.request(message, 0, header(self.family), name);
        match answers.and_then(|mut answers| answers.read(all)) {
            Ok(entries) => Ok(entries.into_iter().next()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(failed("read")(error)),
        }
    }

    /// Writes the deletion of the entry from which a connection was read.
    fn delete(&self, connection: &Connection, to: &mut MessageBuffer) {
        let message_type = conntrack_type(IPCTNL_MSG_CT_DELETE);
        to.message(message_type, 0, self.socket.next_sequence(), header(self.family), |to| {
            connection.write_entry_name(to);
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
