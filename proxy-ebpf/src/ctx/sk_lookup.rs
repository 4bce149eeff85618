//! Asks the kernel for the socket that would get a packet.

use core::mem;

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_CURRENT_NETNS, bpf_sock_tuple as Parameters,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 as EndsV4,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 as EndsV6,
    },
    helpers::generated::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use proxy_common::{Protocol, packet::Tuple};

/// Returns true if a socket of the network namespace gets packets with this source and
/// destination. The socket may be connected, in TIME-WAIT, or only bound. Returns false for SCTP,
/// because the helpers do not find its sockets. Minimum kernel: 5.2 (edbf8c01de5a).
#[inline(never)]
pub fn has_socket(skb: *mut __sk_buff, protocol: Protocol, tuple: &Tuple) -> bool {
    let Tuple { source, destination } = tuple;
    let ([a, b, c, d], [e, f, g, h]) = (source.addr.words(), destination.addr.words());
    let (sport, dport) = (source.port.to_be(), destination.port.to_be());
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut parameters: Parameters = unsafe { mem::zeroed() };
    let size = if source.addr.is_v4() {
        parameters.__bindgen_anon_1.ipv4 = EndsV4 { saddr: d, daddr: h, sport, dport };
        size_of::<EndsV4>()
    } else {
        parameters.__bindgen_anon_1.ipv6 = EndsV6 { saddr: [a, b, c, d], daddr: [e, f, g, h], sport, dport };
        size_of::<EndsV6>()
    };
    let (size, netns) = (size as u32, BPF_F_CURRENT_NETNS as u64);
    let parameters = &raw mut parameters;
    // SAFETY: the helpers get the size of the parameters, and read no more. They return null or a
    // socket, which is released here.
    unsafe {
        let socket = match protocol {
            Protocol::Tcp => bpf_skc_lookup_tcp(skb.cast(), parameters, size, netns, 0),
            Protocol::Udp => bpf_sk_lookup_udp(skb.cast(), parameters, size, netns, 0),
            Protocol::Sctp => return false,
        };
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
    }
    true
}
