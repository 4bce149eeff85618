//! A node with Services, addresses of one IP family, and frames that pass its links.

use std::{
    net::{IpAddr, SocketAddr},
    panic::panic_any,
    vec::Vec,
};

use super::{ConfigMaps, FrameResult, FrameRunner, Hook, InputFrame, StateMaps, TestPacket};
use crate::{
    Protocol,
    layout::{
        Counter, DirectFlow, DirectKey, Direction, Endpoint, EndpointKey, EndpointValue, Flow, FlowKey, List,
        MemberKey, ProgramError, ServiceCounts, ServiceKey, ServiceValue, flow_state,
    },
    packet::Tuple,
};

/// Addresses of one IP family.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// A host outside the cluster.
    pub client: IpAddr,
    /// Another host outside the cluster.
    pub other_client: IpAddr,
    /// An address of the node.
    pub node: IpAddr,
    /// A cluster IP.
    pub cluster_ip: IpAddr,
    /// An external IP of a Service.
    pub external_ip: IpAddr,
    /// A pod that is an endpoint.
    pub pod: IpAddr,
    /// Another such pod.
    pub other_pod: IpAddr,
    /// A router between them.
    pub router: IpAddr,
    /// The range of the pods: its address, and the length of its prefix of 128 bits.
    pub pods: (IpAddr, u32),
}

impl Addresses {
    /// IPv4 and IPv6.
    pub const BOTH: [Self; 2] = [
        Self {
            client: v4([192, 0, 2, 50]),
            other_client: v4([192, 0, 2, 51]),
            node: v4([192, 0, 2, 11]),
            cluster_ip: v4([10, 96, 0, 10]),
            external_ip: v4([198, 51, 100, 7]),
            pod: v4([10, 244, 1, 11]),
            other_pod: v4([10, 244, 2, 12]),
            router: v4([192, 0, 2, 1]),
            pods: (v4([10, 244, 0, 0]), 96 + 16),
        },
        Self {
            client: v6([0xfd57, 0, 0, 0x50]),
            other_client: v6([0xfd57, 0, 0, 0x51]),
            node: v6([0xfd57, 0, 0, 0x11]),
            cluster_ip: v6([0xfd96, 0, 0, 0x10]),
            external_ip: v6([0x2001, 0xdb8, 0x51, 7]),
            pod: v6([0xfd44, 1, 0, 0x11]),
            other_pod: v6([0xfd44, 2, 0, 0x12]),
            router: v6([0xfd57, 0, 0, 1]),
            pods: (v6([0xfd44, 0, 0, 0]), 16),
        },
    ];
}

const fn v4(octets: [u8; 4]) -> IpAddr {
    let [a, b, c, d] = octets;
    IpAddr::V4(std::net::Ipv4Addr::new(a, b, c, d))
}

const fn v6([a, b, c, h]: [u16; 4]) -> IpAddr {
    IpAddr::V6(std::net::Ipv6Addr::new(a, b, c, 0, 0, 0, 0, h))
}

/// A service port.
#[derive(Clone, Debug)]
pub struct Service {
    /// The protocol.
    pub protocol: Protocol,
    /// The value in the map `services`. The counts are computed from the endpoint lists.
    pub value: ServiceValue,
    /// The keys in the map `services`. A node port has the unspecified address.
    pub frontends: Vec<SocketAddr>,
    /// Endpoints for local clients.
    pub inside: Vec<SocketAddr>,
    /// Endpoints for all other clients.
    pub outside: Vec<SocketAddr>,
    /// Serving endpoints.
    pub serving: Vec<SocketAddr>,
}

impl Service {
    /// Returns the service port with these endpoints in all lists.
    #[must_use]
    pub fn with_endpoints(mut self, endpoints: &[SocketAddr]) -> Self {
        self.value.generation += 1;
        [self.inside, self.outside, self.serving] = [(); 3].map(|()| endpoints.to_vec());
        self
    }

    /// Returns the service port with these flags set.
    #[must_use]
    pub fn with_flags(mut self, flags: u16) -> Self {
        self.value.flags |= flags;
        self
    }

    /// Returns the service port with these endpoints for clients from outside.
    #[must_use]
    pub fn with_outside(mut self, endpoints: &[SocketAddr]) -> Self {
        self.outside = endpoints.to_vec();
        self
    }
}

