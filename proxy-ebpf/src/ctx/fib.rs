//! Asks the kernel where it would forward a packet, and sends the packet there.

use core::mem;

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as Parameters,
        bpf_redir_neigh as NextHop,
    },
    helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh},
};
use proxy_common::{
    Addr,
    packet::{DSCP, IpVersion, Route, RoutedPacket},
};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Asks for the route of a packet that came in on a link. Returns false if the kernel would not
/// forward it.
///
/// Before kernel 5.12 the length is compared with the MTU of the link only, and not with that of
/// the route (2c0a10af688c).
#[inline(always)]
pub fn find_route(skb: *mut __sk_buff, link: u32, packet: &RoutedPacket<'_>, route: &mut Route) -> bool {
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut parameters: Parameters = unsafe { mem::zeroed() };
    let RoutedPacket { source, destination, .. } = *packet;
    parameters.l4_protocol = packet.proto;
    parameters.sport = source.port.to_be();
    parameters.dport = destination.port.to_be();
    parameters.__bindgen_anon_1.tot_len = packet.length;
    parameters.ifindex = link;
    let ([a, b, c, d], [e, f, g, h]) = (source.addr.words(), destination.addr.words());
    match packet.version {
        IpVersion::V4 => {
            parameters.family = AF_INET;
            parameters.__bindgen_anon_2.tos = packet.traffic_class & DSCP;
            parameters.__bindgen_anon_3.ipv4_src = d;
            parameters.__bindgen_anon_4.ipv4_dst = h;
        }
        IpVersion::V6 => {
            parameters.family = AF_INET6;
            parameters.__bindgen_anon_2.flowinfo = (u32::from(packet.traffic_class & DSCP) << 20).to_be();
            parameters.__bindgen_anon_3.ipv6_src = [a, b, c, d];
            parameters.__bindgen_anon_4.ipv6_dst = [e, f, g, h];
        }
    }
    // SAFETY: the helper reads and writes the parameters, whose size it gets.
    let result =
        unsafe { bpf_fib_lookup(skb.cast(), &raw mut parameters, size_of::<Parameters>() as i32, 0) };
    const FORWARDED: [i64; 2] = [BPF_FIB_LKUP_RET_SUCCESS as i64, BPF_FIB_LKUP_RET_NO_NEIGH as i64];
    if !FORWARDED.contains(&result) {
        return false;
    }
    // SAFETY: every bit pattern is an address.
    let next_hop = unsafe {
        match parameters.family {
            AF_INET => Addr::from_v4(parameters.__bindgen_anon_4.ipv4_dst.to_ne_bytes()),
            // A route of IPv4 can have a router of IPv6.
            _ => Addr { octets: mem::transmute::<[u32; 4], [u8; 16]>(parameters.__bindgen_anon_4.ipv6_dst) },
        }
    };
    route.link = parameters.ifindex;
    route.next_hop = next_hop;
    for at in 0..6 {
        route.hardware[at] = parameters.dmac[at];
        route.hardware[6 + at] = parameters.smac[at];
    }
    true
}

/// Makes the packet leave by a route. The kernel writes the Ethernet header, and keeps its entry
/// for the next hop current. Minimum kernel: 5.10 (ba452c9e996d).
#[inline(always)]
pub fn redirect_to(route: &Route) {
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut next_hop: NextHop = unsafe { mem::zeroed() };
    let [a, b, c, d] = route.next_hop.words();
    if route.next_hop.is_v4() {
        next_hop.nh_family = AF_INET.into();
        next_hop.__bindgen_anon_1.ipv4_nh = d;
    } else {
        next_hop.nh_family = AF_INET6.into();
        next_hop.__bindgen_anon_1.ipv6_nh = [a, b, c, d];
    }
    // SAFETY: the helper reads the next hop, whose size it gets, and only notes link and next hop.
    unsafe { bpf_redirect_neigh(route.link, &raw mut next_hop, size_of::<NextHop>() as i32, 0) };
}
