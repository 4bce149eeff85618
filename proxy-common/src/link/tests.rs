//! Two CPUs handle packets of one client at the same time.

use std::{net::SocketAddr, vec::Vec};

use super::ingress;
use crate::{
    Protocol,
    layout::{Counter, Flow},
    packet::IpVersion,
    tables::Tables as _,
    testing::{Addresses, FrameRunner as _, Hook, InputFrame, MemoryFrame, MemoryMaps, TestNode, TestPacket},
};

const AT: Addresses = Addresses::BOTH[0];

fn datagram() -> TestPacket {
    TestPacket::udp(SocketAddr::new(AT.client, 40_000), SocketAddr::new(AT.cluster_ip, 80))
}

/// Another CPU handles another datagram of the same client, and gets another random number.
fn another_datagram(memory: &MemoryMaps) {
    memory.random.set(u32::MAX);
    let frame = MemoryFrame::<false>::new(&InputFrame::new(datagram().to_frame()));
    assert_eq!(ingress(&frame, memory, 14, IpVersion::V4), super::Outcome::Proceed);
    memory.random.set(0);
}

#[test]
fn two_cpus_choose_the_same_endpoint_for_a_new_client() {
    let endpoints = [AT.pod, AT.other_pod].map(|pod| SocketAddr::new(pod, 8080));
    let mut memory = MemoryMaps { random_step: 0, ..MemoryMaps::default() };
    TestNode::new(&mut memory, AT).add_service(Protocol::Udp, &[datagram().to], &endpoints);
    memory.on_random.set(Some(another_datagram));
    let result =
        memory.run(Hook::Ingress, &InputFrame::new(datagram().to_frame())).expect("memory runs every frame");
    result.becomes(&datagram().to(endpoints[1]));
    let state = memory.state();
    assert_eq!(state.counters[Counter::FlowsBegun as usize], 1);
    // One entry for each direction, and each leads to the other.
    let flows: Vec<_> = state.all_flows().collect();
    assert_eq!(flows.len(), 2, "{flows:?}");
    for (key, flow) in flows {
        let opposite = memory.flow(&flow.opposite_key(key)).map(|other| other.tuple());
        assert_eq!(opposite, Some(Flow::opposite(flow, key).tuple()));
    }
}
