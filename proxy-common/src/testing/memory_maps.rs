//! The maps in memory, with a clock and random numbers that tests set.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    vec::Vec,
};

use super::{ConfigMaps, FrameResult, FrameRunner, Hook, InputFrame, MemoryFrame, StateMaps, TUNNEL_PORT};
use crate::{
    Addr,
    flow::PortUse,
    layout::{
        AffinityKey, AffinityValue, Counter, DirectFlow, DirectFlowV4, DirectHint, DirectKey, DirectKeyV4,
        DirectPath, DirectWatch, DsrKey, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey, FragmentValue,
        KnownRoute, MaglevKey, MemberKey, NodeValue, ProgramError, ServiceCounts, ServiceEvent, ServiceKey,
        ServiceValue, SocketScope, XdpLinkValue, flow_state,
    },
    link::{self, Outcome, direct::DirectProgress},
    packet::{Frame as _, Route, RoutedPacket, TcpFlags},
    prefilter::PrefilterItem,
    tables::Tables,
};

/// The maps in memory. A write never fails.
#[derive(Clone, Debug)]
pub struct MemoryMaps {
    /// The maps that userspace writes.
    pub config: ConfigMaps,
    /// The maps that programs write.
    pub state: RefCell<StateMaps>,
    /// The clock, in nanoseconds.
    pub now_ns: Cell<u64>,
    /// The next random number.
    pub random: Cell<u32>,
    /// What is added to the random number after each use.
    pub random_step: u32,
    /// What makes random numbers of this sequence.
    pub random_of: fn(u32) -> u32,
    /// The routes that a CPU remembers, by their places.
    pub routes: RefCell<BTreeMap<u32, KnownRoute>>,
    /// `direct_hints`.
    pub direct_hints: RefCell<BTreeMap<u32, u32>>,
    /// What the programs asked userspace.
    pub direct_requests: RefCell<Vec<DirectKey>>,
    /// What another CPU does when the next random number is used. It runs once.
    pub on_random: Cell<Option<fn(&Self)>>,
}

/// The initial clock. Tests can make entries days older.
const START_NS: u64 = 10 * 86_400 * 1_000_000_000;

impl Default for MemoryMaps {
    fn default() -> Self {
        Self {
            config: ConfigMaps::default(),
            state: RefCell::default(),
            now_ns: Cell::new(START_NS),
            random: Cell::new(0),
            random_step: 0x9e37_79b9,
            random_of: |number| number,
            routes: RefCell::default(),
            direct_hints: RefCell::default(),
            direct_requests: RefCell::default(),
            on_random: Cell::new(None),
        }
    }
}

impl MemoryMaps {
    /// Approves what the programs asked userspace. The direct flows count until this time. Returns
    /// false if one of them is gone.
    #[cfg(test)]
    pub(crate) fn approve_direct_flows(&self, until_ns: u64) -> bool {
        let mut state = self.state.borrow_mut();
        let mut approve = |key: DirectKey| {
            let flow = state.direct_flows.get_mut(&key)?;
            flow.path.flags |= crate::layout::direct_flags::APPROVED;
            flow.path.until_ns = until_ns;
            Some(())
        };
        self.direct_requests.borrow_mut().drain(..).filter(|key| approve(*key).is_none()).count() == 0
    }
}

impl FrameRunner for MemoryMaps {
    fn configure(&mut self, config: &ConfigMaps) {
        self.config = config.clone();
    }

    fn state(&mut self) -> StateMaps {
        self.state.borrow().clone()
    }

    fn set_state(&mut self, state: &StateMaps) {
        *self.state.borrow_mut() = state.clone().without_counts();
    }

