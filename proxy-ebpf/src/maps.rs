//! Every map of the eBPF programs, behind functions that copy values out: nothing keeps a pointer into a map.
#![expect(unsafe_code, reason = "map values are reached through pointers that only the verifier checks")]

use core::marker::PhantomData;

use aya_ebpf::{
    Global,
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, lpm_trie::Key},
    macros::btf_map,
};
use proxy_common::{
    Addr, for_each_map,
    layout::{
        AffinityKey, AffinityValue, BridgeAddress, Connection, Counter, Endpoint, EndpointKey, Flow, FlowKey,
        FragmentKey, FragmentValue, MemberKey, NodeValue, Program, ProgramError, ProgramErrors,
        ServiceCounts, ServiceKey, ServiceValue, SocketPeer, SourceRange, Tally, TraceEvent, UdpSocket,
        flow_state, service_slot,
    },
    prefilter::PrefilterBit,
    tables::Tables,
};

use crate::{
    ctx::{self, SockAddr},
    trace,
};

/// Memory is taken as entries come, so that generous capacities cost nothing.
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
    (SkStorage $key:ty, $value:ty, $entries:expr) => { SkStorage<$value> };
}

for_each_map!(declare_maps);

/// The ring buffer of trace events. It is not pinned, because only the process that loads the
/// programs reads it. Userspace sets the size.
#[btf_map(name = "trace_events")]
pub static TRACE_EVENTS: RingBuf<TraceEvent, 4096> = RingBuf::new();

/// Set by userspace where the kernel has `bpf_set_retval` for these programs; the verifier never looks at code it rules out.
#[unsafe(no_mangle)]
static HAS_SET_RETVAL: Global<u8> = Global::new(0);

/// Set by userspace where the kernel has `bpf_ktime_get_coarse_ns`.
#[unsafe(no_mangle)]
static HAS_COARSE_CLOCK: Global<u8> = Global::new(0);

/// How many slots `service_counts` has for each CPU: a power of two, or 0 where Services are not counted, which the verifier then
/// never looks at.
#[unsafe(no_mangle)]
static SERVICE_SLOTS: Global<u32> = Global::new(0);

/// Whether a program may choose the error its caller sees.
#[inline(always)]
pub fn has_set_retval() -> bool {
    HAS_SET_RETVAL.load() != 0
}

/// Copies a value out of a hash-like map.
macro_rules! copy {
    ($map:ident, $key:expr) => {
        // SAFETY: the value is copied before any other map operation, so the reference is never stale.
        unsafe { $map.get($key) }.copied()
    };
}

/// The entry point of a program, as a type.
pub trait EntryPoint {
    /// The program.
    const PROGRAM: Program;
    /// The name of the program in the kernel.
    const NAME: &'static str;
}

/// The kernel's maps, clock and chance, as one program uses them.
pub struct Kernel<P>(PhantomData<P>);

impl<P> Kernel<P> {
    /// There is nothing in it.
    pub const NEW: Self = Self(PhantomData);
}

impl<P: EntryPoint> Kernel<P> {
    /// Counts a write that failed. Writes fail only where a map cannot take memory at that moment. The translation then goes on
    /// without its memory: the connection works, and at worst a name or stickiness is lost.
    #[inline(always)]
    fn wrote<T>(&self, result: Result<T, i32>, error: ProgramError) -> bool {
        if result.is_err() {
            self.failed(error);
        }
        result.is_ok()
    }

    /// Remembers where a socket's datagrams to an address go.
    #[inline(always)]
    pub fn set_udp_flow(&self, vip: &SocketPeer, endpoint: &Endpoint) {
        self.wrote(UDP_FLOWS.insert(vip, endpoint, 0), ProgramError::UdpFlows);
    }

