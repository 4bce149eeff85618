//! ctnetlink's messages, as far as entries of UDP and of taken over connections need them: read in place, and written by copying what the kernel said of an entry.
//!
//! The types of netlink-packet-netfilter own every attribute, which is a dozen allocations an entry, and know neither zone
//! nor identifier.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use netlink_packet_core::{
    NLA_F_NESTED, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NlasIterator,
};

use super::{AddressPair, UdpFilter, UdpFlow};
use crate::net::{IpFamily, Protocol};

/// `NFNL_SUBSYS_CTNETLINK`, the upper byte of a message's type.
const SUBSYSTEM: u16 = 1 << 8;
/// `IPCTNL_MSG_CT_*`, the lower byte.
pub(super) const NEW: u16 = SUBSYSTEM;
pub(super) const GET: u16 = SUBSYSTEM | 1;
pub(super) const DELETE: u16 = SUBSYSTEM | 2;

/// `enum ctattr_type` and what is nested in it (`linux/netfilter/nfnetlink_conntrack.h`).
pub(super) const TUPLE_ORIG: u16 = 1;
pub(super) const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
pub(super) const ZONE: u16 = 18;
const FILTER: u16 = 25;
const FILTER_ORIG_FLAGS: u16 = 1;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const IP_V4_SRC: u16 = 1;
const IP_V4_DST: u16 = 2;
const IP_V6_SRC: u16 = 3;
const IP_V6_DST: u16 = 4;
const PROTO_NUM: u16 = 1;
const PROTO_SRC_PORT: u16 = 2;
const PROTO_DST_PORT: u16 = 3;

/// Which parts of a tuple a filter is about (`net/netfilter/nf_internals.h`).
const BY_PROTO_NUM: u32 = 1 << 3;
const BY_PROTO_DST_PORT: u32 = 1 << 5;

/// `struct nlmsghdr`, `struct nfgenmsg` and `struct nlattr`.
const HEADER: usize = 16;
pub(super) const NFGENMSG: usize = 4;
const ATTRIBUTE: usize = 4;

/// An entry, with what the kernel needs to find it again.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) flow: UdpFlow,
    tuple: &'a [u8],
    zone: Option<&'a [u8]>,
    id: Option<&'a [u8]>,
}

/// What a message says.
#[derive(Debug)]
pub(super) enum Answer<'a> {
    /// There is this entry; a payload.
    Entry(&'a [u8]),
    /// That was all.
    Done,
    /// Something failed.
    Error(io::Error),
    /// Something that none of this is about, such as a success.
    Other,
}

/// Asks for all UDP entries that pass the filter.
pub(super) fn dump_request(filter: UdpFilter) -> Vec<u8> {
    dump_request_of(filter.family, Protocol::Udp, filter.destination_port)
}

/// Asks for all entries of a protocol, and of a destination port if there is one.
pub(super) fn dump_request_of(
    family: IpFamily,
    protocol: Protocol,
    destination_port: Option<u16>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    message(&mut bytes, GET, NLM_F_DUMP, 0, family, |bytes| {
        nest(bytes, TUPLE_ORIG, |bytes| {
            nest(bytes, TUPLE_PROTO, |bytes| {
                attribute(bytes, PROTO_NUM, &[protocol.number()]);
                if let Some(port) = destination_port {
                    attribute(bytes, PROTO_DST_PORT, &port.to_be_bytes());
                }
            });
        });
        let by_port = destination_port.map_or(0, |_| BY_PROTO_DST_PORT);
        nest(bytes, FILTER, |bytes| {
            attribute(bytes, FILTER_ORIG_FLAGS, &(BY_PROTO_NUM | by_port).to_ne_bytes());
        });
    });
    bytes
}

/// Reads a message.
pub(super) fn answer<'a>(message: &NetlinkBuffer<&'a [u8]>) -> Answer<'a> {
    match message.message_type() {
        NEW => Answer::Entry(message.payload()),
        NLMSG_DONE => done(message.payload(), Answer::Done),
        NLMSG_ERROR => done(message.payload(), Answer::Other),
        _ => Answer::Other,
    }
}

