//! What two CPUs do at once.

use std::{net::SocketAddr, vec::Vec};

use super::ingress;
use crate::{
    Protocol,
    layout::{Counter, Flow},
    packet::IpVersion,
    tables::Tables as _,
    testing::{Bed as _, Bytes, Given, Hook, Memory, Places, Scene, Sent},
};

const AT: Places = Places::BOTH[0];

fn datagram() -> Sent {
    Sent::udp(SocketAddr::new(AT.client, 40_000), SocketAddr::new(AT.cluster_ip, 80))
}

/// Another datagram of the same client comes in on another CPU, where chance says something else.
fn another_datagram(memory: &Memory) {
    memory.random.set(u32::MAX);
    let frame = Bytes::new(&Given::new(datagram().bytes()));
    assert_eq!(ingress(&frame, memory, 14, IpVersion::V4), super::Outcome::Proceed);
    memory.random.set(0);
}

#[test]
fn two_cpus_that_place_one_client_at_once_agree_on_its_endpoint() {
    let endpoints = [AT.pod, AT.other_pod].map(|pod| SocketAddr::new(pod, 8080));
    let mut memory = Memory { random_step: 0, ..Memory::default() };
    Scene::new(&mut memory, AT).serve(Protocol::Udp, &[datagram().to], &endpoints);
    memory.meanwhile.set(Some(another_datagram));
    let ran = memory.run(Hook::Ingress, &Given::new(datagram().bytes())).expect("memory takes everything");
    ran.becomes(&datagram().to(endpoints[1]));
    let noted = memory.noted();
    assert_eq!(noted.counters[Counter::FlowsBegun as usize], 1);
    // One entry a direction, each of which leads to the other.
    let flows: Vec<_> = noted.flows.into_iter().collect();
    assert_eq!(flows.len(), 2, "{flows:?}");
    for (key, flow) in &flows {
        let partner = memory.flow(&flow.partner_key(key)).map(|other| other.tuple());
        assert_eq!(partner, Some(Flow::partner(flow, key).tuple()));
    }
}