    /// Remembers what to call an endpoint in its answers to a socket.
    #[inline(always)]
    pub fn set_udp_reply(&self, endpoint: &SocketPeer, vip: &Endpoint) {
        self.wrote(UDP_REPLIES.insert(endpoint, vip, 0), ProgramError::UdpReplies);
    }

    /// Remembers a connected UDP socket, so that userspace can destroy it when its endpoint goes.
    #[inline(always)]
    pub fn set_udp_socket(&self, cookie: u64, socket: &UdpSocket) {
        self.wrote(UDP_SOCKETS.insert(cookie, socket, 0), ProgramError::UdpSockets);
    }

    /// Remembers what a UDP socket is being connected to.
    #[inline(always)]
    pub fn set_udp_connection(&self, ctx: &SockAddr, mut connection: Connection) {
        // SAFETY: as in `udp_connection`; an existing value is overwritten in place.
        match unsafe { UDP_CONNECTIONS.get_or_insert_ptr_mut(ctx.raw(), Some(&mut connection)).as_mut() } {
            Some(stored) => *stored = connection,
            None => self.failed(ProgramError::UdpConnections),
        }
    }

    /// Remembers what a TCP socket is being connected to.
    #[inline(always)]
    pub fn set_tcp_connection(&self, socket: u64, connection: &Connection) {
        self.wrote(TCP_CONNECTIONS.insert(&socket, connection, 0), ProgramError::TcpConnections);
    }
}

const EEXIST: i32 = -17;

impl<P: EntryPoint> Tables for Kernel<P> {
    #[inline(always)]
    fn prefilter_may_contain(&self, PrefilterBit { word, mask }: PrefilterBit) -> bool {
        PREFILTER.get(word).is_some_and(|bits| bits & mask != 0)
    }

    #[inline(always)]
    fn service(&self, key: &ServiceKey) -> Option<ServiceValue> {
        copy!(SERVICES, key)
    }

    #[inline(always)]
    fn endpoint(&self, key: &EndpointKey) -> Option<Endpoint> {
        copy!(ENDPOINTS, key)
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
    fn is_local_link(&self, link: u32) -> bool {
        LOCAL_LINKS.get_ptr(&link).is_some()
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
        self.wrote(AFFINITY.insert(key, value, 0), ProgramError::Affinity);
    }

    #[inline(always)]
    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        copy!(FLOWS, key)
    }

