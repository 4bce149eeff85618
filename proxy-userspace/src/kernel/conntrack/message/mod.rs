//! The messages of ctnetlink that shunt needs. Entries are read in place. A deletion copies the
//! attributes with which the kernel described the entry.

use std::net::{IpAddr, SocketAddr};

use libc::{NFNL_SUBSYS_CTNETLINK, c_int};
use netlink_packet_core::NLM_F_ACK;

use super::{AddressPair, UdpFlow, uapi::*};
use crate::{
    kernel::netlink::{Attributes, MessageBuffer, nfgenmsg, nfnl_type},
    net::{IpFamily, Protocol},
};

/// The fields of a tuple that a filter compares (`net/netfilter/nf_internals.h`).
const CTA_FILTER_F_CTA_PROTO_NUM: u32 = 1 << 3;
const CTA_FILTER_F_CTA_PROTO_DST_PORT: u32 = 1 << 5;

pub(super) const fn conntrack_type(message: c_int) -> u16 {
    nfnl_type(NFNL_SUBSYS_CTNETLINK, message)
}

pub(super) const fn header(family: IpFamily) -> [u8; 4] {
    match family {
        IpFamily::V4 => nfgenmsg(libc::AF_INET, 0),
        IpFamily::V6 => nfgenmsg(libc::AF_INET6, 0),
    }
}

/// An entry, with the attributes by which the kernel finds it again.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) flow: UdpFlow,
    tuple: &'a [u8],
    zone: Option<&'a [u8]>,
    id: Option<&'a [u8]>,
}

impl<'a> Entry<'a> {
    /// Reads an entry. Returns `None` for other protocols.
    pub(super) fn read(attributes: Attributes<'a>, protocol: Protocol) -> Option<Self> {
        let tuple = attributes.nested(CTA_TUPLE_ORIG)?;
        let AddressPair { source, destination } = read_tuple(tuple, protocol)?;
        let reply = read_tuple(attributes.nested(CTA_TUPLE_REPLY)?, protocol)?;
        let zone = attributes.be16(CTA_ZONE).unwrap_or(0);
        Some(Self {
            flow: UdpFlow { source, destination, reply_source: reply.source, zone },
            tuple: tuple.0,
            zone: attributes.get(CTA_ZONE),
            id: attributes.get(CTA_ID),
        })
    }
}

/// Returns the state of a TCP entry (`enum tcp_conntrack`).
pub(super) fn tcp_state(attributes: Attributes<'_>) -> Option<u8> {
    let tcp = attributes.nested(CTA_PROTOINFO)?.nested(CTA_PROTOINFO_TCP)?;
    tcp.get(CTA_PROTOINFO_TCP_STATE)?.first().copied()
}

/// Writes a request for the entries of a protocol that have this original destination port, if any.
pub(super) fn write_filter(protocol: Protocol, destination_port: Option<u16>, to: &mut MessageBuffer) {
    to.nested(CTA_TUPLE_ORIG, |to| {
        to.nested(CTA_TUPLE_PROTO, |to| {
            to.bytes(CTA_PROTO_NUM, &[protocol.number()]);
            if let Some(port) = destination_port {
                to.be16(CTA_PROTO_DST_PORT, port);
            }
        });
    });
    let port_flag = destination_port.map_or(0, |_| CTA_FILTER_F_CTA_PROTO_DST_PORT);
    to.nested(CTA_FILTER, |to| to.ne32(CTA_FILTER_ORIG_FLAGS, CTA_FILTER_F_CTA_PROTO_NUM | port_flag));
}

/// Writes a request for the entries whose status has a bit.
pub(super) fn write_status_filter(bit: u32, to: &mut MessageBuffer) {
    to.be32(CTA_STATUS, bit);
    to.be32(CTA_STATUS_MASK, bit);
}

/// Deletions that are sent together. The kernel answers those that fail, and always the last one.
#[derive(Debug, Default)]
pub(super) struct DeletionBatch {
    messages: MessageBuffer,
    count: usize,
    last: usize,
}

