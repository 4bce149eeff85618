//! The maps of the eBPF programs. Functions copy values out of them, and nothing keeps a pointer
//! into a map.
#![expect(unsafe_code, reason = "only the verifier checks the pointers to map values")]

mod direct;
mod errors;
mod flows;
mod links;
mod records;
mod sockets;

use core::{hint::black_box, marker::PhantomData};

use aya_ebpf::{
    Global,
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, lpm_trie::Key},
    macros::btf_map,
};
use proxy_common::{
    Addr,
    flow::PortUse,
    for_each_map,
    layout::{
        AffinityKey, AffinityValue, Connection, Counter, DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4,
        DirectPath, DirectWatch, DsrAddress, DsrKey, Endpoint, EndpointKey, EndpointValue, Flow, FlowKey,
        FragmentKey, FragmentValue, HardwareAddress, KnownRoute, MaglevKey, MaglevPage, MasqueradeSubnet,
        MemberKey, NodeValue, Program, ProgramError, ProgramErrors, ServiceCounts, ServiceEvent, ServiceKey,
        ServiceValue, SocketPeer, SocketScope, SourceRange, UdpSocket, VlanKey, XdpLinkValue, service_slot,
    },
    link::direct::DirectProgress,
    packet::{Route, RoutedPacket, TcpFlags},
    prefilter::{PrefilterItem, PrefilterTable},
    tables::Tables,
};

use self::{flows::flows_with, links::dsr_address};
pub use self::{
    links::{bridge_of, is_vlan},
    records::{begin_capture, captures_packets, end_capture, write_event},
    sockets::*,
};
use crate::{ctx, trace};

/// Memory is allocated with each entry, so that large maps cost nothing while they are empty.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;
/// Userspace writes the map as memory.
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;

/// The number of entries of a map whose size is a setting. It does not matter, since userspace sets
/// the number from its configuration when it creates the map.
const PLACEHOLDER: usize = 1024;

/// Declares every map of the table.
macro_rules! declare_maps {
    ($($map:ident $name:tt $type:ident<$key:ty, $value:ty> $content:ident
        $(size $field:ident $(= $default:literal $setting:literal)?)? $(fixed $entries:expr)?;)*) => {$(
        #[btf_map(name = $name)]
        static $map: map_type!($type $key, $value, $($entries)?) =
            <map_type!($type $key, $value, $($entries)?)>::new();
    )*};
}

macro_rules! map_type {
    ($type:ident $key:ty, $value:ty,) => { map_type!($type $key, $value, PLACEHOLDER) };
    (HashMap $key:ty, $value:ty, $entries:expr) => { HashMap<$key, $value, { $entries }, NO_PREALLOC> };
    (LruHashMap $key:ty, $value:ty, $entries:expr) => { LruHashMap<$key, $value, { $entries }> };
    (LpmTrie $key:ty, $value:ty, $entries:expr) => { LpmTrie<$key, $value, { $entries }> };
    (Array $key:ty, $value:ty, $entries:expr) => { Array<$value, { $entries }> };
    (MmapableArray $key:ty, $value:ty, $entries:expr) => { Array<$value, { $entries }, MMAPABLE> };
    (PerCpuArray $key:ty, $value:ty, $entries:expr) => { PerCpuArray<$value, { $entries }> };
    (RingBuf $key:ty, $value:ty, $entries:expr) => { RingBuf<$value, { $entries }> };
    (SkStorage $key:ty, $value:ty, $entries:expr) => { SkStorage<$value> };
}

for_each_map!(declare_maps);

/// Userspace sets it to the hash of the object, its version and its constants. A process that finds
/// a program in the kernel with its own hash need not load the program. No `#[used]`, which would
/// put it into a map of its own, apart from the constants that the programs read.
#[unsafe(no_mangle)]
static OBJECT_HASH: Global<u64> = Global::new(0);

/// Userspace sets it if the kernel has `bpf_set_retval` for the socket programs. The verifier
/// removes code that such a constant excludes.
#[unsafe(no_mangle)]
static HAS_SET_RETVAL: Global<u8> = Global::new(0);

/// Userspace sets it if the kernel has `bpf_ktime_get_coarse_ns`.
#[unsafe(no_mangle)]
static HAS_COARSE_CLOCK: Global<u8> = Global::new(0);

/// The UDP port of the tunnel to other nodes, in host byte order; 0 if this node has none.
#[unsafe(no_mangle)]
static TUNNEL_PORT: Global<u32> = Global::new(0);