/// Both ends of an answer begin with an error number, negative or 0.
fn done<'a>(payload: &[u8], fine: Answer<'a>) -> Answer<'a> {
    match payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code)) {
        0 => fine,
        code => Answer::Error(io::Error::from_raw_os_error(-code)),
    }
}

/// Several deletions in one datagram. The kernel answers to those that fail, and to the last one in any case.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    count: usize,
    last: usize,
    sequence_number: u32,
}

impl Batch {
    /// How many deletions it holds.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Adds the deletion of an entry.
    pub(super) fn push(&mut self, entry: &Entry<'_>) {
        self.count += 1;
        self.last = self.bytes.len();
        self.sequence_number = self.sequence_number.wrapping_add(1);
        let family = IpFamily::of(entry.flow.destination.ip());
        message(&mut self.bytes, DELETE, 0, self.sequence_number, family, |bytes| {
            attribute(bytes, TUPLE_ORIG | NLA_F_NESTED, entry.tuple);
            for (kind, value) in [(ZONE, entry.zone), (ID, entry.id)] {
                if let Some(value) = value {
                    attribute(bytes, kind, value);
                }
            }
        });
    }

    /// The datagram.
    pub(super) fn finish(&mut self) -> &[u8] {
        if let Some(last) = self.bytes.get_mut(self.last..).filter(|last| last.len() >= HEADER) {
            NetlinkBuffer::new(last).set_flags(NLM_F_REQUEST | NLM_F_ACK);
        }
        &self.bytes
    }

    /// What the answer to the last deletion carries.
    pub(super) fn last_sequence_number(&self) -> u32 {
        self.sequence_number
    }

    /// Empties it.
    pub(super) fn start_next(&mut self) {
        self.bytes.clear();
        self.count = 0;
    }
}

/// Reads a UDP entry; none of other protocols.
pub(super) fn entry(payload: &[u8]) -> Option<Entry<'_>> {
    let (mut original, mut reply, mut tuple, mut zone, mut id) = (None, None, None, None, None);
    for (kind, value) in attributes(payload.get(NFGENMSG..)?) {
        match kind {
            TUPLE_ORIG => (original, tuple) = (Some(read_tuple(value, Protocol::Udp)?), Some(value)),
            TUPLE_REPLY => reply = Some(read_tuple(value, Protocol::Udp)?),
            ZONE => zone = Some(value),
            ID => id = Some(value),
            _ => {}
        }
    }
    let AddressPair { source, destination } = original?;
    let flow = UdpFlow {
        source,
        destination,
        reply_source: reply?.source,
        zone: zone.and_then(<[u8]>::first_chunk).map_or(0, |zone| u16::from_be_bytes(*zone)),
    };
    Some(Entry { flow, tuple: tuple?, zone, id })
}

/// Source and destination of one direction; none unless it is of this protocol.
pub(super) fn read_tuple(value: &[u8], protocol: Protocol) -> Option<AddressPair> {
    let (mut addresses, mut ports) = ((None, None), (None, None));
    for (kind, value) in attributes(value) {
        match kind {
            TUPLE_IP => addresses = read_addresses(value),
            TUPLE_PROTO => ports = read_ports(value, protocol)?,
            _ => {}
        }
    }
    let (source, destination) =
        (SocketAddr::new(addresses.0?, ports.0?), SocketAddr::new(addresses.1?, ports.1?));
    Some(AddressPair { source, destination })
}

