//! The tunnel to other nodes: to which node a packet goes through it, and from which one it came.

use core::mem::{MaybeUninit, offset_of};

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_tunnel_key},
    helpers::generated::{bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key, bpf_skb_vlan_pop},
};
use proxy_common::Addr;

use super::skb::succeeded;

/// The size of the structure with the source.
const SIZE: u32 = size_of::<bpf_tunnel_key>() as u32;
/// Its size in kernels before 5.19 (26101f5ab6bd), which accept no larger one.
const SIZE_WITHOUT_SOURCE: u32 = offset_of!(bpf_tunnel_key, __bindgen_anon_3) as u32;

/// The identifier of the virtual network (VNI) in the header of the tunnel.
const NETWORK: u32 = proxy_common::layout::TUNNEL_NETWORK;

/// Hop limit of the packets between the nodes.
const HOPS: u8 = 64;

/// Makes a packet go through the tunnel to a node, if it is then redirected to the tunnel. A
/// function call of its own saves stack.
#[inline(never)]
pub fn send_to(skb: *mut __sk_buff, node: &Addr, source: &Addr) -> Option<()> {
    // SAFETY: the context is valid while the program runs. A tag belongs to the link on which the
    // packet came in, and there is none on the tunnel.
    unsafe {
        if (&raw const (*skb).vlan_present).read_volatile() != 0 {
            succeeded(bpf_skb_vlan_pop(skb))?;
        }
    }
    // SAFETY: all bits zero is a value of the structure.
    let mut key: bpf_tunnel_key = unsafe { MaybeUninit::zeroed().assume_init() };
    key.tunnel_id = NETWORK;
    key.tunnel_ttl = HOPS;
    let ([a, b, c, d], own) = (node.words(), source.words());
    let flags = if node.is_v4() {
        key.__bindgen_anon_1.remote_ipv4 = u32::from_be(d);
        key.__bindgen_anon_3.local_ipv4 = u32::from_be(own[3]);
        // The packet within has its own checksum. IPv6 requires one.
        BPF_F_ZERO_CSUM_TX
    } else {
        key.__bindgen_anon_1.remote_ipv6 = [a, b, c, d];
        key.__bindgen_anon_3.local_ipv6 = own;
        BPF_F_TUNINFO_IPV6
    };
    // SAFETY: the helper reads so many bytes of the structure.
    unsafe {
        if bpf_skb_set_tunnel_key(skb, &raw mut key, SIZE, flags.into()) == 0 {
            return Some(());
        }
        succeeded(bpf_skb_set_tunnel_key(skb, &raw mut key, SIZE_WITHOUT_SOURCE, flags.into()))
    }
}

/// Returns the node from which a packet came through the tunnel. `None` if it has the identifier of
/// another network.
#[inline(always)]
pub fn source(skb: *mut __sk_buff) -> Option<Addr> {
    // SAFETY: all bits zero is a value of the structure.
    let mut key: bpf_tunnel_key = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the helper writes so many bytes of the structure, or fails. It fails for a node with
    // an address of the other family.
    let is_v4 = unsafe { bpf_skb_get_tunnel_key(skb, &raw mut key, SIZE_WITHOUT_SOURCE, 0) } == 0;
    let is_v6 = !is_v4
        // SAFETY: as above.
        && unsafe { bpf_skb_get_tunnel_key(skb, &raw mut key, SIZE_WITHOUT_SOURCE, BPF_F_TUNINFO_IPV6.into()) } == 0;
    if key.tunnel_id != NETWORK {
        return None;
    }
    // SAFETY: the helper wrote the address of this family.
    unsafe {
        if is_v4 {
            Some(Addr::from_v4(key.__bindgen_anon_1.remote_ipv4.to_be_bytes()))
        } else if is_v6 {
            Some(Addr::from_words(key.__bindgen_anon_1.remote_ipv6))
        } else {
            None
        }
    }
}