    fn run(&mut self, hook: Hook, input: &InputFrame) -> Option<FrameResult> {
        if hook == Hook::Tunnel {
            let frame = MemoryFrame::<true>::new(input);
            let outcome = match frame.ip() {
                Some((header, version)) => link::tunneled(&frame, self, header, version),
                None => Outcome::Proceed,
            };
            return Some(result(input, frame, outcome));
        }
        let frame = MemoryFrame::<false>::new(input);
        let is_ours = hook == Hook::Egress || frame.is_for_this_host();
        let outcome = match (frame.ip().filter(|_| is_ours), hook) {
            (None, _) | (_, Hook::Tunnel) => Outcome::Proceed,
            (Some((header, version)), Hook::Xdp) => link::direct::early(&frame, self, header, version),
            (Some((header, version)), Hook::Ingress) => link::ingress(&frame, self, header, version),
            (Some((header, version)), Hook::Egress) => link::egress(&frame, self, header, version),
        };
        assert!(
            outcome == Outcome::Drop || frame.is_hardware_sum_correct(),
            "the sum of the hardware is wrong: {input:?}"
        );
        Some(result(input, frame, outcome))
    }
}

fn result<const TUNNELED: bool>(
    input: &InputFrame,
    frame: MemoryFrame<TUNNELED>,
    outcome: Outcome,
) -> FrameResult {
    FrameResult {
        input: input.clone(),
        mark: frame.mark(),
        note: frame.note_left(),
        redirected_to: frame.redirected_to(),
        is_for_peer: frame.is_for_peer(),
        is_headed_by_kernel: frame.is_headed_by_kernel(),
        tunneled_to: frame.tunneled_to(),
        bytes: frame.into_bytes(),
        outcome,
    }
}

impl Tables for MemoryMaps {
    /// Has no false positives. It has removed Services and endpoints if their flows exist.
    fn prefilter_missing_bits<const N: usize>(&self, items: [PrefilterItem; N]) -> [u64; N] {
        let state = self.state.borrow();
        let has =
            |item| self.config.prefilter_items().chain(state.prefilter_items()).any(|other| other == item);
        items.map(|item| if has(item) { 0 } else { item.bits() })
    }

    fn service(&self, key: &ServiceKey) -> Option<ServiceValue> {
        self.config.services.get(key).copied()
    }

    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint> {
        self.config.endpoints.get(key).map(|value| value.endpoint)
    }

    fn maglev_slot(&self, key: &MaglevKey, entry: u32) -> Option<u16> {
        self.config.maglev.get(key)?.slots.get(entry as usize).copied()
    }

    fn is_member(&self, key: &MemberKey) -> bool {
        self.config.members.contains(key)
    }

    fn is_node_address(&self, address: &Addr) -> bool {
        self.config.node_addresses.contains(address)
    }

    fn in_source_ranges(&self, service: u32, address: Addr) -> bool {
        let ranges = self.config.source_ranges.iter();
        ranges.filter(|range| range.0 == service).any(|(_, range, length)| contains(range, *length, address))
    }

    fn is_local_source(&self, address: Addr) -> bool {
        self.config.local_sources.iter().any(|(range, length)| contains(range, *length, address))
    }

    fn is_exempt_source(&self, address: &Addr) -> bool {
        self.config.node.socket_scope != SocketScope::All as u16
            && self.config.exempt_sources.contains(address)
    }

    fn is_local_link(&self, link: u32) -> bool {
        self.config.local_links.contains(&link)
    }

    fn masquerade_address(&self, link: u32, endpoint: &Addr) -> Option<Addr> {
        let subnets = self.config.masquerade_addresses.iter();
        let matches =
            subnets.filter(|((of, subnet, length), _)| *of == link && contains(subnet, *length, *endpoint));
        let longest = matches.max_by_key(|((_, _, length), _)| *length);
        longest.map(|(_, address)| *address).filter(|address| address.is_v4() == endpoint.is_v4())
    }

    fn tunnel_port(&self) -> u16 {
        TUNNEL_PORT
    }

    fn dsr_node(&self, key: &DsrKey) -> Option<Addr> {
        self.config.dsr_endpoints.get(key).copied()
    }

    fn dsr_return(&self, key: &FlowKey, is_assured: bool) -> Option<Addr> {
        self.state.borrow_mut().dsr_returns(is_assured).get(key).copied()
    }

    fn set_dsr_return(&self, key: &FlowKey, node: &Addr, is_assured: bool) {
        self.state.borrow_mut().dsr_returns(is_assured).insert(*key, *node);
    }

