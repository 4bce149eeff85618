//! Connections that something else translated before or after conntrack saw their packets, handed over to it: their entries are
//! replaced by such as translate.
//!
//! The kernel changes no addresses of an entry that it has, so the old one is deleted and another made. In between, a packet
//! would be tracked as something new: whoever hands over keeps packets back meanwhile ([`Translator::hold`], or all the while
//! between [`find_connections`] and [`replace_entries`]). The order of attributes and what the kernel makes of them is that of `ctnetlink_create_conntrack` and `ctnetlink_setup_nat`.

use std::{collections::BTreeMap, net::SocketAddr};

use netlink_packet_core::{NLA_F_NESTED, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL};
use netlink_sys::Socket;

use super::{
    AddressPair, failed,
    message::{self, Answer, DELETE, NEW, attribute, attributes, nest, put_address, put_tuple, read_tuple},
    open, walk,
};
use crate::{
    kernel::{KernelError, netlink},
    net::{IpFamily, Protocol},
};

/// Connections that are replaced at once: packets of each are kept back as long as that takes.
const AT_ONCE: usize = 32;
/// Packets that were not kept back may have made an entry in the way of the new one, which then has to go first.
const TRIES: usize = 4;

/// `enum ctattr_type`.
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const NAT_SRC: u16 = 6;
const TIMEOUT: u16 = 7;
const MARK: u16 = 8;
const NAT_DST: u16 = 13;
/// `enum ctattr_nat` and `enum ctattr_protonat`.
const NAT_V4_MIN: u16 = 1;
const NAT_V4_MAX: u16 = 2;
const NAT_PROTO: u16 = 3;
const NAT_V6_MIN: u16 = 4;
const NAT_V6_MAX: u16 = 5;
const NAT_PORT_MIN: u16 = 1;
const NAT_PORT_MAX: u16 = 2;
/// `enum ctattr_protoinfo` and `enum ctattr_protoinfo_tcp`.
const PROTOINFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const TCP_FLAGS_ORIGINAL: u16 = 4;
const TCP_FLAGS_REPLY: u16 = 5;

/// `TCP_CONNTRACK_ESTABLISHED` of `enum tcp_conntrack`.
const TCP_ESTABLISHED: u8 = 3;