/// The panic of a test that needs an older entry than the uptime of the kernel allows.
#[derive(Clone, Copy, Debug)]
pub struct UptimeTooShort {
    /// The age that the entry needs.
    pub seconds: u64,
}

/// A node.
pub struct TestNode<'a> {
    runner: &'a mut dyn FrameRunner,
    /// What [`TestNode::write_maps`] writes to the maps.
    pub config: ConfigMaps,
    /// The addresses that the tests use.
    pub ip: Addresses,
    services: u32,
}

impl<'a> TestNode<'a> {
    /// Returns a node without Services.
    pub fn new(runner: &'a mut dyn FrameRunner, ip: Addresses) -> Self {
        let mut config = ConfigMaps::default();
        config.node_addresses.insert(ip.node.into());
        runner.configure(&config);
        runner.set_state(&StateMaps::default());
        Self { runner, config, ip, services: 0 }
    }

    /// Adds a service port with these endpoints for all clients.
    pub fn add_service(
        &mut self,
        protocol: Protocol,
        frontends: &[SocketAddr],
        endpoints: &[SocketAddr],
    ) -> Service {
        self.services += 1;
        let value = ServiceValue {
            service: self.services,
            generation: 0,
            inside_count: 0,
            outside_count: 0,
            affinity_seconds: 0,
            inside_list: List::Cluster as u8,
            outside_list: List::Local as u8,
            flags: 0,
        };
        let frontends = frontends.to_vec();
        let [inside, outside, serving] = [(); 3].map(|()| Vec::new());
        let service = Service { protocol, value, frontends, inside, outside, serving };
        let service = service.with_endpoints(endpoints);
        self.put_service(&service);
        service
    }

    /// Adds or replaces a service port.
    pub fn put_service(&mut self, service: &Service) {
        self.remove_from_config(service);
        let Service { protocol, value, frontends, inside, outside, serving } = service;
        let lists = [
            (value.inside_list.into(), inside),
            (value.outside_list.into(), outside),
            (List::Serving.number(), serving),
        ];
        for (list, endpoints) in lists {
            for (slot, address) in (0..).zip(endpoints) {
                let (service, endpoint) = (value.service, Endpoint::from(*address));
                let value = EndpointValue { endpoint, generation: value.generation };
                self.config.endpoints.insert(EndpointKey { service, list, slot }, value);
                self.config.members.insert(MemberKey { service, list, endpoint });
            }
        }
        let count = |endpoints: &Vec<_>| u32::try_from(endpoints.len()).expect("few");
        let value = ServiceValue { inside_count: count(inside), outside_count: count(outside), ..*value };
        for address in frontends {
            let key = ServiceKey::new(address.ip().into(), address.port(), *protocol);
            self.config.services.insert(key, value);
        }
        self.write_maps();
    }

    /// Removes a service port.
    pub fn remove_service(&mut self, service: &Service) {
        self.remove_from_config(service);
        self.write_maps();
    }

    fn remove_from_config(&mut self, service: &Service) {
        let number = service.value.service;
        self.config.services.retain(|_, value| value.service != number);
        self.config.endpoints.retain(|key, _| key.service != number);
        self.config.members.retain(|key| key.service != number);
    }

    /// Writes [`TestNode::config`] to the maps.
    pub fn write_maps(&mut self) {
        self.runner.configure(&self.config);
    }

    /// Runs the XDP hook over a packet.
    #[track_caller]
    pub fn xdp(&mut self, packet: &TestPacket) -> FrameResult {
        self.run(Hook::Xdp, &InputFrame::new(packet.to_frame())).expect("a plain frame always runs")
    }

    /// Runs the ingress hook over a packet.
    #[track_caller]
    pub fn ingress(&mut self, packet: &TestPacket) -> FrameResult {
        self.run(Hook::Ingress, &InputFrame::new(packet.to_frame())).expect("a plain frame always runs")
    }

    /// Runs the egress hook over a packet.
    #[track_caller]
    pub fn egress(&mut self, packet: &TestPacket) -> FrameResult {
        self.run(Hook::Egress, &InputFrame::new(packet.to_frame())).expect("a plain frame always runs")
    }

    /// Runs a hook over a frame. Returns `None` if it cannot run over such a frame here.
    pub fn run(&mut self, hook: Hook, input: &InputFrame) -> Option<FrameResult> {
        self.runner.run(hook, input)
    }

