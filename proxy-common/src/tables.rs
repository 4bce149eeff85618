//! What packet decisions ask and note: the maps, behind a trait, so that the same decisions run in the kernel and in tests.

use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey,
        FragmentValue, MemberKey, NodeValue, ProgramError, ServiceEvent, ServiceKey, ServiceValue,
    },
    prefilter::PrefilterBit,
};

/// The maps, a clock and chance. Writes may fail when the kernel has no memory at that moment; what then is lost is said at
/// each.
pub trait Tables {
    /// Whether an address and port may be, or have been, those of a Service or an endpoint.
    fn prefilter_may_contain(&self, bit: PrefilterBit) -> bool;
    /// The Service a destination belongs to.
    fn service(&self, key: &ServiceKey) -> Option<ServiceValue>;
    /// The endpoint in a slot.
    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint>;
    /// Whether an endpoint is in a list.
    fn is_member(&self, key: &MemberKey) -> bool;
    /// Whether node ports are served on an address.
    fn is_node_address(&self, address: &Addr) -> bool;
    /// Whether a source is in a Service's ranges.
    fn in_source_ranges(&self, service: u32, address: Addr) -> bool;
    /// Whether a source counts as local, where local detection goes by sources.
    fn is_local_source(&self, address: Addr) -> bool;
    /// Whether what comes in on a link counts as local, where local detection goes by links.
    fn is_local_link(&self, link: u32) -> bool;
    /// What is known of the node.
    fn node(&self) -> Option<NodeValue>;

    /// Where a client went last.
    fn affinity(&self, key: &AffinityKey) -> Option<AffinityValue>;
    /// Remembers where a client went. Failing, it may go elsewhere next time.
    fn set_affinity(&self, key: &AffinityKey, value: &AffinityValue);

    /// One direction of a flow.
    fn flow(&self, key: &FlowKey) -> Option<Flow>;
    /// Notes one direction of a flow, in place of any other; whether that worked.
    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Notes one direction of a flow if there is none; whether that is so.
    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Notes what a packet says of one direction's state ([`flow_state::after`](crate::layout::flow_state::after)), and the time;
    /// whether there is one.
    fn touch_flow(&self, key: &FlowKey, observed: u32, now_ns: u64) -> bool;
    /// Puts a flow in the place of one direction of one that translated packets likewise; whether there was one. No memory is taken
    /// and none given back.
    fn reuse_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Forgets one direction of a flow.
    fn remove_flow(&self, key: &FlowKey);

    /// What became of a datagram's first fragment.
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue>;
    /// Notes what became of a first fragment. Failing, those that follow get lost.
    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue);
    /// Forgets what became of a first fragment.
    fn remove_fragment(&self, key: &FragmentKey);

    /// Counts one.
    fn count(&self, counter: Counter);
    /// Counts something of a Service port, by its identifier.
    fn count_service(&self, service: u32, event: ServiceEvent);
    /// Counts something that went wrong, and tells of it where that is asked for.
    fn count_error(&self, error: ProgramError);
    /// Traces a packet of a flow, if tracing is on.
    fn trace(&self, verdict: Counter, key: &FlowKey, flow: &Flow);
    /// Nanoseconds of the monotonic clock.
    fn now_ns(&self) -> u64;
    /// 32 random bits.
    fn random(&self) -> u32;
}
