//! Hands connections over to conntrack that something else translated before or after conntrack saw
//! their packets. Replaces their entries by entries that translate.
//!
//! The kernel cannot change the addresses of an entry, so the old entry is deleted and a new one
//! created. Between both, conntrack would take a packet for the first of a new connection. The
//! caller therefore holds the packets back: with [`Translator::hold`], or from [`find_connections`]
//! to [`replace_entries`]. The order of attributes follows `ctnetlink_create_conntrack` and
//! `ctnetlink_setup_nat`.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use libc::c_int;
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL};

use super::{
    AddressPair, dump, failed,
    message::{
        IP_CT_TCP_FLAG_BE_LIBERAL, IP_CT_TCP_FLAG_CLOSE_INIT, conntrack_type, header, read_tuple, tcp_state,
        write_address, write_tcp_flags, write_tuple,
    },
    open,
    uapi::*,
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
/// A packet that was not held back may have created a conflicting entry, which is then deleted.
const MAX_ATTEMPTS: usize = 4;

/// How long the source of a masqueraded connection is reserved, in seconds. The handover replaces
/// the entry that reserves it.
const RESERVED_SECONDS: u32 = 300;

/// `enum tcp_conntrack`.
pub(super) const TCP_CONNTRACK_SYN_SENT: u8 = 1;
const TCP_CONNTRACK_SYN_RECV: u8 = 2;
const TCP_CONNTRACK_ESTABLISHED: u8 = 3;
const TCP_CONNTRACK_LAST_ACK: u8 = 6;
const TCP_CONNTRACK_TIME_WAIT: u8 = 7;
/// `enum ip_conntrack_status`.
const IPS_SEEN_REPLY: u32 = 1 << 1;
const IPS_ASSURED: u32 = 1 << 2;
const IPS_CONFIRMED: u32 = 1 << 3;
const IPS_DST_NAT: u32 = 1 << 5;
/// The timeout of established connections whose old entry has none. It is kube-proxy's value for
/// TCP.
const ESTABLISHED_SECONDS: u32 = 86_400;

/// A connection as conntrack has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedConnection {
    /// The protocol.
    pub protocol: Protocol,
    /// The original direction, before conntrack's DNAT.
    pub original: AddressPair,
    /// The reply direction.
    pub reply: AddressPair,
    /// Conntrack itself translates the destination (`IPS_DST_NAT`).
    pub is_dnat: bool,
}

/// A connection that is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The original direction before any translation: client and VIP.
    pub untranslated: AddressPair,
    /// The reply direction as the endpoint sees it.
    pub reply: AddressPair,
    /// The connection in its old entry.
    pub tracked: TrackedConnection,
    state: EntryState,
}

/// The attributes that the new entry takes from the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EntryState {
    status: u32,
    /// In seconds. `None` if the entry does not expire.
    timeout: Option<u32>,
    mark: Option<Vec<u8>>,
    zone: Option<Vec<u8>>,
    /// `enum tcp_conntrack`.
    tcp_state: Option<u8>,
    /// `CTA_PROTOINFO`, encoded.
    protoinfo: Option<Vec<u8>>,
    /// When it began, since 1970. `None` unless `net.netfilter.nf_conntrack_timestamp` is on.
    began: Option<Duration>,
}

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

impl Connection {
    /// Returns a connection that conntrack does not track. Without packets, its entry expires after
    /// `expires_after`. `is_closed` says that both sides closed it.
    pub fn untracked(
        tracked: TrackedConnection,
        untranslated: AddressPair,
        reply: AddressPair,
        expires_after: Duration,
        is_assured: bool,
        is_closed: bool,
    ) -> Self {
        let state = EntryState {
            status: if is_assured { IPS_SEEN_REPLY | IPS_ASSURED } else { 0 },
            timeout: u32::try_from(expires_after.as_secs()).ok(),
            mark: None,
            zone: None,
            tcp_state: is_closed.then_some(TCP_CONNTRACK_TIME_WAIT),
            protoinfo: None,
            began: None,
        };
        Self { untranslated, reply, tracked, state }
    }

    /// Returns an entry with these addresses that translates nothing.
    fn untranslated_entry(&self, original: AddressPair) -> Self {
        Self { untranslated: original, reply: original.swapped(), ..self.clone() }
    }