/// Writes one direction of a connection.
pub(super) fn put_tuple(bytes: &mut Vec<u8>, kind: u16, protocol: Protocol, ends: AddressPair) {
    nest(bytes, kind, |bytes| {
        nest(bytes, TUPLE_IP, |bytes| {
            put_address(bytes, [IP_V4_SRC, IP_V6_SRC], ends.source.ip());
            put_address(bytes, [IP_V4_DST, IP_V6_DST], ends.destination.ip());
        });
        nest(bytes, TUPLE_PROTO, |bytes| {
            attribute(bytes, PROTO_NUM, &[protocol.number()]);
            attribute(bytes, PROTO_SRC_PORT, &ends.source.port().to_be_bytes());
            attribute(bytes, PROTO_DST_PORT, &ends.destination.port().to_be_bytes());
        });
    });
}

/// Writes an address under the kind of its family.
pub(super) fn put_address(bytes: &mut Vec<u8>, [v4, v6]: [u16; 2], address: IpAddr) {
    match address {
        IpAddr::V4(address) => attribute(bytes, v4, &address.octets()),
        IpAddr::V6(address) => attribute(bytes, v6, &address.octets()),
    }
}

fn read_addresses(value: &[u8]) -> (Option<IpAddr>, Option<IpAddr>) {
    let (mut source, mut destination) = (None, None);
    for (kind, value) in attributes(value) {
        let v4 = || value.first_chunk::<4>().map(|octets| IpAddr::from(Ipv4Addr::from(*octets)));
        let v6 = || value.first_chunk::<16>().map(|octets| IpAddr::from(Ipv6Addr::from(*octets)));
        match kind {
            IP_V4_SRC => source = v4(),
            IP_V4_DST => destination = v4(),
            IP_V6_SRC => source = v6(),
            IP_V6_DST => destination = v6(),
            _ => {}
        }
    }
    (source, destination)
}

fn read_ports(value: &[u8], protocol: Protocol) -> Option<(Option<u16>, Option<u16>)> {
    let (mut source, mut destination) = (None, None);
    for (kind, value) in attributes(value) {
        let port = || value.first_chunk().map(|port| u16::from_be_bytes(*port));
        match kind {
            PROTO_NUM if value != [protocol.number()] => return None,
            PROTO_SRC_PORT => source = port(),
            PROTO_DST_PORT => destination = port(),
            _ => {}
        }
    }
    Some((source, destination))
}

/// Kinds and values, up to the first that is damaged.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|attribute| {
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        (kind, attribute.into_inner().get(ATTRIBUTE..length).unwrap_or_default())
    })
}

/// Adds a message to a datagram.
pub(super) fn message(
    bytes: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    sequence_number: u32,
    family: IpFamily,
    body: impl FnOnce(&mut Vec<u8>),
) {
    let start = bytes.len();
    bytes.resize(start + HEADER, 0);
    let family = match family {
        IpFamily::V4 => libc::AF_INET,
        IpFamily::V6 => libc::AF_INET6,
    };
    bytes.extend([u8::try_from(family).unwrap_or_default(), 0, 0, 0]);
    body(bytes);
    let message = &mut bytes[start..];
    // All that is put into a message here is a few hundred bytes.
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut message = NetlinkBuffer::new(message);
    message.set_length(length);
    message.set_message_type(kind);
    message.set_flags(NLM_F_REQUEST | flags);
    message.set_sequence_number(sequence_number);
}

/// Adds an attribute that holds others.
pub(super) fn nest(bytes: &mut Vec<u8>, kind: u16, body: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.resize(start + ATTRIBUTE, 0);
    body(bytes);
    put_attribute_header(bytes, start, kind | NLA_F_NESTED);
}

/// Adds an attribute.
pub(super) fn attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let start = bytes.len();
    bytes.resize(start + ATTRIBUTE, 0);
    bytes.extend(value);
    put_attribute_header(bytes, start, kind);
}

/// An attribute is as long as what was put after `start`; the next one begins at four bytes.
fn put_attribute_header(bytes: &mut Vec<u8>, start: usize, kind: u16) {
    let length = u16::try_from(bytes.len() - start).unwrap_or(u16::MAX);
    bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    bytes[start + 2..start + ATTRIBUTE].copy_from_slice(&kind.to_ne_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests;
