//! Reads entries of connections, and writes entries with which conntrack translates a connection.
//! The order of attributes follows `ctnetlink_create_conntrack` and `ctnetlink_setup_nat`.

use std::{net::SocketAddr, time::Duration};

use libc::c_int;

use super::{
    AddressPair,
    message::{
        IP_CT_TCP_FLAG_BE_LIBERAL, IP_CT_TCP_FLAG_CLOSE_INIT, read_tuple, tcp_state, write_address,
        write_tcp_flags, write_tuple,
    },
    uapi::*,
};
use crate::{
    kernel::netlink::{Attributes, MessageBuffer},
    net::Protocol,
};

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
pub(super) const IPS_SRC_NAT: u32 = 1 << 4;
pub(super) const IPS_DST_NAT: u32 = 1 << 5;
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

/// What an entry is to a connection whose new entry it is in the way of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Conntrack already translates the connection as it should.
    Same,
    /// Conntrack translates another connection, with packets in both directions.
    Other,
    /// It translates nothing, or a packet that was not held back began it.
    Stale,
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
    /// `CTA_ID`, which no other entry has. `None` if there is no entry yet.
    id: Option<u32>,
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
            id: None,
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
    pub(super) fn untranslated_entry(&self, original: AddressPair) -> Self {
        Self { untranslated: original, reply: original.swapped(), ..self.clone() }
    }

    /// Returns the same entry with another timeout.
    pub(super) fn with_timeout(mut self, seconds: u32) -> Self {
        self.state.timeout = Some(seconds);
        self
    }

    /// Returns true if it was read from an entry.
    pub(super) const fn has_entry(&self) -> bool {
        self.state.id.is_some()
    }

    /// Returns what an entry is that is in the way of this connection's new entry.
    ///
    /// A packet that is not held back finds rules that choose an endpoint again. A TCP endpoint
    /// resets what it does not know, and a conversation is assured after two seconds only. So an
    /// entry that is translated and assured is one of netfilter's own, from before. One that is
    /// over only waits for its end, and the client uses its port again.
    pub(super) fn obstacle(&self, entry: &Self) -> Obstacle {
        let TrackedConnection { original, reply, is_dnat, .. } = entry.tracked;
        if is_dnat && (original, reply) == (self.untranslated, self.reply) {
            Obstacle::Same
        } else if entry.state.status & (IPS_SRC_NAT | IPS_DST_NAT) != 0
            && entry.is_assured()
            && !entry.is_over()
        {
            Obstacle::Other
        } else {
            Obstacle::Stale
        }
    }

    /// Writes the attributes that name an entry in the zone of this connection, by the addresses of
    /// one of its directions.
    pub(super) fn write_name(&self, tuple: AddressPair, to: &mut MessageBuffer) {
        write_tuple(CTA_TUPLE_ORIG, self.tracked.protocol, tuple, to);
        write_optional(CTA_ZONE, self.state.zone.as_deref(), to);
    }

    /// Writes the attributes that name the entry from which it was read, and no other.
    pub(super) fn write_entry_name(&self, to: &mut MessageBuffer) {
        self.write_name(self.tracked.original, to);
        if let Some(id) = self.state.id {
            to.be32(CTA_ID, id);
        }
    }

    /// Writes an entry for the untranslated packets, with DNAT and SNAT.
    pub(super) fn write(&self, to: &mut MessageBuffer) {
        let Self { untranslated, reply: to_node, tracked, state } = self;
        write_tuple(CTA_TUPLE_ORIG, tracked.protocol, *untranslated, to);
        write_tuple(CTA_TUPLE_REPLY, tracked.protocol, untranslated.swapped(), to);
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
        id: attributes.be32(CTA_ID),
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