/// The slots that `service_counts` has for each CPU: a power of two, or 0 if Services are not
/// counted.
#[unsafe(no_mangle)]
static SERVICE_SLOTS: Global<u32> = Global::new(0);

/// Returns true if a program can choose the error of the system call.
#[inline(always)]
pub fn has_set_retval() -> bool {
    HAS_SET_RETVAL.load() != 0
}

/// Makes a program refer to the constants, and so to the hash that tells who loaded it. Programs
/// that read another constant need no call.
#[inline(always)]
pub fn refer_to_constants() {
    OBJECT_HASH.load();
}

/// Copies a value out of a hash map.
macro_rules! copy {
    ($map:ident, $key:expr) => {
        // SAFETY: the value is copied before any other map operation, so the reference is valid.
        unsafe { $map.get($key) }.copied()
    };
}
use copy;

/// The entry point of a program, as a type.
pub trait EntryPoint {
    /// The program.
    const PROGRAM: Program;
}

/// The maps, clock and random numbers of the kernel, for one program.
pub struct Kernel<P>(PhantomData<P>);

impl<P> Kernel<P> {
    /// The only value, which holds no data.
    pub const NEW: Self = Self(PhantomData);
}

impl<P: EntryPoint> Kernel<P> {
    /// Counts a failed write. Writes fail only if the kernel has no memory for a map at that
    /// moment. The translation then goes on without the entry: the connection works, but the name
    /// of its peer or its affinity may be lost. Returns true if the write succeeded.
    #[inline(always)]
    fn check_write<T>(&self, result: Result<T, i32>, error: ProgramError) -> bool {
        if result.is_err() {
            self.count_error(error);
        }
        result.is_ok()
    }
}

const EEXIST: i32 = -17;

impl<P: EntryPoint> Tables for Kernel<P> {
    #[inline(always)]
    fn prefilter_missing_bits<const N: usize>(&self, items: [PrefilterItem; N]) -> [u64; N] {
        PREFILTER.get(0).map_or([1; N], |prefilter| prefilter.missing_bits(items))
    }

    #[inline(always)]
    fn service(&self, key: &ServiceKey) -> Option<ServiceValue> {
        copy!(SERVICES, key)
    }

    #[inline(always)]
    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint> {
        // SAFETY: the endpoint is copied before any other map operation.
        unsafe { ENDPOINTS.get(key) }.map(|value| value.endpoint)
    }

    #[inline(always)]
    fn maglev_slot(&self, key: &MaglevKey, entry: u32) -> Option<u16> {
        // SAFETY: the slot is copied before any other map operation.
        let page = unsafe { MAGLEV.get(key) }?;
        // The verifier does not follow a remainder. Without the black box, the compiler leaves out
        // the comparison from which the verifier knows the limit.
        page.slots.get(black_box(entry) as usize).copied()
    }

    #[inline(always)]
    fn is_member(&self, key: &MemberKey) -> bool {
        MEMBERS.get_ptr(key).is_some()
    }

    #[inline(always)]
    fn is_node_address(&self, address: &Addr) -> bool {
        NODE_ADDRESSES.get_ptr(address).is_some()
    }