    #[inline(always)]
    fn put_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        self.wrote(FLOWS.insert(key, flow, 0), ProgramError::Flows)
    }

    #[inline(always)]
    fn add_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let result = FLOWS.insert(key, flow, u64::from(BPF_NOEXIST));
        if result == Err(EEXIST) { false } else { self.wrote(result, ProgramError::Flows) }
    }

    #[inline(always)]
    fn touch_flow(&self, key: &FlowKey, observed: u32, now_ns: u64) -> bool {
        let Some(flow) = FLOWS.get_ptr_mut(key) else { return false };
        // SAFETY: the pointer is good until the program ends. Two CPUs may write at once, and one of the bits be lost: the flow
        // is then kept for longer than need be.
        unsafe {
            (*flow).state = flow_state::after((*flow).state, observed);
            (*flow).used_ns = now_ns;
        }
        true
    }

    #[inline(always)]
    fn reopen_flow(&self, key: &FlowKey, flow: &Flow) -> bool {
        let Some(before) = FLOWS.get_ptr_mut(key) else { return false };
        // SAFETY: as above. The addresses are those that are there, and stay.
        unsafe {
            if (*before).tuple() != flow.tuple() {
                return false;
            }
            (*before).service = flow.service;
            (*before).generation = flow.generation;
            (*before).state = flow.state;
            (*before).list = flow.list;
            (*before).used_ns = flow.used_ns;
        }
        true
    }

    #[inline(always)]
    fn remove_flow(&self, key: &FlowKey) {
        let _ = FLOWS.remove(key);
    }

    #[inline(always)]
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentValue> {
        copy!(FRAGMENTS, key)
    }

    #[inline(always)]
    fn set_fragment(&self, key: &FragmentKey, value: &FragmentValue) {
        self.wrote(FRAGMENTS.insert(key, value, 0), ProgramError::Fragments);
    }

    #[inline(always)]
    fn remove_fragment(&self, key: &FragmentKey) {
        let _ = FRAGMENTS.remove(key);
    }

    #[inline(always)]
    fn count(&self, counter: Counter) {
        if let Some(count) = COUNTERS.get_ptr_mut(counter as u32) {
            // SAFETY: the pointer is good until the program ends, and the slot is this CPU's.
            unsafe { *count += 1 };
        }
    }

    #[inline(always)]
    fn tally(&self, service: u32, tally: Tally) {
        let slots = SERVICE_SLOTS.load();
        // No Service has the identifier 0.
        if slots == 0 || service == 0 {
            return;
        }
        let slot = ctx::cpu().wrapping_mul(slots).wrapping_add(service_slot(service, slots));
        if let Some(counts) = SERVICE_COUNTS.get_ptr_mut(slot) {
            // SAFETY: the pointer is good until the program ends, and the slot is this CPU's.
            unsafe { (*counts).add(tally) };
        }
    }

    #[inline(always)]
    fn trace(&self, verdict: Counter, key: &FlowKey, flow: &Flow) {
        trace::packet::<P>(verdict, key, flow);
    }

    #[inline(always)]
    fn failed(&self, error: ProgramError) {
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

/// The hardware address of the bridge that a link is a port of.
#[inline(always)]
pub fn bridge_of(link: u32) -> Option<[u8; 6]> {
    BRIDGE_PORTS.get_ptr(&link).map(|address| {
        // SAFETY: copied at once, so the pointer is good; userspace may write it meanwhile, and then one packet is taken for
        // another host's.
        unsafe { (*address).bytes }
    })
}

/// Where an unconnected socket's datagrams to an address went last.
#[inline(always)]
pub fn udp_flow(key: &SocketPeer) -> Option<Endpoint> {
    copy!(UDP_FLOWS, key)
}

/// The VIP that a socket sent to when it reached an endpoint.
#[inline(always)]
pub fn udp_reply(key: &SocketPeer) -> Option<Endpoint> {
    copy!(UDP_REPLIES, key)
}

/// The node's network namespace cookie; the initial namespace's where userspace could not tell it.
#[inline(always)]
pub fn node_netns() -> u64 {
    match NODE.get(0) {
        Some(node) if node.netns != NodeValue::NETNS_UNKNOWN => node.netns,
        _ => ctx::initial_netns(),
    }
}

/// Forgets a connected UDP socket.
#[inline(always)]
pub fn remove_udp_socket(cookie: u64) {
    let _ = UDP_SOCKETS.remove(cookie);
}

/// What a UDP socket was connected to through a Service.
#[inline(always)]
pub fn udp_connection(ctx: &SockAddr) -> Option<Connection> {
    // SAFETY: the pointer is null or good until the program ends; the socket is locked by its caller meanwhile.
    unsafe { UDP_CONNECTIONS.get_ptr_mut(ctx.raw()).as_ref() }.copied()
}

/// Forgets what a UDP socket was connected to.
#[inline(always)]
pub fn remove_udp_connection(ctx: &SockAddr) {
    // SAFETY: the context's socket is valid while the program runs.
    let _ = unsafe { UDP_CONNECTIONS.delete(ctx.socket().raw()) };
}

/// What a TCP socket was connected to through a Service.
#[inline(always)]
pub fn tcp_connection(socket: u64) -> Option<Connection> {
    copy!(TCP_CONNECTIONS, &socket)
}

/// Forgets what a TCP socket was connected to.
#[inline(always)]
pub fn remove_tcp_connection(socket: u64) {
    let _ = TCP_CONNECTIONS.remove(&socket);
}
