//! The code on the host and the programs in the kernel agree on random frames of a learned flow,
//! before the stack and at traffic control, byte by byte. The XDP program changes nothing of a
//! frame that it passes on, and otherwise does what the program at traffic control does.

use proptest::{
    prelude::*,
    test_runner::{TestCaseResult, TestRunner},
};
use proxy_common::{
    Protocol,
    link::Outcome,
    packet::TcpFlags,
    testing::{
        Addresses, Extension, FrameResult, FrameRunner, Hook, InputFrame, LO, MemoryMaps, Payload, StateMaps,
        TestNode, TestPacket, scenarios::know_direct_flow,
    },
};

use crate::kernel::Kernel;

pub(crate) const TESTS: &[(&str, fn())] =
    &[("learned::host_and_kernel_agree_on_frames_of_a_learned_flow", agree_on_frames)];

/// What differs from a packet as the flow was learned from.
#[derive(Clone, Debug)]
struct Change {
    hops: u8,
    traffic_class: u8,
    flags: u8,
    data: Vec<u8>,
    checksum: Checksum,
    vlan_tags: usize,
    fragment: Option<usize>,
    has_more_headers: bool,
    is_for_other_host: bool,
    is_other_client: bool,
}

#[derive(Clone, Copy, Debug)]
enum Checksum {
    Correct,
    OfPseudoHeader,
    Other([u8; 2]),
}

/// What differs in the entry of the flow.
#[derive(Clone, Copy, Debug)]
struct Entry {
    longest: u16,
    priority: u32,
    out_link: u32,
    traffic_class: u8,
    is_of_other_epoch: bool,
}

fn any_change() -> impl Strategy<Value = Change> {
    let usually = |value: u8, other: u8| prop_oneof![6 => Just(value), 1 => Just(other)];
    let checksum = prop_oneof![
        4 => Just(Checksum::Correct),
        1 => Just(Checksum::OfPseudoHeader),
        1 => any::<[u8; 2]>().prop_map(Checksum::Other),
        1 => Just(Checksum::Other([0; 2])),
    ];
    let rare = || proptest::bool::weighted(0.1);
    (
        prop_oneof![6 => 2..=255_u8, 1 => 0..2_u8],
        usually(0, 0xb8),
        prop_oneof![4 => Just(0x10), 1 => any::<u8>()],
        proptest::collection::vec(any::<u8>(), 0..60),
        checksum,
        usually(0, 1),
        proptest::option::weighted(0.1, 0..3_usize),
        [rare(), rare(), rare()],
    )
        .prop_map(|(hops, traffic_class, flags, data, checksum, tags, fragment, others)| {
            let [has_more_headers, is_for_other_host, is_other_client] = others;
            Change {
                hops,
                traffic_class,
                flags,
                data,
                checksum,
                vlan_tags: tags.into(),
                fragment,
                has_more_headers,
                is_for_other_host,
                is_other_client,
            }
        })
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let out_links = prop_oneof![4 => Just(LO), 1 => Just(4_711_u32)];
    let usually = |value: u32, other: u32| prop_oneof![6 => Just(value), 1 => Just(other)];
    (prop_oneof![3 => Just(1_500), 1 => 20..120_u16], usually(0, 7), out_links, usually(0, 4), usually(0, 1))
        .prop_map(|(longest, priority, out_link, class, epoch)| Entry {
            longest,
            priority,
            out_link,
            traffic_class: u8::try_from(class).expect("few"),
            is_of_other_epoch: epoch != 0,
        })
}

fn changed(packet: &TestPacket, change: &Change) -> TestPacket {
    let mut packet = TestPacket { hops: change.hops, traffic_class: change.traffic_class, ..packet.clone() };
    match &mut packet.payload {
        Payload::Tcp { flags, data } => (*flags, *data) = (TcpFlags(change.flags), change.data.clone()),
        Payload::Udp { data } => data.clone_from(&change.data),
        other => panic!("{other:?} is of no flow"),
    }
    packet.vlan_tags = vec![0x8100; change.vlan_tags];
    if change.has_more_headers {
        // Options of IPv4, or a header of IPv6 with hop-by-hop options.
        packet.options = vec![1, 1, 1, 0];
        packet.extensions = vec![Extension { kind: 0, length: 8 }];
    }
    if change.is_for_other_host {
        packet.to_mac = [2, 0, 0, 0, 0, 9];
    }
    if change.is_other_client {
        packet.from.set_port(40_404);
    }
    if let Some(part) = change.fragment {
        packet = packet.fragment(7, part * 16..part * 16 + 16);
    }
    match change.checksum {
        Checksum::Correct => packet,
        Checksum::OfPseudoHeader => packet.with_sum_of_pseudo_header(),
        Checksum::Other(field) => TestPacket { checksum: Some(field), ..packet },
    }
}

fn agree_on_frames() {
    let case = (
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)],
        0..2_usize,
        any_entry(),
        proptest::collection::vec(any_change(), 1..6),
    );
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..Default::default() });
    let result = runner.run(&case, |(protocol, family, entry, changes)| {
        let frames = |packet: &TestPacket| -> Vec<InputFrame> {
            changes.iter().map(|change| InputFrame::new(changed(packet, change).to_frame())).collect()
        };
        let addresses = Addresses::BOTH[family];
        let mut memory = MemoryMaps { random_step: 0, ..MemoryMaps::default() };
        let on_host = results(&mut memory, addresses, protocol, entry, frames);
        let in_kernel = results(&mut *Kernel::lock(), addresses, protocol, entry, frames);
        prop_assert_eq!(in_kernel, on_host.clone());
        on_host.iter().try_for_each(|(xdp, tc, _)| compare_hooks(xdp, tc))
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Returns what becomes of each frame at both hooks, and what the programs know then.
fn results(
    runner: &mut dyn FrameRunner,
    addresses: Addresses,
    protocol: Protocol,
    entry: Entry,
    frames: impl Fn(&TestPacket) -> Vec<InputFrame>,
) -> Vec<(FrameResult, FrameResult, StateMaps)> {
    let mut node = TestNode::new(runner, addresses);
    let frames = frames(&know_direct_flow(&mut node, protocol));
    node.change_direct_flows(|flow| {
        let path = &mut flow.path;
        (path.longest, path.priority, path.out_link) = (entry.longest, entry.priority, entry.out_link);
        path.traffic_class = entry.traffic_class;
        path.epoch += u32::from(entry.is_of_other_epoch);
    });
    let known = node.state();
    let result = |frame: &InputFrame| {
        node.set_state(&known);
        let mut run = |hook| shown(node.run(hook, frame).expect("a plain frame always runs"));
        let xdp = run(Hook::Xdp);
        let tc = run(Hook::Ingress);
        node.set_state(&known);
        node.run(Hook::Xdp, frame);
        (xdp, tc, node.state())
    };
    frames.iter().map(result).collect()
}

/// Returns a result without what the kernel does not show.
fn shown(result: FrameResult) -> FrameResult {
    FrameResult { note: 0, redirected_to: 0, is_for_peer: false, is_headed_by_kernel: false, ..result }
}

fn compare_hooks(xdp: &FrameResult, tc: &FrameResult) -> TestCaseResult {
    if xdp.outcome == Outcome::Proceed {
        prop_assert_eq!(&xdp.bytes, &xdp.input.bytes);
    } else {
        prop_assert_eq!(tc.outcome, Outcome::Redirect);
        prop_assert_eq!(&xdp.bytes, &tc.bytes);
    }
    Ok(())
}