    /// Makes all entries that programs wrote older. Panics with [`UptimeTooShort`] if the kernel is
    /// not up for that long.
    pub fn wait(&mut self, seconds: u64) {
        match self.runner.state().aged(seconds) {
            Some(state) => self.runner.set_state(&state),
            None => panic_any(UptimeTooShort { seconds }),
        }
    }

    /// Returns the flow entry of a packet of this direction.
    pub fn flow(&mut self, direction: Direction, packet: &TestPacket) -> Option<Flow> {
        self.runner.state().flow(&key(direction, packet)).copied()
    }

    /// Puts a direction of a flow on the direct path.
    pub fn set_direct_flow(&mut self, key: DirectKey, flow: DirectFlow) {
        let mut state = self.runner.state();
        state.direct_flows.insert(key, flow);
        self.runner.set_state(&state);
    }

    /// Returns the content of the maps that programs write.
    pub fn state(&mut self) -> StateMaps {
        self.runner.state()
    }

    /// Replaces what [`Self::state`] returns.
    pub fn set_state(&mut self, state: &StateMaps) {
        self.runner.set_state(state);
    }

    /// Changes all entries of the direct path.
    pub fn change_direct_flows(&mut self, change: impl Fn(&mut DirectFlow)) {
        let mut state = self.runner.state();
        state.direct_flows.values_mut().for_each(change);
        self.runner.set_state(&state);
    }

    /// Returns the number of flow entries. A flow has two.
    pub fn flow_count(&mut self) -> usize {
        self.runner.state().all_flows().count()
    }

    /// Returns the number of entries of assured flows.
    pub fn assured_flow_count(&mut self) -> usize {
        self.runner.state().flows.len()
    }

    /// Evicts the flow entry of a packet of this direction, as a full LRU map does.
    #[track_caller]
    pub fn evict_flow(&mut self, direction: Direction, packet: &TestPacket) {
        let mut state = self.runner.state();
        assert!(state.remove_flow(&key(direction, packet)), "{state:?}");
        self.runner.set_state(&state);
    }

    /// Holds the flow of a client's packet, as userspace does for a handover.
    #[track_caller]
    pub fn hold_flow(&mut self, packet: &TestPacket) {
        self.set_flow_state(packet, flow_state::HELD);
    }

    /// Leaves the connection of a packet of the original direction to conntrack, as userspace does.
    pub fn pass_flow(&mut self, packet: &TestPacket) {
        self.set_flow_state(packet, flow_state::PASS);
    }

    /// Leaves replies to a masqueraded flow to conntrack, as userspace does.
    pub fn pass_masquerade_reply(&mut self, packet: &TestPacket) {
        self.set_state_of(Direction::MasqueradeReply, packet, flow_state::PASS);
    }

    fn set_flow_state(&mut self, packet: &TestPacket, bits: u32) {
        self.set_state_of(Direction::Original, packet, bits);
    }

    fn set_state_of(&mut self, direction: Direction, packet: &TestPacket, bits: u32) {
        let mut state = self.runner.state();
        let flow = state.flow_mut(&key(direction, packet)).expect("a flow");
        flow.state |= bits;
        self.runner.set_state(&state);
    }

    /// Returns a counter. It counts from the start, or from the last [`TestNode::wait`],
    /// [`TestNode::evict_flow`] or [`TestNode::hold_flow`].
    pub fn counter(&mut self, counter: Counter) -> u64 {
        self.runner.state().counters[counter as usize]
    }

    /// Returns the counts of a service port, by its identifier. They count from the same moment.
    pub fn service_counts(&mut self, service: u32) -> ServiceCounts {
        self.runner.state().services.get(&service).copied().unwrap_or(ServiceCounts::NONE)
    }

    /// Returns the number of errors of this kind. They count from the same moment.
    pub fn errors(&mut self, error: ProgramError) -> u64 {
        self.runner.state().errors[error as usize]
    }
}

fn key(direction: Direction, packet: &TestPacket) -> FlowKey {
    let tuple = Tuple { source: packet.from.into(), destination: packet.to.into() };
    let protocol = Protocol::from_number(packet.protocol()).expect("the protocol of a flow");
    FlowKey::new(direction, protocol, tuple)
}
