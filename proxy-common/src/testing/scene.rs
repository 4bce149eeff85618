//! A node with a Service or two, addresses of one family to speak of, and frames that pass.

use std::{
    net::{IpAddr, SocketAddr},
    panic::panic_any,
    vec::Vec,
};

use super::{Bed, Given, Hook, Noted, Ran, Sent, World};
use crate::{
    Protocol,
    layout::{
        Counter, Direction, Endpoint, EndpointKey, Flow, FlowKey, List, MemberKey, ProgramError,
        ServiceCounts, ServiceKey, ServiceValue, flow_state,
    },
    packet::Tuple,
};

/// Addresses of one family.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// A host outside.
    pub client: IpAddr,
    /// Another.
    pub other_client: IpAddr,
    /// An address of the node.
    pub node: IpAddr,
    /// A Service's.
    pub cluster_ip: IpAddr,
    /// A Service's outside the cluster.
    pub external_ip: IpAddr,
    /// A pod that is an endpoint.
    pub pod: IpAddr,
    /// Another.
    pub other_pod: IpAddr,
    /// Between them.
    pub router: IpAddr,
    /// Where pods are, and the length of that prefix, of 128 bits.
    pub pods: (IpAddr, u32),
}

impl Places {
    /// Both families.
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

/// A service port as the maps have it.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its protocol.
    pub proto: Protocol,
    /// What it is to a program.
    pub value: ServiceValue,
    /// Its VIPs; for node ports the unspecified address.
    pub vip: Vec<SocketAddr>,
    /// Endpoints for local callers.
    pub inside: Vec<SocketAddr>,
    /// Endpoints for all others.
    pub outside: Vec<SocketAddr>,
    /// Endpoints that still serve.
    pub serving: Vec<SocketAddr>,
}

impl Service {
    /// The service port with other endpoints, for all callers.
    #[must_use]
    pub fn moved_to(mut self, endpoints: &[SocketAddr]) -> Self {
        self.value.generation += 1;
        [self.inside, self.outside, self.serving] = [(); 3].map(|()| endpoints.to_vec());
        self
    }

    /// The service port with these flags.
    #[must_use]
    pub fn flagged(mut self, flags: u16) -> Self {
        self.value.flags |= flags;
        self
    }

    /// The service port with endpoints of their own for callers from outside.
    #[must_use]
    pub fn with_outside(mut self, endpoints: &[SocketAddr]) -> Self {
        self.outside = endpoints.to_vec();
        self
    }
}

/// The clock of this bed's kernel began less than so long ago, so that nothing can be that old.
#[derive(Clone, Copy, Debug)]
pub struct TooYoung {
    /// How old something had to be.
    pub seconds: u64,
}

/// A node, and a bed that plays it.
pub struct Scene<'a> {
    bed: &'a mut dyn Bed,
    /// What its maps hold; [`Scene::configure`] puts it there.
    pub world: World,
    /// Addresses to speak of.
    pub at: Places,
    services: u32,
}

impl<'a> Scene<'a> {
    /// A node without Services.
    pub fn new(bed: &'a mut dyn Bed, at: Places) -> Self {
        let mut world = World::default();
        world.node_addresses.insert(at.node.into());
        bed.configure(&world);
        bed.set_noted(&Noted::default());
        Self { bed, world, at, services: 0 }
    }

    /// A service port with these endpoints for all callers, known to the programs.
    pub fn serve(&mut self, proto: Protocol, vip: &[SocketAddr], endpoints: &[SocketAddr]) -> Service {
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
        let [inside, outside, serving] = [(); 3].map(|()| Vec::new());
        let service = Service { proto, value, vip: vip.to_vec(), inside, outside, serving };
        let service = service.moved_to(endpoints);
        self.put(&service);
        service
    }

