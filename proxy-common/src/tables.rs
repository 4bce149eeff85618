//! The maps behind a trait, so that the same code runs in the kernel and in tests.

use crate::{
    Addr,
    flow::PortUse,
    layout::{
        AffinityKey, AffinityValue, Counter, DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4, DirectPath,
        DirectWatch, DsrKey, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey, FragmentValue, MaglevKey,
        MemberKey, NodeValue, ProgramError, ServiceEvent, ServiceKey, ServiceValue, XdpLinkValue,
    },
    link::direct::DirectProgress,
    packet::{Route, RoutedPacket, TcpFlags},
    prefilter::PrefilterItem,
};

/// The maps, a clock and random numbers. A write may fail if the kernel has no memory at that
/// moment.
pub trait Tables {
    /// Returns the bits of each item that the prefilter does not have: 0 if it has the item, or
    /// with a false positive.
    fn prefilter_missing_bits<const N: usize>(&self, items: [PrefilterItem; N]) -> [u64; N];
    /// Returns true if the prefilter has one of the items, or with a false positive.
    #[inline(always)]
    fn prefilter_may_contain_any<const N: usize>(&self, items: [PrefilterItem; N]) -> bool {
        // Unlike `any`, this becomes no loop over items in memory, which programs would need
        // stack for.
        self.prefilter_missing_bits(items).contains(&0)
    }
    /// Does the same with one item.
    #[inline(always)]
    fn prefilter_may_contain(&self, item: PrefilterItem) -> bool {
        self.prefilter_may_contain_any([item])
    }
    /// Looks up a destination.
    fn service(&self, key: &ServiceKey) -> Option<ServiceValue>;
    /// Looks up the endpoint in a slot.
    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint>;
    /// Looks up an entry of a page of a Maglev table.
    fn maglev_slot(&self, key: &MaglevKey, entry: u32) -> Option<u16>;
    /// Returns true if an endpoint is in a list.
    fn is_member(&self, key: &MemberKey) -> bool;
    /// Returns true if node ports are served on an address.
    fn is_node_address(&self, address: &Addr) -> bool;
    /// Returns true if a source is in the source ranges of a service.
    fn in_source_ranges(&self, service: u32, address: Addr) -> bool;
    /// Returns true if a source is local, for
    /// [`LocalDetection::Source`](crate::layout::LocalDetection).
    fn is_local_source(&self, address: Addr) -> bool;
    /// Returns true if a link is local, for
    /// [`LocalDetection::Link`](crate::layout::LocalDetection).
    fn is_local_link(&self, link: u32) -> bool;
    /// Returns true for the address of a pod in one of the network namespaces that the socket
    /// programs leave alone ([`SocketScope`](crate::layout::SocketScope)), or left alone.
    fn is_exempt_source(&self, address: &Addr) -> bool;
    /// Returns the address of this node with which packets to an endpoint leave on a link.
    fn masquerade_address(&self, link: u32, endpoint: &Addr) -> Option<Addr>;
    /// Returns the UDP port of the tunnel to other nodes, in host byte order; 0 if this node has
    /// none. It is a constant of a program.
    fn tunnel_port(&self) -> u16;
    /// Returns true if this node has a tunnel to other nodes.
    #[inline(always)]
    fn has_tunnel(&self) -> bool {
        self.tunnel_port() != 0
    }
    /// Looks up the node of an endpoint, by the address at which it takes packets of the tunnel.
    fn dsr_node(&self, key: &DsrKey) -> Option<Addr>;
    /// Looks up the node to which replies go back through the tunnel, by the key of the original
    /// direction. Flows that are assured and those that are not have a map each.
    fn dsr_return(&self, key: &FlowKey, is_assured: bool) -> Option<Addr>;
    /// Writes that node. If that fails, replies are routed to the client.
    fn set_dsr_return(&self, key: &FlowKey, node: &Addr, is_assured: bool);
    /// Removes that node from both maps.
    fn remove_dsr_return(&self, key: &FlowKey);
    /// Returns true for the address of a node whose packets of the tunnel are taken.
    fn is_dsr_node(&self, address: &Addr) -> bool;
    /// Returns true for any address of such a node.
    fn is_of_dsr_node(&self, address: &Addr) -> bool;
    /// Returns the facts about the node.
    fn node(&self) -> Option<NodeValue>;

    /// Looks up the last endpoint of a client.
    fn affinity(&self, key: &AffinityKey) -> Option<AffinityValue>;
    /// Writes the last endpoint of a client. If that fails, its next connection may get another
    /// endpoint.
    fn set_affinity(&self, key: &AffinityKey, value: &AffinityValue);