/// `enum ip_conntrack_status`.
const SEEN_REPLY: u32 = 1 << 1;
const ASSURED: u32 = 1 << 2;
const CONFIRMED: u32 = 1 << 3;
const DST_NAT: u32 = 1 << 5;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`: of windows nothing is known.
const BE_LIBERAL: u8 = 1 << 3;
/// What conntrack allows established connections that it did not say otherwise of; kube-proxy's figure for TCP.
const ESTABLISHED_SECONDS: u32 = 86_400;

/// A connection as conntrack has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedConnection {
    /// The protocol.
    pub protocol: Protocol,
    /// Its first packet, before conntrack translated anything.
    pub original: AddressPair,
    /// What conntrack takes for an answer.
    pub reply: AddressPair,
    /// Conntrack itself translates where it goes (`IPS_DST_NAT`).
    pub is_dnat: bool,
}

/// A connection that is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Packets of its client as they come in.
    pub untranslated: AddressPair,
    /// What conntrack had of it.
    pub tracked: TrackedConnection,
    state: Kept,
}

/// What the new entry takes from the old.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Kept {
    status: u32,
    /// In seconds; none where the kernel does not count them.
    timeout: Option<u32>,
    mark: Option<Vec<u8>>,
    zone: Option<Vec<u8>>,
    /// `enum tcp_conntrack`.
    tcp_state: Option<u8>,
    /// `CTA_PROTOINFO` as it was.
    protocol: Option<Vec<u8>>,
}

/// Who translated connections so far.
pub trait Translator {
    /// Client and VIP of a connection that is to be handed over; none of any other.
    fn untranslated(&mut self, tracked: &TrackedConnection) -> Option<AddressPair>;

    /// From now on no packet of the connection may reach conntrack.
    fn hold(&mut self, connection: &Connection);

    /// Conntrack translates it from now on.
    fn release(&mut self, connection: &Connection);
}

/// What came of it.
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

/// Hands over those connections of a family and protocol that the translator chooses, in the calling thread's network namespace.
/// Entries that come meanwhile may be met or not.
pub fn hand_over(
    family: IpFamily,
    protocol: Protocol,
    translator: &mut dyn Translator,
) -> Result<HandoverCounts, KernelError> {
    let mut replacement = Replacement::new(family)?;
    walk(&message::dump_request_of(family, protocol, None), &mut |payload| {
        let Some((tracked, state)) = read(payload, protocol) else { return Ok(()) };
        let Some(untranslated) = translator.untranslated(&tracked) else { return Ok(()) };
        replacement.waiting.push(Connection { untranslated, tracked, state });
        if replacement.waiting.len() < AT_ONCE { Ok(()) } else { replacement.run(translator) }
    })?;
    replacement.run(translator)?;
    Ok(replacement.done)
}

/// The connections of a family and protocol for which `untranslated` has client and VIP, in the calling thread's network
/// namespace: to be replaced once nothing translates them any more.
pub fn find_connections(
    family: IpFamily,
    protocol: Protocol,
    untranslated: &mut dyn FnMut(&TrackedConnection) -> Option<AddressPair>,
) -> Result<Vec<Connection>, KernelError> {
    let mut found = Vec::new();
    walk(&message::dump_request_of(family, protocol, None), &mut |payload| {
        found.extend(read(payload, protocol).and_then(|(tracked, state)| {
            Some(Connection { untranslated: untranslated(&tracked)?, tracked, state })
        }));
        Ok(())
    })?;
    Ok(found)
}

/// Makes conntrack translate these connections of a family. Their entries may be there still, or not. No packet of theirs may
/// come by meanwhile.
pub fn replace_entries(family: IpFamily, connections: &[Connection]) -> Result<HandoverCounts, KernelError> {
    let mut replacement = Replacement::new(family)?;
    connections.chunks(AT_ONCE).try_for_each(|some| replacement.replace(some))?;
    Ok(replacement.done)
}

fn read(payload: &[u8], protocol: Protocol) -> Option<(TrackedConnection, Kept)> {
    let (mut original, mut reply, mut kept) = (None, None, Kept::default());
    let number = |value: &[u8]| value.first_chunk().map(|value| u32::from_be_bytes(*value));
    for (kind, value) in attributes(payload.get(message::NFGENMSG..)?) {
        match kind {
            message::TUPLE_ORIG => original = Some(read_tuple(value, protocol)?),
            message::TUPLE_REPLY => reply = Some(read_tuple(value, protocol)?),
            message::ZONE => kept.zone = Some(value.to_vec()),
            STATUS => kept.status = number(value)?,
            TIMEOUT => kept.timeout = number(value),
            MARK => kept.mark = Some(value.to_vec()),
            PROTOINFO => (kept.tcp_state, kept.protocol) = (tcp_state(value), Some(value.to_vec())),
            _ => {}
        }
    }
    let is_dnat = kept.status & DST_NAT != 0;
    Some((TrackedConnection { protocol, original: original?, reply: reply?, is_dnat }, kept))
}

fn tcp_state(value: &[u8]) -> Option<u8> {
    let (_, tcp) = attributes(value).find(|(kind, _)| *kind == PROTOINFO_TCP)?;
    let (_, state) = attributes(tcp).find(|(kind, _)| *kind == TCP_STATE)?;
    state.first().copied()
}

/// Connections that wait, and what became of those before.
struct Replacement {
    family: IpFamily,
    socket: Socket,
    waiting: Vec<Connection>,
    /// Of the last message that was sent; an answer carries its question's.
    sequence_number: u32,
    done: HandoverCounts,
}

impl Replacement {
    fn new(family: IpFamily) -> Result<Self, KernelError> {
        let (socket, waiting, done) = (open()?, Vec::new(), HandoverCounts::default());
        Ok(Self { family, socket, waiting, sequence_number: 0, done })
    }

    fn run(&mut self, translator: &mut dyn Translator) -> Result<(), KernelError> {
        let connections = std::mem::take(&mut self.waiting);
        for connection in &connections {
            translator.hold(connection);
        }
        let replaced = self.replace(&connections);
        for connection in &connections {
            translator.release(connection);
        }
        replaced
    }

    fn replace(&mut self, connections: &[Connection]) -> Result<(), KernelError> {
        let mut left: Vec<&Connection> = connections.iter().collect();
        for attempt in 0..TRIES {
            if left.is_empty() {
                break;
            }
            let before = left.len();
            left = self.exchange(&left, attempt > 0)?;
            self.done.connections += before - left.len();
        }
        self.done.lost += left.len();
        Ok(())
    }

    /// One go at some; returns those in whose way another entry is.
    fn exchange<'a>(
        &mut self,
        connections: &[&'a Connection],
        clear_the_way: bool,
    ) -> Result<Vec<&'a Connection>, KernelError> {
        let mut datagram = Vec::new();
        let mut asked = BTreeMap::new();
        for connection in connections {
            let TrackedConnection { original, reply, .. } = connection.tracked;
            let in_the_way = [reply, connection.untranslated].into_iter().filter(|_| clear_the_way);
            for ends in [original].into_iter().chain(in_the_way) {
                self.sequence_number = self.sequence_number.wrapping_add(1);
                delete(&mut datagram, self.family, self.sequence_number, connection, ends);
            }
            self.sequence_number = self.sequence_number.wrapping_add(1);
            create(&mut datagram, self.family, self.sequence_number, connection);
            asked.insert(self.sequence_number, *connection);
        }
        self.socket.send(&datagram, 0).map_err(failed("replace"))?;
        self.answers(asked)
    }

    fn answers<'a>(
        &mut self,
        mut asked: BTreeMap<u32, &'a Connection>,
    ) -> Result<Vec<&'a Connection>, KernelError> {
        let mut refused = Vec::new();
        let mut buffer = Vec::with_capacity(netlink::LARGEST_DATAGRAM);
        while !asked.is_empty() {
            buffer.clear();
            self.socket.recv(&mut buffer, 0).map_err(failed("replace"))?;
            for message in netlink::borrowed_messages(&buffer) {
                // Deletions answer only where they fail, which is as good: creation tells.
                let Some(connection) = asked.remove(&message.sequence_number()) else { continue };
                if let Answer::Error(error) = message::answer(&message) {
                    tracing::debug!(%error, ?connection, "cannot be handed over to conntrack yet");
                    refused.push(connection);
                }
            }
        }
        Ok(refused)
    }
}

fn delete(datagram: &mut Vec<u8>, family: IpFamily, number: u32, connection: &Connection, ends: AddressPair) {
    message::message(datagram, DELETE, 0, number, family, |bytes| {
        put_tuple(bytes, message::TUPLE_ORIG, connection.tracked.protocol, ends);
        put_zone(bytes, connection);
    });
}

fn put_zone(bytes: &mut Vec<u8>, connection: &Connection) {
    if let Some(zone) = &connection.state.zone {
        attribute(bytes, message::ZONE, zone);
    }
}

/// The entry is made as if it came in untranslated, and then translated both ways.
fn create(datagram: &mut Vec<u8>, family: IpFamily, number: u32, connection: &Connection) {
    let Connection { untranslated, tracked, state } = connection;
    let answer = AddressPair { source: untranslated.destination, destination: untranslated.source };
    message::message(datagram, NEW, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK, number, family, |bytes| {
        put_tuple(bytes, message::TUPLE_ORIG, tracked.protocol, *untranslated);
        put_tuple(bytes, message::TUPLE_REPLY, tracked.protocol, answer);
        put_translation(bytes, NAT_DST, tracked.reply.source);
        put_translation(bytes, NAT_SRC, tracked.reply.destination);
        let status = state.status & (SEEN_REPLY | ASSURED) | CONFIRMED;
        attribute(bytes, STATUS, &status.to_be_bytes());
        attribute(bytes, TIMEOUT, &state.timeout.unwrap_or(ESTABLISHED_SECONDS).to_be_bytes());
        if let Some(mark) = &state.mark {
            attribute(bytes, MARK, mark);
        }
        match (tracked.protocol, &state.protocol) {
            (Protocol::Tcp, _) => put_tcp(bytes, state.tcp_state),
            // Without its verification tags, the kernel would take all packets for those of another association.
            (Protocol::Sctp, Some(protocol)) => attribute(bytes, PROTOINFO | NLA_F_NESTED, protocol),
            (Protocol::Udp, _) | (Protocol::Sctp, None) => {}
        }
        put_zone(bytes, connection);
    });
}

/// To this address and port, and no other.
fn put_translation(bytes: &mut Vec<u8>, kind: u16, to: SocketAddr) {
    nest(bytes, kind, |bytes| {
        put_address(bytes, [NAT_V4_MIN, NAT_V6_MIN], to.ip());
        put_address(bytes, [NAT_V4_MAX, NAT_V6_MAX], to.ip());
        nest(bytes, NAT_PROTO, |bytes| {
            attribute(bytes, NAT_PORT_MIN, &to.port().to_be_bytes());
            attribute(bytes, NAT_PORT_MAX, &to.port().to_be_bytes());
        });
    });
}

fn put_tcp(bytes: &mut Vec<u8>, state: Option<u8>) {
    nest(bytes, PROTOINFO, |bytes| {
        nest(bytes, PROTOINFO_TCP, |bytes| {
            attribute(bytes, TCP_STATE, &[state.unwrap_or(TCP_ESTABLISHED)]);
            // Flags, and which of them are meant.
            for kind in [TCP_FLAGS_ORIGINAL, TCP_FLAGS_REPLY] {
                attribute(bytes, kind, &[BE_LIBERAL, BE_LIBERAL]);
            }
        });
    });
}
