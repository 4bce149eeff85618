//! The choice of source ports, until all are taken.

use std::{collections::BTreeSet, net::SocketAddr, vec::Vec};

use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, Endpoint, Flow, FlowKey, Masquerading, flow_state},
    link::Outcome,
    packet::Tuple,
    tables::Tables as _,
    testing::{Addresses, FrameRunner as _, Hook, InputFrame, MemoryMaps, TestPacket},
};

const AT: Addresses = Addresses::BOTH[0];
/// The number of source ports of each address.
const PORTS: u32 = 60_000;
const FIRST_PORT: u16 = 1_024;

/// A node that masquerades with the ports of one address after the other.
struct Node {
    maps: MemoryMaps,
    /// Address and port of a socket of the node.
    socket: Option<Endpoint>,
    clients: u32,
    flows: usize,
}

impl Node {
    fn new() -> Self {
        let mut maps = MemoryMaps { random_step: 1, random_of: mixed, ..MemoryMaps::default() };
        let node = &mut maps.config.node;
        node.masquerading = Masquerading::Programs as u16;
        node.first_port = FIRST_PORT;
        node.last_port = FIRST_PORT + u16::try_from(PORTS - 1).expect("fits");
        Self { maps, socket: None, clients: 0, flows: 0 }
    }

    fn set_address(&mut self, address: [u8; 4]) {
        let everywhere = (1, Addr::UNSPECIFIED_V4, 96);
        self.maps.config.masquerade_addresses.insert(everywhere, Addr::from_v4(address));
    }

    /// Sends the first datagram of another client to the endpoint, after the program on the link
    /// where it came in. Returns the number of tries if a port was found.
    fn begin_flow(&mut self) -> Option<u32> {
        self.clients += 1;
        let client = std::net::Ipv4Addr::from(0x0a00_0000 + self.clients);
        let packet = TestPacket::udp(SocketAddr::new(client.into(), 500), SocketAddr::new(AT.pod, 53));
        let reply = Tuple { source: packet.to.into(), destination: packet.from.into() };
        let reply_key = FlowKey::new(Direction::Reply, Protocol::Udp, reply);
        self.maps.put_flow(&reply_key, &Flow { state: flow_state::MASQUERADE, used_ns: 1, ..Flow::NONE });
        let mark = self.maps.config.node.masquerade_mark;
        let random = self.maps.random.get();
        let frame = InputFrame { mark, socket: self.socket, ..InputFrame::new(packet.to_frame()) };
        let result = self.maps.run(Hook::Egress, &frame).expect("memory runs every frame");
        self.maps.remove_flow(&reply_key);
        let further_tries = self.maps.random.get() - random;
        assert!(further_tries <= super::TRIES);
        match result.outcome {
            Outcome::Proceed => {
                self.flows += 1;
                Some(further_tries + 1)
            }
            Outcome::Drop | Outcome::Redirect | Outcome::Transmit | Outcome::Forward | Outcome::Refuse => {
                None
            }
        }
    }

    /// Begins flows until this number of them exists.
    fn fill_to(&mut self, flows: usize) {
        // With one free port of 60,000, a datagram finds it with a probability of 1 in 1,875.
        for _ in 0..100_000_000_u64 {
            if self.flows >= flows {
                return;
            }
            self.begin_flow();
        }
        panic!("{} of {flows} flows", self.flows);
    }

    /// Returns the mean number of tries of flows that begin now, and how many of a thousand found
    /// no port.
    fn tries(&mut self) -> (f64, usize) {
        let tries: Vec<Option<u32>> = (0..200).map(|_| self.begin_flow()).collect();
        let found: Vec<u32> = tries.iter().flatten().copied().collect();
        let mean =
            f64::from(found.iter().sum::<u32>()) / f64::from(u32::try_from(found.len().max(1)).expect("few"));
        (mean, (tries.len() - found.len()) * 5)
    }

    /// Returns the source of each flow.
    fn sources(&mut self) -> Vec<(Addr, u16)> {
        let state = self.maps.state();
        let flows = state.all_flows().filter(|(key, _)| key.direction == Direction::Masquerade as u8);
        flows.map(|(_, flow)| (flow.source.addr, flow.source.port)).collect()
    }
}

/// Mixes the bits of a number (the last step of `MurmurHash3`).
const fn mixed(number: u32) -> u32 {
    let number = (number ^ number >> 16).wrapping_mul(0x85eb_ca6b);
    let number = (number ^ number >> 13).wrapping_mul(0xc2b2_ae35);
    number ^ number >> 16
}

#[test]
fn ports_are_found_in_few_tries_and_none_is_used_twice() {
    let mut node = Node::new();
    let per_address = PORTS as usize;
    node.set_address([192, 0, 2, 1]);
    let fills = [(25, 1.6, 0), (50, 2.4, 0), (75, 4.8, 5), (90, 11.0, 80), (99, 22.0, 800)];
    for (percent, most_tries, most_lost) in fills {
        node.fill_to(per_address * percent / 100);
        let (tries, lost) = node.tries();
        std::eprintln!(
            "{percent} % of the ports are taken: {tries:.2} tries, {lost} of 1,000 flows find no port"
        );
        assert!(tries <= most_tries && lost <= most_lost, "{percent} %: {tries} tries, {lost} lost");
    }
    // Four more addresses, up to 262,144 flows to one endpoint.
    for host in 2..=5 {
        node.set_address([192, 0, 2, host]);
        let flows = (node.flows + per_address * 9 / 10).min(262_144);
        node.fill_to(flows);
    }
    node.fill_to(262_144);
    let sources = node.sources();
    assert_eq!(sources.len(), 262_144);
    assert_eq!(sources.iter().collect::<BTreeSet<_>>().len(), 262_144, "a port is used twice");
    assert_eq!(node.maps.state().all_flows().count(), 2 * 262_144, "a flow has two entries");
}

#[test]
fn flows_beyond_the_last_port_are_dropped_and_leave_nothing_behind() {
    let mut node = Node::new();
    node.maps.config.node.last_port = FIRST_PORT + 99;
    node.set_address([192, 0, 2, 1]);
    node.fill_to(99);
    let (_, lost) = node.tries();
    assert!(lost < 1_000, "the last port is found by one flow in four");
    node.fill_to(100);
    let dropped = node.maps.state().counters[Counter::NotMasqueraded as usize];
    assert_eq!(node.tries(), (0.0, 1_000));
    assert_eq!(node.maps.state().counters[Counter::NotMasqueraded as usize], dropped + 200);
    assert_eq!(node.maps.state().all_flows().count(), 200);
}

#[test]
fn port_of_a_socket_is_not_taken() {
    let mut node = Node::new();
    node.maps.config.node.last_port = FIRST_PORT + 1;
    node.set_address([192, 0, 2, 1]);
    node.socket = Some(Endpoint::new(Addr::from_v4([192, 0, 2, 1]), FIRST_PORT));
    node.fill_to(1);
    assert_eq!(node.tries(), (0.0, 1_000), "the socket has the last port");
    assert_eq!(node.sources(), [(Addr::from_v4([192, 0, 2, 1]), FIRST_PORT + 1)]);
    assert!(node.maps.state().counters[Counter::PortOfSocket as usize] > 0);
    node.socket = None;
    node.fill_to(2);
}