    /// Puts a service port into the maps as it now is.
    pub fn put(&mut self, service: &Service) {
        self.withdraw(service);
        let Service { proto, value, vip, inside, outside, serving } = service;
        let lists = [
            (value.inside_list.into(), inside),
            (value.outside_list.into(), outside),
            (List::Serving.number(), serving),
        ];
        for (list, endpoints) in lists {
            for (slot, endpoint) in (0..).zip(endpoints) {
                let (service, endpoint) = (value.service, at(*endpoint));
                let generation = value.generation;
                self.world.endpoints.insert(EndpointKey { service, generation, slot, list }, endpoint);
                self.world.members.insert(MemberKey { service, list, endpoint });
            }
        }
        let count = |endpoints: &Vec<_>| u32::try_from(endpoints.len()).expect("few");
        let value = ServiceValue { inside_count: count(inside), outside_count: count(outside), ..*value };
        for address in vip {
            self.world.services.insert(ServiceKey::new(address.ip().into(), address.port(), *proto), value);
        }
        self.configure();
    }

    /// Takes a service port out of the maps.
    pub fn remove(&mut self, service: &Service) {
        self.withdraw(service);
        self.configure();
    }

    fn withdraw(&mut self, service: &Service) {
        let number = service.value.service;
        self.world.services.retain(|_, value| value.service != number);
        self.world.endpoints.retain(|key, _| key.service != number);
        self.world.members.retain(|key| key.service != number);
    }

    /// Puts what the maps should hold into them.
    pub fn configure(&mut self) {
        self.bed.configure(&self.world);
    }

    /// A frame comes in.
    #[track_caller]
    pub fn enters(&mut self, sent: &Sent) -> Ran {
        self.passes(Hook::Ingress, &Given::new(sent.bytes())).expect("anything can be given plain")
    }

    /// A frame leaves.
    #[track_caller]
    pub fn leaves(&mut self, sent: &Sent) -> Ran {
        self.passes(Hook::Egress, &Given::new(sent.bytes())).expect("anything can be given plain")
    }

    /// A frame passes, if this bed can be given it.
    pub fn passes(&mut self, hook: Hook, given: &Given) -> Option<Ran> {
        self.bed.run(hook, given)
    }

    /// Time passes: what was noted gets older. Panics with [`TooYoung`] where the machine was not up long enough for that.
    pub fn wait(&mut self, seconds: u64) {
        match self.bed.noted().aged(seconds) {
            Some(noted) => self.bed.set_noted(&noted),
            None => panic_any(TooYoung { seconds }),
        }
    }

    /// What the programs noted of packets of a direction.
    pub fn flow(&mut self, direction: Direction, sent: &Sent) -> Option<Flow> {
        self.bed.noted().flows.get(&key(direction, sent)).copied()
    }

    /// How many entries there are for flows.
    pub fn flows(&mut self) -> usize {
        self.bed.noted().flows.len()
    }

    /// A full map forgets a flow's entry for packets of a direction.
    #[track_caller]
    pub fn forget(&mut self, direction: Direction, sent: &Sent) {
        let mut noted = self.bed.noted();
        assert!(noted.flows.remove(&key(direction, sent)).is_some(), "{noted:?}");
        self.bed.set_noted(&noted);
    }

    /// Userspace keeps back what comes in of a flow.
    #[track_caller]
    pub fn hold(&mut self, sent: &Sent) {
        let mut noted = self.bed.noted();
        let flow = noted.flows.get_mut(&key(Direction::Original, sent)).expect("a flow");
        flow.state |= flow_state::HELD;
        self.bed.set_noted(&noted);
    }

    /// What was counted since the start, or since [`Scene::wait`] or [`Scene::forget`].
    pub fn count(&mut self, counter: Counter) -> u64 {
        self.bed.noted().counters[counter as usize]
    }

    /// The same of a Service, by its identifier.
    pub fn counts_of(&mut self, service: u32) -> ServiceCounts {
        self.bed.noted().services.get(&service).copied().unwrap_or(ServiceCounts::NONE)
    }

    /// How often something went wrong since.
    pub fn errors(&mut self, error: ProgramError) -> u64 {
        self.bed.noted().errors[error as usize]
    }
}

/// An address and port as maps hold them.
pub(super) fn at(address: SocketAddr) -> Endpoint {
    Endpoint::new(address.ip().into(), address.port())
}

fn key(direction: Direction, sent: &Sent) -> FlowKey {
    let tuple = Tuple { source: at(sent.from), destination: at(sent.to) };
    let protocol = Protocol::from_number(sent.proto()).expect("the protocol of a flow");
    FlowKey::new(direction, protocol, tuple)
}
