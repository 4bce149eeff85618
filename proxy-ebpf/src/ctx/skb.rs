//! The context of the link programs: a packet.

use core::{marker::PhantomData, mem::MaybeUninit};

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_MARK_MANGLED_0,
        BPF_F_PSEUDO_HDR, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::generated::{
        bpf_csum_update, bpf_l3_csum_replace, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_peer,
        bpf_skb_adjust_room, bpf_skb_change_head, bpf_skb_change_tail, bpf_skb_change_type,
        bpf_skb_load_bytes, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use proxy_common::{
    Addr, Protocol,
    checksum::Difference,
    layout::VlanKey,
    packet::{self, ChecksumCoverage, Frame, IpVersion, Route, RoutedPacket, Tuple},
};

use super::{
    fib,
    linear::{Aligned, Linear},
    sk_lookup, tunnel,
};

/// The header with which packets of a link begin.
pub trait Layer {
    /// The number of bytes before the IP header or the first VLAN tag.
    const HEADER: u32;
    /// The link is the tunnel to other nodes.
    const IS_TUNNEL: bool = false;
}

/// Links with Ethernet frames.
pub enum Ethernet {}

impl Layer for Ethernet {
    const HEADER: u32 = packet::ETHERNET_HEADER;
}

/// Links with bare IP packets, as tunnels.
pub enum Ip {}

impl Layer for Ip {
    const HEADER: u32 = 0;
}

/// The tunnel to other nodes.
pub enum Tunnel {}

impl Layer for Tunnel {
    const HEADER: u32 = 0;
    const IS_TUNNEL: bool = true;
}

/// `TC_ACT_UNSPEC`, `TCX_NEXT`: the packet passes to the other programs on the link.
pub const NEXT: i32 = -1;
/// `TC_ACT_SHOT`, `TCX_DROP`.
pub const DROP: i32 = 2;
/// `TC_ACT_REDIRECT`, `TCX_REDIRECT`: the packet leaves on the link that the frame names.
pub const REDIRECT: i32 = 7;

const PACKET_HOST: u32 = 0;
const PACKET_OTHERHOST: u32 = 3;

/// `struct __sk_buff`: a packet on a link.
pub struct Skb<L> {
    skb: *mut __sk_buff,
    layer: PhantomData<L>,
}

impl<L: Layer> Skb<L> {
    /// Wraps the context of a program.
    #[inline(always)]
    pub const fn new(ctx: TcContext) -> Self {
        Self { skb: ctx.skb.skb, layer: PhantomData }
    }

    /// Returns true if the link layer address is that of this host, so that the packet is not
    /// bridged or for another host. On a bridge port, this includes packets for the bridge itself.
    /// The kernel classifies those only after the bridge, when `br_netfilter` has already passed
    /// them to conntrack.
    #[inline(always)]
    pub fn is_for_this_host(&self, bridge_of: impl FnOnce(u32) -> Option<[u8; 6]>) -> bool {
        // SAFETY: the context is valid while the program runs.
        match unsafe { (&raw const (*self.skb).pkt_type).read_volatile() } {
            PACKET_HOST => true,
            PACKET_OTHERHOST if L::HEADER != 0 => self.is_for_bridge(bridge_of),
            _ => false,
        }
    }

    /// Returns true if the packet is for the bridge of this port. A function call of its own saves
    /// stack.
    #[inline(never)]
    fn is_for_bridge<B: FnOnce(u32) -> Option<[u8; 6]>>(&self, bridge_of: B) -> bool {
        let bridge = bridge_of(self.link());
        bridge.is_some() && bridge == self.load(0)
    }

    /// Returns true if the packet has a tag that the kernel or the hardware removed from the frame,
    /// of a VLAN for which `is_vlan` is true. The kernel removes it before the program runs.
    #[inline(always)]
    pub fn is_of_vlan(&self, is_vlan: impl FnOnce(&VlanKey) -> bool) -> bool {
        L::HEADER != 0 && self.has_vlan_tag() && self.has_tag_of(is_vlan)
    }

    /// A function call of its own saves stack.
    #[inline(never)]
    fn has_tag_of<V: FnOnce(&VlanKey) -> bool>(&self, is_vlan: V) -> bool {
        const ID: u32 = 0xfff;
        // SAFETY: the context is valid while the program runs. The protocol holds 16 bits in
        // network byte order within a word.
        let (tag, protocol) = unsafe {
            (
                (&raw const (*self.skb).vlan_tci).read_volatile(),
                (&raw const (*self.skb).vlan_proto).read_volatile(),
            )
        };
        let protocol = u16::from_be(protocol as u16);
        is_vlan(&VlanKey { link: self.link(), id: (tag & ID) as u16, protocol })
    }

    /// Returns offset and version of the IP header, if there is one. VLAN tags that the kernel or
    /// the hardware removed from the frame do not matter.
    #[inline(always)]
    pub fn ip(&self) -> Option<(u32, IpVersion)> {
        // SAFETY: the context is valid while the program runs. The field holds 16 bits in network
        // byte order within a word.
        let protocol = unsafe { (&raw const (*self.skb).protocol).read_volatile() };
        packet::ip_header(self, u16::from_be(protocol as u16), L::HEADER)
    }

    /// Returns the same packet again. Functions that take it by value need no stack for it.
    #[inline(always)]
    pub const fn again(&self) -> Self {
        Self { skb: self.skb, layer: PhantomData }
    }

    /// Copies the first bytes of the packet, as many as there is room for. Returns how many.
    #[inline(always)]
    pub fn copy_start<const N: usize>(&self, room: *mut [u8; N]) -> u32 {
        // The verifier of kernels before 6.8 learns no lower bound from a comparison with zero. For
        // an empty packet the helper fails.
        let rest = self.length().wrapping_sub(1);
        let rest = if rest > N as u32 - 1 { N as u32 - 1 } else { rest };
        let length = rest + 1;
        // SAFETY: the caller has room for N bytes, and the helper writes at most so many, or fails.
        let result = unsafe { bpf_skb_load_bytes(self.skb.cast(), 0, room.cast(), length) };
        if result == 0 { length } else { 0 }
    }

    /// Returns the part of the packet that is in one piece.
    #[inline(always)]
    fn linear(&self) -> Linear {
        // SAFETY: the context is valid while the program runs.
        unsafe {
            Linear {
                start: (&raw const (*self.skb).data).read_volatile(),
                end: (&raw const (*self.skb).data_end).read_volatile(),
            }
        }
    }

    /// Returns true if the hardware computed a sum of the whole packet (`CHECKSUM_COMPLETE`).
    #[inline(always)]
    fn has_hardware_checksum(&self) -> bool {
        // SAFETY: the helper fails for all other packets, and adding zero changes nothing.
        unsafe { bpf_csum_update(self.skb, 0) >= 0 }
    }
}

impl<L: Layer> Frame for Skb<L> {
    const IS_ETHERNET: bool = L::HEADER != 0;
    const IS_TUNNELED: bool = L::IS_TUNNEL;

    #[inline(always)]
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = MaybeUninit::<Aligned<N>>::uninit();
        let room = bytes.as_mut_ptr().cast::<u8>();
        // SAFETY: the bounds are those of the context, and the room is aligned.
        if !unsafe { self.linear().load::<N>(offset, room) } {
            // SAFETY: the helper writes N bytes, for which there is room, or fails.
            let result = unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, room.cast(), N as u32) };
            succeeded(result)?;
        }
        // SAFETY: all bytes were written.
        Some(unsafe { bytes.assume_init() }.0)
    }

    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: u32) -> Option<[[u8; 4]; N]> {
        // SAFETY: the bounds are those of the context.
        if let Some(words) = unsafe { self.linear().load_words(offset) } {
            return Some(words);
        }
        let mut words = MaybeUninit::<[[u8; 4]; N]>::uninit();
        // SAFETY: the helper writes so many bytes, for which there is room, or fails.
        let result =
            unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, words.as_mut_ptr().cast(), 4 * N as u32) };
        succeeded(result)?;
        // SAFETY: all bytes were written.
        Some(unsafe { words.assume_init() })
    }

    #[inline(always)]
    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()> {
        // SAFETY: the helper reads N bytes, which exist, or fails.
        let result = unsafe { bpf_skb_store_bytes(self.skb, offset, bytes.as_ptr().cast(), N as u32, 0) };
        succeeded(result)
    }

    #[inline(always)]
    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()> {
        // SAFETY: the helper checks the offset. With size 0, the last value is a difference.
        succeeded(unsafe { bpf_l3_csum_replace(self.skb, offset, 0, difference.wsum().into(), 0) })
    }

    #[inline(always)]
    fn fix_checksum(&self, offset: u32, difference: Difference, coverage: ChecksumCoverage) -> Option<()> {
        let is_optional = if coverage.is_optional { BPF_F_MARK_MANGLED_0 } else { 0 };
        // The flag also removes the change of the IP header from the sum of the hardware, because
        // the checksum of the IPv4 header compensates for it. IPv6 headers have no checksum, so
        // their sum must stay as it is. Kernel 6.16 has a flag for this (ead7f9b8de65).
        let in_pseudo_header = match coverage.pseudo_header {
            Some(IpVersion::V4) => true,
            Some(IpVersion::V6) => !self.has_hardware_checksum(),
            None => false,
        };
        let in_pseudo_header = if in_pseudo_header { BPF_F_PSEUDO_HDR } else { 0 };
        let flags = u64::from(is_optional | in_pseudo_header);
        // SAFETY: the helper checks the offset. With size 0, the last value is a difference.
        succeeded(unsafe { bpf_l4_csum_replace(self.skb, offset, 0, difference.wsum().into(), flags) })
    }

    #[inline(always)]
    fn update_hardware_checksum(&self, difference: Difference) {
        // SAFETY: the helper changes the sum of the hardware, if there is one.
        unsafe { bpf_csum_update(self.skb, difference.wsum()) };
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).len).read_volatile() }
    }

    #[inline(always)]
    fn link(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).ifindex).read_volatile() }
    }

    #[inline(always)]
    fn mark(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).mark).read_volatile() }
    }

    #[inline(always)]
    fn set_mark(&self, mark: u32) {
        // SAFETY: the context is valid while the program runs, and link programs may write the
        // field.
        unsafe { (&raw mut (*self.skb).mark).write_volatile(mark) };
    }

    #[inline(always)]
    fn note(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).tc_index).read_volatile() }
    }

    #[inline(always)]
    fn set_note(&self, note: u32) {
        // SAFETY: the context is valid while the program runs, and link programs may write the
        // field. The kernel copies it to the fragments of a packet, and forwards it.
        unsafe { (&raw mut (*self.skb).tc_index).write_volatile(note) };
    }

    #[inline(always)]
    fn ingress_link(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).ingress_ifindex).read_volatile() }
    }

    #[inline(always)]
    fn segment_size(&self) -> u32 {
        // SAFETY: the context is valid while the program runs. Minimum kernel: 5.7 (cf62089b0edd).
        unsafe { (&raw const (*self.skb).gso_size).read_volatile() }
    }

    #[inline(always)]
    fn has_vlan_tag(&self) -> bool {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).vlan_present).read_volatile() != 0 }
    }

    #[inline(always)]
    fn priority(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.skb).priority).read_volatile() }
    }

    #[inline(always)]
    fn set_priority(&self, priority: u32) {
        // SAFETY: the context is valid while the program runs, and link programs may write the
        // field.
        unsafe { (&raw mut (*self.skb).priority).write_volatile(priority) };
    }

    #[inline(always)]
    fn has_socket(&self, protocol: Protocol, tuple: &Tuple) -> bool {
        sk_lookup::has_socket(self.skb, protocol, tuple)
    }

    #[inline(always)]
    fn find_route(&self, packet: &RoutedPacket<'_>, route: &mut Route) -> bool {
        fib::find_route(self.skb, self.link(), packet, route)
    }

    #[inline(always)]
    fn redirect_to(&self, route: &Route) {
        if L::HEADER == 0 {
            // The kernel drops a packet without room for an Ethernet header.
            // SAFETY: the helper checks the number.
            unsafe { bpf_skb_change_head(self.skb, packet::ETHERNET_HEADER, 0) };
        }
        fib::redirect_to(route);
    }

    #[inline(always)]
    fn tunnel_to(&self, node: &Addr, source: &Addr) -> Option<()> {
        tunnel::send_to(self.skb, node, source)
    }

    #[inline(always)]
    fn tunnel_source(&self) -> Option<Addr> {
        tunnel::source(self.skb)
    }

    #[inline(always)]
    fn cut(&self, length: u32) -> Option<()> {
        // SAFETY: the helper checks the length.
        succeeded(unsafe { bpf_skb_change_tail(self.skb, length, 0) })
    }

    #[inline(always)]
    fn insert(&self, bytes: u32) -> Option<()> {
        // SAFETY: the helper checks the number. Minimum kernel: 5.2.
        succeeded(unsafe { bpf_skb_adjust_room(self.skb, bytes as i32, BPF_ADJ_ROOM_MAC, 0) })
    }

    #[inline(always)]
    fn insert_tunnel_headers(&self, bytes: u32) -> Option<()> {
        const FLAGS: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
        // SAFETY: the helper checks the number. Minimum kernel: 5.2.
        succeeded(unsafe { bpf_skb_adjust_room(self.skb, bytes as i32, BPF_ADJ_ROOM_MAC, FLAGS.into()) })
    }

    #[inline(always)]
    fn remove_tunnel_headers(&self, bytes: u32) -> Option<()> {
        // SAFETY: the helper checks the number. Minimum kernel: 5.2.
        succeeded(unsafe { bpf_skb_adjust_room(self.skb, -(bytes as i32), BPF_ADJ_ROOM_MAC, 0) })
    }

    #[inline(always)]
    fn redirect(&self, link: u32) {
        // SAFETY: the helper only notes the link. If there is none, the kernel drops the packet.
        unsafe { bpf_redirect(link, 0) };
    }

    #[inline(always)]
    fn redirect_to_peer(&self, link: u32) {
        // SAFETY: the context is valid while the program runs. The second helper only notes the
        // link. If it has no peer in another network namespace, the kernel drops the packet.
        unsafe {
            // A packet that came in on a port of a bridge would be one for another host in the
            // pod. Kernels from 6.16 on set the type themselves (c43272299488).
            if (&raw const (*self.skb).pkt_type).read_volatile() != PACKET_HOST {
                bpf_skb_change_type(self.skb, PACKET_HOST);
            }
            bpf_redirect_peer(link, 0)
        };
    }
}

/// Returns `None` for an error of a helper.
#[inline(always)]
pub(super) const fn succeeded(result: i64) -> Option<()> {
    if result == 0 { Some(()) } else { None }
}