    /// Returns true for a TCP connection that is not established yet.
    pub fn is_half_open(&self) -> bool {
        self.state.tcp_state.is_some_and(is_half_open)
    }

    /// Returns true for a TCP connection that one side or both closed, or that was reset.
    pub fn is_ending(&self) -> bool {
        self.state.tcp_state.is_some_and(|state| state > TCP_CONNTRACK_ESTABLISHED)
    }

    /// Returns true for a TCP connection that both sides closed, or that was reset.
    pub fn is_over(&self) -> bool {
        self.state.tcp_state.is_some_and(|state| state >= TCP_CONNTRACK_LAST_ACK)
    }

    /// Returns true if a packet of the reply direction passed (`IPS_SEEN_REPLY`).
    pub fn is_answered(&self) -> bool {
        self.state.status & IPS_SEEN_REPLY != 0
    }

    /// Returns true if packets passed in both directions, for UDP during more than two seconds
    /// (`IPS_ASSURED`). Conntrack then keeps a UDP flow longer.
    pub fn is_assured(&self) -> bool {
        self.state.status & IPS_ASSURED != 0
    }

    /// Returns the age of the entry. `None` unless `net.netfilter.nf_conntrack_timestamp` was on
    /// when it was created.
    pub fn age(&self, now_since_1970: Duration) -> Option<Duration> {
        self.state.began.map(|began| now_since_1970.saturating_sub(began))
    }

    /// Returns the time after which the entry expires without packets. `None` if it does not.
    pub fn expires_after(&self) -> Option<Duration> {
        self.state.timeout.map(|seconds| Duration::from_secs(seconds.into()))
    }
}

const fn is_half_open(tcp_state: u8) -> bool {
    matches!(tcp_state, TCP_CONNTRACK_SYN_SENT | TCP_CONNTRACK_SYN_RECV)
}

/// Returns the state of a new entry. Between the reading of the old entry and the hold, the rest of
/// the handshake may have passed. In `SYN_SENT`, conntrack would then not translate the client's
/// next segment (`tcp_conntracks`: an ACK is invalid). In `ESTABLISHED`, it translates the segments
/// of a handshake too, and ignores them otherwise.
fn new_tcp_state(read: Option<u8>) -> u8 {
    read.filter(|state| !is_half_open(*state)).unwrap_or(TCP_CONNTRACK_ESTABLISHED)
}

/// Returns the flag that lets a SYN open a new connection after this one. Conntrack sets it itself
/// when it sees the first FIN, but a new entry has only the flags that are written. Without the
/// flag, the SYN would go to the endpoint of the closed connection (`nf_conntrack_tcp_packet`).
const fn closed_flag(tcp_state: u8) -> u8 {
    if tcp_state > TCP_CONNTRACK_ESTABLISHED { IP_CT_TCP_FLAG_CLOSE_INIT } else { 0 }
}

