//! Reads messages as the kernel writes them, and damaged ones.

use netlink_packet_core::{NLM_F_REQUEST, NetlinkBuffer};
use proptest::prelude::*;

use super::*;
use crate::kernel::netlink::messages_of;

/// Returns an entry as the kernel describes it.
fn entry(protocol: Protocol, family: IpFamily) -> Vec<u8> {
    let (source, destination) = match family {
        IpFamily::V4 => (vec![10, 244, 1, 9], vec![10, 96, 0, 10]),
        IpFamily::V6 => (vec![0xfd; 16], vec![0xfe; 16]),
    };
    let first = if family == IpFamily::V4 { CTA_IP_V4_SRC } else { CTA_IP_V6_SRC };
    let tuple = |buffer: &mut MessageBuffer, kind, [from, to]: [(&[u8], u16); 2]| {
        buffer.nested(kind, |buffer| {
            buffer.nested(CTA_TUPLE_IP, |buffer| {
                buffer.bytes(first, from.0);
                buffer.bytes(first + 1, to.0);
            });
            buffer.nested(CTA_TUPLE_PROTO, |buffer| {
                buffer.bytes(CTA_PROTO_NUM, &[protocol.number()]);
                buffer.be16(CTA_PROTO_SRC_PORT, from.1);
                buffer.be16(CTA_PROTO_DST_PORT, to.1);
            });
        });
    };
    let mut buffer = MessageBuffer::default();
    buffer.message(conntrack_type(IPCTNL_MSG_CT_NEW), 0, 0, header(family), |buffer| {
        tuple(buffer, CTA_TUPLE_ORIG, [(&source, 4000), (&destination, 53)]);
        tuple(buffer, CTA_TUPLE_REPLY, [(&source, 5353), (&source, 4000)]);
        buffer.bytes(CTA_ID, &[1, 2, 3, 4]);
        buffer.be16(CTA_ZONE, 7);
    });
    buffer.as_bytes().to_vec()
}

fn entries(datagram: &[u8]) -> Vec<Entry<'_>> {
    let read =
        |message: NetlinkBuffer<_>| Entry::read(Attributes::after_header(message.payload()), Protocol::Udp);
    messages_of(datagram).filter_map(read).collect()
}

#[test]
fn only_udp_entries_are_read_in_both_families() {
    let datagram = [
        entry(Protocol::Udp, IpFamily::V4),
        entry(Protocol::Tcp, IpFamily::V4),
        entry(Protocol::Udp, IpFamily::V6),
    ]
    .concat();
    let flows: Vec<_> = entries(&datagram).into_iter().map(|entry| entry.flow).collect();
    let [source, destination, reply_source] =
        ["10.244.1.9:4000", "10.96.0.10:53", "10.244.1.9:5353"].map(|text| text.parse().unwrap());
    assert_eq!(flows[0], UdpFlow { source, destination, reply_source, zone: 7 });
    assert_eq!(flows.len(), 2);
    assert!(flows[1].destination.is_ipv6());
}

#[test]
fn deletion_has_the_kernels_attributes_and_only_the_last_requests_an_answer() {
    let datagram = entry(Protocol::Udp, IpFamily::V4);
    let mut batch = DeletionBatch::default();
    let entry = &entries(&datagram)[0];
    batch.push(entry, 8);
    batch.push(entry, 9);
    let deletions: Vec<_> = messages_of(batch.finish().as_bytes()).collect();
    let flags: Vec<_> = deletions.iter().map(NetlinkBuffer::flags).collect();
    assert_eq!(flags, [NLM_F_REQUEST, NLM_F_REQUEST | NLM_F_ACK]);
    assert_eq!(deletions[1].sequence_number(), 9);
    for deletion in deletions {
        assert_eq!(deletion.message_type(), conntrack_type(IPCTNL_MSG_CT_DELETE));
        let sent: Vec<_> = Attributes::after_header(deletion.payload()).iter().collect();
        let expected = [(CTA_TUPLE_ORIG, entry.tuple), (CTA_ZONE, &[0, 7][..]), (CTA_ID, &[1, 2, 3, 4])];
        assert_eq!(sent, expected);
    }
}

proptest! {
    #[test]
    fn damaged_datagrams_are_read_to_their_end_without_a_panic(
        at in 0..200_usize, byte in any::<u8>(), length in 0..400_usize,
    ) {
        let mut datagram = [entry(Protocol::Udp, IpFamily::V4), entry(Protocol::Udp, IpFamily::V6)].concat();
        let at = at % datagram.len();
        datagram[at] = byte;
        datagram.truncate(length);
        entries(&datagram);
    }
}