impl DeletionBatch {
    /// Returns the number of deletions.
    pub(super) const fn len(&self) -> usize {
        self.count
    }

    pub(super) fn push(&mut self, entry: &Entry<'_>, sequence: u32) {
        let header = header(IpFamily::of(entry.flow.destination.ip()));
        let delete = conntrack_type(IPCTNL_MSG_CT_DELETE);
        self.last = self.messages.message(delete, 0, sequence, header, |to| {
            to.nested_bytes(CTA_TUPLE_ORIG, entry.tuple);
            for (kind, value) in [(CTA_ZONE, entry.zone), (CTA_ID, entry.id)] {
                if let Some(value) = value {
                    to.bytes(kind, value);
                }
            }
        });
        self.count += 1;
    }

    /// Returns the messages. The batch must not be empty.
    pub(super) fn finish(&mut self) -> &MessageBuffer {
        self.messages.add_flags(self.last, NLM_F_ACK);
        &self.messages
    }
}

/// Reads one direction of an entry. Returns `None` for other protocols.
pub(super) fn read_tuple(tuple: Attributes<'_>, protocol: Protocol) -> Option<AddressPair> {
    let ports = tuple.nested(CTA_TUPLE_PROTO)?;
    if ports.get(CTA_PROTO_NUM)? != [protocol.number()] {
        return None;
    }
    let addresses = tuple.nested(CTA_TUPLE_IP)?;
    let read = |v4, v6, port| {
        let address = addresses.address(v4).or_else(|| addresses.address(v6))?;
        Some(SocketAddr::new(address, ports.be16(port)?))
    };
    Some(AddressPair {
        source: read(CTA_IP_V4_SRC, CTA_IP_V6_SRC, CTA_PROTO_SRC_PORT)?,
        destination: read(CTA_IP_V4_DST, CTA_IP_V6_DST, CTA_PROTO_DST_PORT)?,
    })
}

/// Writes one direction of an entry.
pub(super) fn write_tuple(kind: c_int, protocol: Protocol, tuple: AddressPair, to: &mut MessageBuffer) {
    to.nested(kind, |to| {
        to.nested(CTA_TUPLE_IP, |to| {
            write_address([CTA_IP_V4_SRC, CTA_IP_V6_SRC], tuple.source.ip(), to);
            write_address([CTA_IP_V4_DST, CTA_IP_V6_DST], tuple.destination.ip(), to);
        });
        to.nested(CTA_TUPLE_PROTO, |to| {
            to.bytes(CTA_PROTO_NUM, &[protocol.number()]);
            to.be16(CTA_PROTO_SRC_PORT, tuple.source.port());
            to.be16(CTA_PROTO_DST_PORT, tuple.destination.port());
        });
    });
}

/// A side has closed the connection. In `TIME_WAIT` and `CLOSE`, a SYN then opens a new one.
pub(super) const IP_CT_TCP_FLAG_CLOSE_INIT: u8 = 1 << 2;
/// Conntrack accepts packets outside the TCP window, because it does not know the window.
pub(super) const IP_CT_TCP_FLAG_BE_LIBERAL: u8 = 1 << 3;

/// Writes flags of both directions that conntrack sets.
pub(super) fn write_tcp_flags(flags: u8, to: &mut MessageBuffer) {
    // struct nf_ct_tcp_flags: the flags, and a mask of the flags to set.
    for kind in [CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, CTA_PROTOINFO_TCP_FLAGS_REPLY] {
        to.bytes(kind, &[flags, flags]);
    }
}

/// Writes an address as the attribute of its family.
pub(super) fn write_address([v4, v6]: [c_int; 2], address: IpAddr, to: &mut MessageBuffer) {
    match address {
        IpAddr::V4(address) => to.bytes(v4, &address.octets()),
        IpAddr::V6(address) => to.bytes(v6, &address.octets()),
    }
}

#[cfg(test)]
mod tests;
