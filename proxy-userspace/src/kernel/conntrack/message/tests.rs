//! Messages as the kernel writes them, damaged ones among them.

use proptest::prelude::*;

use super::*;
use crate::kernel::netlink::borrowed_messages;

/// An entry as the kernel tells of it.
fn told(protocol: Protocol, family: IpFamily) -> Vec<u8> {
    let (source, destination) = match family {
        IpFamily::V4 => (vec![10, 244, 1, 9], vec![10, 96, 0, 10]),
        IpFamily::V6 => (vec![0xfd; 16], vec![0xfe; 16]),
    };
    let first = if family == IpFamily::V4 { IP_V4_SRC } else { IP_V6_SRC };
    let tuple = |bytes: &mut Vec<u8>, kind, [from, to]: [(&[u8], u16); 2]| {
        nest(bytes, kind, |bytes| {
            nest(bytes, TUPLE_IP, |bytes| {
                attribute(bytes, first, from.0);
                attribute(bytes, first + 1, to.0);
            });
            nest(bytes, TUPLE_PROTO, |bytes| {
                attribute(bytes, PROTO_NUM, &[protocol.number()]);
                attribute(bytes, PROTO_SRC_PORT, &from.1.to_be_bytes());
                attribute(bytes, PROTO_DST_PORT, &to.1.to_be_bytes());
            });
        });
    };
    let mut bytes = Vec::new();
    message(&mut bytes, NEW, 0, 0, family, |bytes| {
        tuple(bytes, TUPLE_ORIG, [(&source, 4000), (&destination, 53)]);
        tuple(bytes, TUPLE_REPLY, [(&source, 5353), (&source, 4000)]);
        attribute(bytes, ID, &[1, 2, 3, 4]);
        attribute(bytes, ZONE, &7_u16.to_be_bytes());
    });
    bytes
}

fn entries(datagram: &[u8]) -> Vec<Entry<'_>> {
    let read = |message: NetlinkBuffer<_>| match answer(&message) {
        Answer::Entry(payload) => entry(payload),
        _ => None,
    };
    borrowed_messages(datagram).filter_map(read).collect()
}

#[test]
fn udp_entries_of_both_families_are_read_and_those_of_other_protocols_are_not() {
    let datagram = [
        told(Protocol::Udp, IpFamily::V4),
        told(Protocol::Tcp, IpFamily::V4),
        told(Protocol::Udp, IpFamily::V6),
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
fn a_deletion_names_the_entry_as_the_kernel_did_and_only_the_last_is_answered_in_any_case() {
    let datagram = told(Protocol::Udp, IpFamily::V4);
    let mut batch = Batch::default();
    let entry = &entries(&datagram)[0];
    batch.push(entry);
    batch.push(entry);
    let last = batch.last_sequence_number();
    let sent = batch.finish();
    let deletions: Vec<_> = borrowed_messages(sent).collect();
    let flags: Vec<_> = deletions.iter().map(NetlinkBuffer::flags).collect();
    assert_eq!(flags, [NLM_F_REQUEST, NLM_F_REQUEST | NLM_F_ACK]);
    assert_eq!(deletions[1].sequence_number(), last);
    for deletion in deletions {
        assert_eq!(deletion.message_type(), DELETE);
        let sent: Vec<_> = attributes(&deletion.payload()[NFGENMSG..]).collect();
        let wanted = [(TUPLE_ORIG, entry.tuple), (ZONE, &[0, 7][..]), (ID, &[1, 2, 3, 4])];
        assert_eq!(sent, wanted);
    }
}

#[test]
fn errors_end_a_dump_also_where_they_come_with_its_end() {
    for (kind, code) in [(NLMSG_ERROR, -libc::EPERM), (NLMSG_DONE, -libc::EPERM)] {
        let mut bytes = Vec::new();
        message(&mut bytes, kind, 0, 0, IpFamily::V4, |_| {});
        bytes[HEADER..].copy_from_slice(&code.to_ne_bytes());
        let message = borrowed_messages(&bytes).next().unwrap();
        assert!(matches!(answer(&message), Answer::Error(e) if e.raw_os_error() == Some(libc::EPERM)));
    }
}

proptest! {
    #[test]
    fn damaged_datagrams_are_read_without_panic_and_to_their_end(
        at in 0..200_usize, byte in any::<u8>(), length in 0..400_usize,
    ) {
        let mut datagram = [told(Protocol::Udp, IpFamily::V4), told(Protocol::Udp, IpFamily::V6)].concat();
        let at = at % datagram.len();
        datagram[at] = byte;
        datagram.truncate(length);
        entries(&datagram);
    }
}