/// Reads an entry. Returns `None` for other protocols, and if `untranslated` does.
pub(super) fn read_connection(
    attributes: Attributes<'_>,
    protocol: Protocol,
    untranslated: &mut dyn FnMut(&TrackedConnection) -> Option<AddressPair>,
) -> Option<Connection> {
    let original = read_tuple(attributes.nested(CTA_TUPLE_ORIG)?, protocol)?;
    let reply = read_tuple(attributes.nested(CTA_TUPLE_REPLY)?, protocol)?;
    let status = attributes.be32(CTA_STATUS).unwrap_or(0);
    let tracked = TrackedConnection { protocol, original, reply, is_dnat: status & IPS_DST_NAT != 0 };
    let untranslated = untranslated(&tracked)?;
    let protoinfo = attributes.nested(CTA_PROTOINFO);
    let state = EntryState {
        status,
        timeout: attributes.be32(CTA_TIMEOUT),
        mark: attributes.get(CTA_MARK).map(<[u8]>::to_vec),
        zone: attributes.get(CTA_ZONE).map(<[u8]>::to_vec),
        tcp_state: tcp_state(attributes),
        protoinfo: protoinfo.map(|protoinfo| protoinfo.0.to_vec()),
        began: attributes
            .nested(CTA_TIMESTAMP)
            .and_then(|times| times.be64(CTA_TIMESTAMP_START))
            .map(Duration::from_nanos),
    };
    Some(Connection { untranslated, reply, tracked, state })
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
                let mut reserved = connection.untranslated_entry(connection.reply);
                reserved.state.timeout = Some(RESERVED_SECONDS);
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
            write_tuple(CTA_TUPLE_ORIG, connection.tracked.protocol, tuple, to);
            write_optional(CTA_ZONE, connection.state.zone.as_deref(), to);
        });
    }

    /// Writes the creation of an entry for the untranslated packets, with DNAT and SNAT. Returns
    /// the message's sequence number.
    fn create(&self, connection: &Connection, to: &mut MessageBuffer) -> u32 {
        let Connection { untranslated, reply: to_node, tracked, state } = connection;
        let reply = untranslated.swapped();
        let sequence = self.socket.next_sequence();
        let flags = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK;
        to.message(conntrack_type(IPCTNL_MSG_CT_NEW), flags, sequence, header(self.family), |to| {
            write_tuple(CTA_TUPLE_ORIG, tracked.protocol, *untranslated, to);
            write_tuple(CTA_TUPLE_REPLY, tracked.protocol, reply, to);
            write_translation(CTA_NAT_DST, to_node.source, to);
            write_translation(CTA_NAT_SRC, to_node.destination, to);
            to.be32(CTA_STATUS, state.status & (IPS_SEEN_REPLY | IPS_ASSURED) | IPS_CONFIRMED);
            to.be32(CTA_TIMEOUT, state.timeout.unwrap_or(ESTABLISHED_SECONDS));
            write_optional(CTA_MARK, state.mark.as_deref(), to);
            match (tracked.protocol, &state.protoinfo) {
                (Protocol::Tcp, _) => write_tcp(state.tcp_state, to),
                // Without the verification tags, the kernel would assign all packets to another
                // association.
                (Protocol::Sctp, Some(protoinfo)) => to.nested_bytes(CTA_PROTOINFO, protoinfo),
                (Protocol::Udp, _) | (Protocol::Sctp, None) => {}
            }
            write_optional(CTA_ZONE, state.zone.as_deref(), to);
        });
        sequence
    }
}

fn write_optional(kind: c_int, value: Option<&[u8]>, to: &mut MessageBuffer) {
    if let Some(value) = value {
        to.bytes(kind, value);
    }
}

/// Writes a translation to exactly this address and port.
fn write_translation(kind: c_int, target: SocketAddr, to: &mut MessageBuffer) {
    to.nested(kind, |to| {
        write_address([CTA_NAT_V4_MINIP, CTA_NAT_V6_MINIP], target.ip(), to);
        write_address([CTA_NAT_V4_MAXIP, CTA_NAT_V6_MAXIP], target.ip(), to);
        to.nested(CTA_NAT_PROTO, |to| {
            to.be16(CTA_PROTONAT_PORT_MIN, target.port());
            to.be16(CTA_PROTONAT_PORT_MAX, target.port());
        });
    });
}

fn write_tcp(state: Option<u8>, to: &mut MessageBuffer) {
    to.nested(CTA_PROTOINFO, |to| {
        to.nested(CTA_PROTOINFO_TCP, |to| {
            let state = new_tcp_state(state);
            to.bytes(CTA_PROTOINFO_TCP_STATE, &[state]);
            write_tcp_flags(IP_CT_TCP_FLAG_BE_LIBERAL | closed_flag(state), to);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshake_that_may_go_on_during_the_handover_counts_as_established() {
        for read in [None, Some(TCP_CONNTRACK_SYN_SENT), Some(TCP_CONNTRACK_SYN_RECV)] {
            assert_eq!(new_tcp_state(read), TCP_CONNTRACK_ESTABLISHED, "{read:?}");
        }
        assert_eq!(new_tcp_state(Some(TCP_CONNTRACK_TIME_WAIT)), TCP_CONNTRACK_TIME_WAIT);
    }

    #[test]
    fn syn_may_open_a_new_connection_after_a_closed_one_alone() {
        assert_eq!(closed_flag(TCP_CONNTRACK_ESTABLISHED), 0);
        assert_eq!(closed_flag(TCP_CONNTRACK_TIME_WAIT), IP_CT_TCP_FLAG_CLOSE_INIT);
    }
}
