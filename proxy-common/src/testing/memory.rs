//! The maps in memory, with a clock and chance that tests set.

use std::cell::{Cell, RefCell};

use super::{Bed, Bytes, Given, Hook, Noted, Ran, World};
use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey,
        FragmentValue, MemberKey, NodeValue, ProgramError, ServiceCounts, ServiceKey, ServiceValue, Tally,
        flow_state,
    },
    link::{self, Outcome},
    packet::Frame as _,
    prefilter::PrefilterBit,
    tables::Tables,
};

/// The maps in memory. They take whatever is put in them.
#[derive(Clone, Debug)]
pub struct Memory {
    /// What userspace wrote.
    pub world: World,
    /// What the decisions noted.
    pub noted: RefCell<Noted>,
    /// The clock, in nanoseconds.
    pub now_ns: Cell<u64>,
    /// What chance says next.
    pub random: Cell<u32>,
    /// What it adds to that each time.
    pub random_step: u32,
    /// What another CPU does while chance is asked, once.
    pub meanwhile: Cell<Option<fn(&Self)>>,
}

/// Late enough that tests can look back for days.
const START_NS: u64 = 10 * 86_400 * 1_000_000_000;

impl Default for Memory {
    fn default() -> Self {
        Self {
            world: World::default(),
            noted: RefCell::default(),
            now_ns: Cell::new(START_NS),
            random: Cell::new(0),
            random_step: 0x9e37_79b9,
            meanwhile: Cell::new(None),
        }
    }
}

impl Bed for Memory {
    fn configure(&mut self, world: &World) {
        self.world = world.clone();
    }

    fn noted(&mut self) -> Noted {
        self.noted.borrow().clone()
    }

    fn set_noted(&mut self, noted: &Noted) {
        *self.noted.borrow_mut() = noted.clone().uncounted();
    }

    fn run(&mut self, hook: Hook, given: &Given) -> Option<Ran> {
        let frame = Bytes::new(given);
        let is_ours = hook == Hook::Egress || frame.is_for_this_host();
        let outcome = match (frame.ip().filter(|_| is_ours), hook) {
            (None, _) => Outcome::Proceed,
            (Some((header, version)), Hook::Ingress) => link::ingress(&frame, self, header, version),
            (Some((header, version)), Hook::Egress) => link::egress(&frame, self, header, version),
        };
        assert!(outcome == Outcome::Drop || frame.is_sum_right(), "the hardware's sum is off: {given:?}");
        let mark = frame.mark();
        Some(Ran { given: given.clone(), bytes: frame.into_bytes(), mark, outcome })
    }
}

impl Tables for Memory {
    /// As the kernel's bitmap, without its accidents; what Services and endpoints had that are gone is known by their flows.
    fn prefilter_may_contain(&self, bit: PrefilterBit) -> bool {
        self.world.prefilter_bits().chain(self.noted.borrow().prefilter_bits()).any(|other| other == bit)
    }

    fn service(&self, key: &ServiceKey) -> Option<ServiceValue> {
        self.world.services.get(key).copied()
    }

    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint> {
        self.world.endpoints.get(key).copied()
    }

    fn is_member(&self, key: &MemberKey) -> bool {
        self.world.members.contains(key)
    }

    fn is_node_address(&self, address: &Addr) -> bool {
        self.world.node_addresses.contains(address)
    }

    fn in_source_ranges(&self, service: u32, address: Addr) -> bool {
        let ranges = self.world.source_ranges.iter();
        ranges.filter(|range| range.0 == service).any(|(_, range, length)| holds(range, *length, address))
    }

    fn is_local_source(&self, address: Addr) -> bool {
        self.world.local_sources.iter().any(|(range, length)| holds(range, *length, address))
    }

    fn is_local_link(&self, link: u32) -> bool {
        self.world.local_links.contains(&link)
    }

    fn node(&self) -> Option<NodeValue> {
        Some(self.world.node)
    }

    fn affinity(&self, key: &AffinityKey) -> Option<AffinityValue> {
        self.noted.borrow().affinity.get(key).copied()
    }

    fn set_affinity(&self, key: &AffinityKey, value: &AffinityValue) {
        self.noted.borrow_mut().affinity.insert(*key, *value);
    }

    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        self.noted.borrow().flows.get(key).copied()
    }

    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.noted.borrow_mut().flows.insert(*key, *flow);
        true
    }

    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.flow(key).is_none() && self.put_flow(key, flow)
    }

    fn touch_flow(&self, key: &FlowKey, observed: u32, now_ns: u64) -> bool {
        let mut noted = self.noted.borrow_mut();
        let Some(flow) = noted.flows.get_mut(key) else { return false };
        flow.state = flow_state::after(flow.state, observed);
        flow.used_ns = now_ns;
        true
    }

    fn reopen_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let mut noted = self.noted.borrow_mut();
        let before = noted.flows.get_mut(key).filter(|before| before.tuple() == flow.tuple());
        before.map(|before| *before = *flow).is_some()
    }

    fn remove_flow(&self, key: &FlowKey) {
        self.noted.borrow_mut().flows.remove(key);
    }

    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue> {
        self.noted.borrow().fragments.get(key).copied()
    }

    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue) {
        self.noted.borrow_mut().fragments.insert(*key, *value);
    }

    fn remove_fragment(&self, key: &FragmentKey) {
        self.noted.borrow_mut().fragments.remove(key);
    }

    fn count(&self, counter: Counter) {
        self.noted.borrow_mut().counters[counter as usize] += 1;
    }

    fn tally(&self, service: u32, tally: Tally) {
        if service != 0 {
            self.noted.borrow_mut().services.entry(service).or_insert(ServiceCounts::NONE).add(tally);
        }
    }

    fn failed(&self, error: ProgramError) {
        self.noted.borrow_mut().errors[error as usize] += 1;
    }

    fn trace(&self, _: Counter, _: &FlowKey, _: &Flow) {}

    fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    fn random(&self) -> u32 {
        if let Some(meanwhile) = self.meanwhile.take() {
            meanwhile(self);
        }
        self.random.replace(self.random.get().wrapping_add(self.random_step))
    }
}

fn holds(range: &Addr, length: u32, address: Addr) -> bool {
    let [range, address] = [range.octets, address.octets].map(u128::from_be_bytes);
    length == 0 || (range ^ address) >> (Addr::BITS - length) == 0
}