    fn remove_dsr_return(&self, key: &FlowKey) {
        let mut state = self.state.borrow_mut();
        let _ = [true, false].map(|is_assured| state.dsr_returns(is_assured).remove(key));
    }

    fn is_dsr_node(&self, address: &Addr) -> bool {
        self.config.dsr_nodes.contains(address)
    }

    fn is_of_dsr_node(&self, address: &Addr) -> bool {
        self.is_dsr_node(address) || self.config.dsr_others.contains(address)
    }

    fn node(&self) -> Option<NodeValue> {
        Some(self.config.node)
    }

    fn affinity(&self, key: &AffinityKey) -> Option<AffinityValue> {
        self.state.borrow().affinity.get(key).copied()
    }

    fn set_affinity(&self, key: &AffinityKey, value: &AffinityValue) {
        self.state.borrow_mut().affinity.insert(*key, *value);
    }

    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        self.state.borrow().flow(key).copied()
    }

    fn port_use(&self, key: &FlowKey) -> Option<PortUse> {
        self.flow(key).map(|Flow { state, used_ns, .. }| PortUse { state, used_ns })
    }

    fn answered_flow(&self, key: &FlowKey, tcp: TcpFlags, acknowledged: u32) -> Option<Flow> {
        let mut state = self.state.borrow_mut();
        let flow = state.flow_mut(key)?;
        if tcp.has_ack() {
            flow.acknowledged = acknowledged;
        }
        Some(*flow)
    }

    fn observed_flow(
        &self,
        key: &FlowKey,
        (tcp, acknowledged): (TcpFlags, u32),
        now_ns: u64,
        observe: impl FnOnce(&Flow) -> Option<u32>,
        flow: &mut Flow,
    ) -> bool {
        let Some(before) = self.answered_flow(key, tcp, acknowledged) else { return false };
        *flow = before;
        let Some(observed) = observe(&before) else { return false };
        if before.is_changed_by(observed, now_ns)
            && let Some(entry) = self.state.borrow_mut().flow_mut(key)
        {
            (entry.state, entry.used_ns) = (before.state | observed, now_ns);
        }
        true
    }

    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.state.borrow_mut().flows_with(flow).insert(*key, *flow);
        true
    }

    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.flow(key).is_none() && self.put_flow(key, flow)
    }

    fn assure_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let mut state = self.state.borrow_mut();
        if state.flows.contains_key(key) {
            return false;
        }
        state.flows.insert(*key, *flow);
        state.unassured_flows.remove(key);
        true
    }

    fn set_acknowledged(&self, key: &FlowKey, acknowledged: u32) {
        let mut state = self.state.borrow_mut();
        state.unassured_flows.entry(*key).and_modify(|flow| flow.acknowledged = acknowledged);
    }

    fn touch_flow(&self, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) -> bool {
        let mut state = self.state.borrow_mut();
        let translated = flow.tuple();
        let Some(flow) = state.flows_with(flow).get_mut(key) else { return false };
        if flow.tuple() == translated {
            flow.state = flow_state::after(flow.state, observed);
            flow.used_ns = now_ns;
        }
        true
    }

    fn reuse_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let mut state = self.state.borrow_mut();
        let before = state.flows_with(flow).get_mut(key).filter(|before| before.tuple() == flow.tuple());
        before.map(|before| *before = *flow).is_some()
    }

    fn remove_flow(&self, key: &FlowKey) {
        self.state.borrow_mut().remove_flow(key);
    }

    fn is_direct_link(&self, link: u32) -> bool {
        self.config.direct_links.contains(&link)
    }

    fn is_peer_link(&self, link: u32) -> bool {
        self.config.peer_links.contains(&link)
    }

    fn has_direct_hint(&self, key: &DirectKeyV4) -> bool {
        let DirectHint { place, tag } = DirectHint::of(key);
        self.direct_hints.borrow().get(&place) == Some(&tag)
    }

    fn direct_watch(&self) -> Option<DirectWatch> {
        Some(self.config.direct_watch)
    }

    fn known_route(&self, packet: &RoutedPacket<'_>, link: u32, now_ns: u64, route: &mut Route) -> bool {
        let routes = self.routes.borrow();
        let watch = &self.config.direct_watch;
        let ports = watch.port_mask(now_ns);
        let usable = |known: &&KnownRoute| known.is_usable(packet, link, now_ns, (ports, watch.since_ns));
        let place = KnownRoute::place_of(packet, ports);
        let Some(known) = routes.get(&place).filter(usable) else { return false };
        known.give(route);
        true
    }

    fn remember_route(&self, packet: &RoutedPacket<'_>, link: u32, route: &Route, to_peer: bool) {
        let mut routes = self.routes.borrow_mut();
        let now_ns = self.now_ns.get();
        let place = KnownRoute::place_of(packet, self.config.direct_watch.port_mask(now_ns));
        routes.entry(place).or_insert(KnownRoute::NONE).set(packet, link, route, (to_peer, now_ns));
    }

    fn xdp_link(&self, link: u32) -> Option<XdpLinkValue> {
        self.config.xdp_links.get(&link).copied()
    }

    fn direct_flow(&self, key: &DirectKey, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlow> {
        let mut state = self.state.borrow_mut();
        let flow = state.direct_flows.get_mut(key)?;
        if tcp.has_ack() {
            flow.path.acknowledged = acknowledged;
        }
        Some(*flow)
    }

    fn direct_flow_v4(&self, key: &DirectKeyV4, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlowV4> {
        self.direct_flow(&(*key).into(), tcp, acknowledged).map(|flow| flow.v4())
    }

    fn direct_progress(&self, key: &DirectKey, ends: Option<[&Addr; 2]>) -> DirectProgress {
        let state = self.state.borrow();
        let leaves_so =
            |flow: &&DirectFlow| ends.is_none_or(|ends| ends == [&flow.source, &flow.destination]);
        let flow = state.direct_flows.get(key).filter(leaves_so);
        flow.map_or_else(DirectProgress::default, |flow| DirectProgress::of(&flow.path))
    }

    fn put_direct_flow(&self, key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath) {
        if let Some(key) = key.v4() {
            let DirectHint { place, tag } = DirectHint::of(&key);
            self.direct_hints.borrow_mut().insert(place, tag);
        }
        let flow = DirectFlow { source: *source, destination: *destination, path: *path };
        self.state.borrow_mut().direct_flows.insert(*key, flow);
    }

    fn remove_direct_flow(&self, key: &DirectKey) {
        self.state.borrow_mut().direct_flows.remove(key);
    }

    fn request_direct(&self, key: &DirectKey) -> bool {
        self.direct_requests.borrow_mut().push(*key);
        true
    }

    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue> {
        self.state.borrow().fragments.get(key).copied()
    }

    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue) {
        self.state.borrow_mut().fragments.insert(*key, *value);
    }

    fn remove_fragment(&self, key: &FragmentKey) {
        self.state.borrow_mut().fragments.remove(key);
    }

    fn may_send_error(&self) -> bool {
        true
    }

    fn count(&self, counter: Counter) {
        self.state.borrow_mut().counters[counter as usize] += 1;
    }

    fn count_service(&self, service: u32, event: ServiceEvent) {
        if service != 0 {
            self.state.borrow_mut().services.entry(service).or_insert(ServiceCounts::NONE).add(event);
        }
    }

    fn count_error(&self, error: ProgramError) {
        self.state.borrow_mut().errors[error as usize] += 1;
    }

    fn trace(&self, _: Counter, _: u32, _: &FlowKey, _: &Flow) {}

    fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    fn random(&self) -> u32 {
        if let Some(action) = self.on_random.take() {
            action(self);
        }
        (self.random_of)(self.random.replace(self.random.get().wrapping_add(self.random_step)))
    }
}

fn contains(range: &Addr, length: u32, address: Addr) -> bool {
    let [range, address] = [range.octets, address.octets].map(u128::from_be_bytes);
    length == 0 || (range ^ address) >> (Addr::BITS - length) == 0
}