    #[inline(always)]
    fn in_source_ranges(&self, service: u32, addr: Addr) -> bool {
        SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange { service, addr })).is_some()
    }

    #[inline(always)]
    fn is_local_source(&self, address: Addr) -> bool {
        LOCAL_SOURCES.get(&Key::new(Addr::BITS, address)).is_some()
    }

    #[inline(always)]
    fn is_exempt_source(&self, address: &Addr) -> bool {
        const ALL: u16 = SocketScope::All as u16;
        NODE.get(0).is_some_and(|node| node.socket_scope != ALL) && EXEMPT_SOURCES.get_ptr(address).is_some()
    }

    #[inline(always)]
    fn is_local_link(&self, link: u32) -> bool {
        LOCAL_LINKS.get_ptr(&link).is_some()
    }

    #[inline(always)]
    fn masquerade_address(&self, link: u32, endpoint: &Addr) -> Option<Addr> {
        let key = Key::new(MasqueradeSubnet::BITS, MasqueradeSubnet { link, addr: *endpoint });
        let address = MASQUERADE_ADDRESSES.get(&key)?;
        // The prefix of length 0 of IPv6 contains the IPv4 addresses too.
        if address.is_v4() == endpoint.is_v4() { Some(*address) } else { None }
    }

    #[inline(always)]
    fn tunnel_port(&self) -> u16 {
        #[expect(clippy::cast_possible_truncation, reason = "userspace sets a port")]
        let port = TUNNEL_PORT.load() as u16;
        port
    }

    #[inline(always)]
    fn dsr_node(&self, key: &DsrKey) -> Option<Addr> {
        copy!(DSR_ENDPOINTS, key)
    }

    #[inline(always)]
    fn dsr_return(&self, key: &FlowKey, is_assured: bool) -> Option<Addr> {
        if is_assured { copy!(DSR_RETURNS, key) } else { copy!(DSR_NEW_RETURNS, key) }
    }

    #[inline(always)]
    fn set_dsr_return(&self, key: &FlowKey, node: &Addr, is_assured: bool) {
        let map = if is_assured { &DSR_RETURNS } else { &DSR_NEW_RETURNS };
        self.check_write(map.insert(key, node, 0), ProgramError::Flows);
    }

    #[inline(always)]
    fn remove_dsr_return(&self, key: &FlowKey) {
        let _ = DSR_RETURNS.remove(key);
        let _ = DSR_NEW_RETURNS.remove(key);
    }

    #[inline(always)]
    fn is_dsr_node(&self, address: &Addr) -> bool {
        dsr_address(address) == DsrAddress::End as u32
    }

    #[inline(always)]
    fn is_of_dsr_node(&self, address: &Addr) -> bool {
        dsr_address(address) != 0
    }

    #[inline(always)]
    fn node(&self) -> Option<NodeValue> {
        NODE.get(0).copied()
    }

    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Option<AffinityValue> {
        copy!(AFFINITY, key)
    }

    #[inline(always)]
    fn set_affinity(&self, key: &AffinityKey, value: &AffinityValue) {
        self.check_write(AFFINITY.insert(key, value, 0), ProgramError::Affinity);
    }

    #[inline(always)]
    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        match copy!(FLOWS, key) {
            None => copy!(UNASSURED_FLOWS, key),
            flow => flow,
        }
    }

    #[inline(always)]
    fn port_use(&self, key: &FlowKey) -> Option<PortUse> {
        flows::port_use(key)
    }

    #[inline(always)]
    fn answered_flow(&self, key: &FlowKey, tcp: TcpFlags, acknowledged: u32) -> Option<Flow> {
        flows::answered_flow(key, tcp, acknowledged)
    }

    #[inline(always)]
    fn observed_flow(
        &self,
        key: &FlowKey,
        answer: (TcpFlags, u32),
        now_ns: u64,
        observe: impl FnOnce(&Flow) -> Option<u32>,
        flow: &mut Flow,
    ) -> bool {
        flows::observed_flow(key, answer, now_ns, observe, flow)
    }

    #[inline(always)]
    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.check_write(flows_with(flow).insert(key, flow, 0), ProgramError::Flows)
    }

    #[inline(always)]
    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        if FLOWS.get_ptr(key).is_some() {
            return false;
        }
        let result = UNASSURED_FLOWS.insert(key, flow, u64::from(BPF_NOEXIST));
        if result == Err(EEXIST) { false } else { self.check_write(result, ProgramError::Flows) }
    }

    #[inline(always)]
    fn assure_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let result = FLOWS.insert(key, flow, u64::from(BPF_NOEXIST));
        if result == Err(EEXIST) || !self.check_write(result, ProgramError::Flows) {
            return false;
        }
        let _ = UNASSURED_FLOWS.remove(key);
        true
    }

    #[inline(always)]
    fn set_acknowledged(&self, key: &FlowKey, acknowledged: u32) {
        flows::set_acknowledged(key, acknowledged);
    }

    #[inline(always)]
    fn touch_flow(&self, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) -> bool {
        flows::touch_flow(key, flow, observed, now_ns)
    }

    #[inline(always)]
    fn reuse_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        flows::reuse_flow(key, flow)
    }

    #[inline(always)]
    fn remove_flow(&self, key: &FlowKey) {
        let _ = FLOWS.remove(key);
        let _ = UNASSURED_FLOWS.remove(key);
    }

    #[inline(always)]
    fn is_direct_link(&self, link: u32) -> bool {
        DIRECT_LINKS.get_ptr(&link).is_some()
    }

    #[inline(always)]
    fn is_peer_link(&self, link: u32) -> bool {
        PEER_LINKS.get_ptr(&link).is_some()
    }

    #[inline(always)]
    fn has_direct_hint(&self, key: &DirectKeyV4) -> bool {
        direct::has_direct_hint(key)
    }

    #[inline(always)]
    fn direct_watch(&self) -> Option<DirectWatch> {
        DIRECT_WATCH.get(0).copied()
    }

    #[inline(always)]
    fn known_route(&self, packet: &RoutedPacket<'_>, link: u32, now_ns: u64, route: &mut Route) -> bool {
        links::known_route(packet, (link, now_ns), route)
    }

    #[inline(always)]
    fn remember_route(&self, packet: &RoutedPacket<'_>, link: u32, route: &Route, to_peer: bool) {
        links::remember_route(packet, (link, self.now_ns()), route, to_peer);
    }

    #[inline(always)]
    fn xdp_link(&self, link: u32) -> Option<XdpLinkValue> {
        copy!(XDP_LINKS, &link)
    }

    #[inline(always)]
    fn direct_flow(&self, key: &DirectKey, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlow> {
        direct::direct_flow(key, tcp, acknowledged)
    }

    #[inline(always)]
    fn direct_flow_v4(&self, key: &DirectKeyV4, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlowV4> {
        direct::find(&DIRECT_FLOWS_V4, key, tcp, acknowledged)
    }

    #[inline(always)]
    fn direct_progress(&self, key: &DirectKey, ends: Option<[&Addr; 2]>) -> DirectProgress {
        direct::direct_progress(key, ends)
    }

    #[inline(always)]
    fn put_direct_flow(&self, key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath) {
        direct::put_direct_flow(key, source, destination, path);
    }

    #[inline(always)]
    fn remove_direct_flow(&self, key: &DirectKey) {
        direct::remove_direct_flow(key);
    }

    #[inline(always)]
    fn request_direct(&self, key: &DirectKey) -> bool {
        DIRECT_REQUESTS.output(key, 0).is_ok()
    }

    #[inline(always)]
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue> {
        copy!(FRAGMENTS, key)
    }

    #[inline(always)]
    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue) {
        self.check_write(FRAGMENTS.insert(key, value, 0), ProgramError::Fragments);
    }

    #[inline(always)]
    fn remove_fragment(&self, key: &FragmentKey) {
        let _ = FRAGMENTS.remove(key);
    }

    #[inline(always)]
    fn may_send_error(&self) -> bool {
        errors::may_send_error(self.now_ns())
    }

    #[inline(always)]
    fn count(&self, counter: Counter) {
        if let Some(count) = COUNTERS.get_ptr_mut(counter as u32) {
            // SAFETY: the pointer is valid until the program ends, and the slot belongs to this
            // CPU.
            unsafe { *count += 1 };
        }
    }

    #[inline(always)]
    fn count_service(&self, service: u32, event: ServiceEvent) {
        let slots = SERVICE_SLOTS.load();
        // The identifier 0 belongs to no Service.
        if slots == 0 || service == 0 {
            return;
        }
        let slot = ctx::cpu().wrapping_mul(slots).wrapping_add(service_slot(service, slots));
        if let Some(counts) = SERVICE_COUNTS.get_ptr_mut(slot) {
            // SAFETY: the pointer is valid until the program ends, and the slot belongs to this
            // CPU.
            unsafe { (*counts).add(event) };
        }
    }

    #[inline(always)]
    fn trace(&self, verdict: Counter, link: u32, key: &FlowKey, flow: &Flow) {
        trace::packet::<P>(verdict, link, key, flow);
    }

    #[inline(always)]
    fn count_error(&self, error: ProgramError) {
        trace::error::<P>(error);
        if let Some(errors) = PROGRAM_ERRORS.get_ptr_mut(P::PROGRAM as u32) {
            // SAFETY: as above.
            unsafe { (*errors).counts[error as usize] += 1 };
        }
    }

    #[inline(always)]
    fn now_ns(&self) -> u64 {
        if HAS_COARSE_CLOCK.load() == 0 { ctx::now_ns() } else { ctx::coarse_now_ns() }
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        ctx::random()
    }
}

/// Returns the network namespace cookie of the node. If userspace does not know it, that of the
/// initial network namespace.
#[inline(always)]
pub fn node_netns() -> u64 {
    match NODE.get(0) {
        Some(node) if node.netns != NodeValue::NETNS_UNKNOWN => node.netns,
        _ => ctx::initial_netns(),
    }
}

/// Returns true if the socket programs leave the sockets of a network namespace alone.
#[inline(always)]
pub fn leaves_alone(netns: u64) -> bool {
    const ALL: u16 = SocketScope::All as u16;
    const NODE_ONLY: u16 = SocketScope::Node as u16;
    match NODE.get(0).map(|node| node.socket_scope) {
        None | Some(ALL) => false,
        Some(NODE_ONLY) => netns != node_netns(),
        Some(_) => EXEMPT_NETNS.get_ptr(&netns).is_some(),
    }
}