    /// Looks up one direction of a flow, among the assured flows first. The functions below write
    /// the map that [`Flow::is_assured`] of their argument names.
    fn flow(&self, key: &FlowKey) -> Option<Flow>;
    /// Like [`Self::flow`], but returns only what the choice of a source port needs.
    fn port_use(&self, key: &FlowKey) -> Option<PortUse>;
    /// Looks up the reply direction of a flow, and notes the acknowledgement number of a segment
    /// with these flags.
    fn answered_flow(&self, key: &FlowKey, tcp: TcpFlags, acknowledged: u32) -> Option<Flow>;
    /// Does the same, and sets the bits that `observe` returns for the entry. If one is new, or
    /// the time of the entry is old ([`Flow::is_changed_by`](crate::layout::Flow)), sets the time
    /// too. `flow` becomes the entry as it was before that. Returns false if there is no entry, or
    /// if `observe` returned `None`.
    fn observed_flow(
        &self,
        key: &FlowKey,
        answer: (TcpFlags, u32),
        now_ns: u64,
        observe: impl FnOnce(&Flow) -> Option<u32>,
        flow: &mut Flow,
    ) -> bool;
    /// Inserts or replaces one direction of a flow. Returns true if that succeeded.
    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Inserts one direction of a flow that is not assured, unless either map has an entry. Returns
    /// true if it was inserted.
    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Moves one direction of a flow from the unassured flows to the assured ones, unless an entry
    /// is there. Returns true if it was moved.
    fn assure_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Writes [`Flow::acknowledged`] of one direction of a flow that is not assured.
    fn set_acknowledged(&self, key: &FlowKey, acknowledged: u32);
    /// Updates state ([`flow_state::after`](crate::layout::flow_state::after)) and time of one
    /// direction of a flow, unless the entry has other addresses after translation. Returns true if
    /// the entry exists.
    fn touch_flow(&self, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) -> bool;
    /// Overwrites one direction of a flow that has the same addresses after translation. Returns
    /// true if it exists. The kernel neither allocates nor frees memory.
    fn reuse_flow(&self, key: &FlowKey, flow: &Flow) -> bool;
    /// Removes one direction of a flow from both maps.
    fn remove_flow(&self, key: &FlowKey);

    /// Returns true if flows that come in on a link may take the direct path.
    fn is_direct_link(&self, link: u32) -> bool;
    /// Returns true if translated packets that leave on a link may be handed to its peer.
    fn is_peer_link(&self, link: u32) -> bool;
    /// Returns true if an entry of the direct path with this key was written, and none since for
    /// another flow with the same place in `direct_hints`.
    fn has_direct_hint(&self, key: &DirectKeyV4) -> bool;
    /// Returns what userspace knows of changes that end the direct path.
    fn direct_watch(&self) -> Option<DirectWatch>;
    /// Looks up the route of a packet of a whole flow that comes in on a link. Returns false if
    /// this CPU remembers none ([`KnownRoute::is_usable`](crate::layout::KnownRoute::is_usable)).
    fn known_route(&self, packet: &RoutedPacket<'_>, link: u32, now_ns: u64, route: &mut Route) -> bool;
    /// Remembers the route that the kernel has found for a packet.
    fn remember_route(&self, packet: &RoutedPacket<'_>, link: u32, route: &Route, to_peer: bool);
    /// Returns what is known of a link with an XDP program.
    fn xdp_link(&self, link: u32) -> Option<XdpLinkValue>;
    /// Looks up a direction of a flow on the direct path, and notes the acknowledgement number of a
    /// segment with these flags.
    fn direct_flow(&self, key: &DirectKey, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlow>;
    /// Does the same for IPv4.
    fn direct_flow_v4(&self, key: &DirectKeyV4, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlowV4>;
    /// Looks up what is known of such a direction, without a change. With `ends`, source and
    /// destination of packets as they leave, an entry that has others does not count: it is of an
    /// earlier connection. Ports are not compared.
    fn direct_progress(&self, key: &DirectKey, ends: Option<[&Addr; 2]>) -> DirectProgress;
    /// Inserts or replaces a direction of a flow on the direct path, whose packets leave with these
    /// addresses.
    fn put_direct_flow(&self, key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath);
    /// Removes a direction of a flow from the direct path.
    fn remove_direct_flow(&self, key: &DirectKey);
    /// Asks userspace to approve a connection. Returns false if there is no room for the request.
    fn request_direct(&self, key: &DirectKey) -> bool;

    /// Looks up the translation of the first fragment of a datagram.
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue>;
    /// Writes the translation of a first fragment. If that fails, the later fragments are lost.
    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue);
    /// Removes the translation of a first fragment.
    fn remove_fragment(&self, key: &FragmentKey);

    /// Returns true if one more ICMP error may be sent. The number of each second is limited, as
    /// the kernel limits its own (`net.ipv4.icmp_msgs_per_sec`).
    fn may_send_error(&self) -> bool;

    /// Increments a counter.
    fn count(&self, counter: Counter);
    /// Counts an event of a service, by its identifier.
    fn count_service(&self, service: u32, event: ServiceEvent);
    /// Counts an error, and logs it if that is on.
    fn count_error(&self, error: ProgramError);
    /// Traces a packet of a flow on the link with this index, if tracing is on.
    fn trace(&self, verdict: Counter, link: u32, key: &FlowKey, flow: &Flow);
    /// Returns the nanoseconds of the monotonic clock.
    fn now_ns(&self) -> u64;
    /// Returns 32 random bits.
    fn random(&self) -> u32;
}
