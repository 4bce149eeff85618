//! A socket, as programs see it.

use aya_ebpf::{bindings::bpf_sock, helpers::generated::bpf_get_socket_cookie};
use proxy_common::{Addr, layout::Endpoint};

const AF_INET6: u32 = 10;
/// The state of connected sockets, UDP ones too.
const TCP_ESTABLISHED: u32 = 1;

/// `struct bpf_sock`.
pub struct Socket(*mut bpf_sock);

impl Socket {
    /// The socket of a context, valid while its program runs.
    #[inline(always)]
    pub(crate) const fn new(socket: *mut bpf_sock) -> Self {
        Self(socket)
    }

    /// The pointer, for helpers.
    #[inline(always)]
    pub const fn raw(&self) -> *mut bpf_sock {
        self.0
    }

    /// The IP protocol, as the socket was made with.
    #[inline(always)]
    pub fn protocol(&self) -> u32 {
        // SAFETY: the kernel's pointer to a socket; the field may be read in every program that has one.
        unsafe { (&raw const (*self.0).protocol).read_volatile() }
    }

    /// Connected, as a UDP socket is until it is disconnected (connect to `AF_UNSPEC`, of which no hook tells).
    #[inline(always)]
    pub fn is_connected(&self) -> bool {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).state).read_volatile() == TCP_ESTABLISHED }
    }

    /// The IPv4 address it is bound to, 0 if none; in network byte order.
    #[inline(always)]
    pub fn source_v4(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).src_ip4).read_volatile() }
    }

    /// The IPv6 address it is bound to, zeros if none; words in network byte order.
    #[inline(always)]
    pub fn source_v6(&self) -> [u32; 4] {
        // SAFETY: as above. One read a word: the verifier wants each access at a fixed offset.
        unsafe {
            let words = &raw const (*self.0).src_ip6;
            [
                (&raw const (*words)[0]).read_volatile(),
                (&raw const (*words)[1]).read_volatile(),
                (&raw const (*words)[2]).read_volatile(),
                (&raw const (*words)[3]).read_volatile(),
            ]
        }
    }

    /// What it is connected to; zeros if it is not.
    #[inline(always)]
    pub fn peer(&self) -> Endpoint {
        // SAFETY: as above. The port is 16 bits in network byte order, which older kernels let programs read as a word only.
        let (family, port) = unsafe {
            let port = (&raw const (*self.0).dst_port).cast::<u32>();
            ((&raw const (*self.0).family).read_volatile(), port.read_volatile())
        };
        // Both are read before one is chosen: the compiler would make one read at a chosen offset of two in branches.
        let (v4, v6) = (self.peer_v4(), self.peer_v6());
        Endpoint::new(if family == AF_INET6 { Addr::from_words(v6) } else { v4 }, u16::from_be(port as u16))
    }

    #[inline(always)]
    fn peer_v4(&self) -> Addr {
        // SAFETY: as above.
        Addr::from_v4(unsafe { (&raw const (*self.0).dst_ip4).read_volatile() }.to_ne_bytes())
    }

    #[inline(always)]
    fn peer_v6(&self) -> [u32; 4] {
        // SAFETY: as above. One read a word: the verifier wants each access at a fixed offset.
        unsafe {
            let words = &raw const (*self.0).dst_ip6;
            [
                (&raw const (*words)[0]).read_volatile(),
                (&raw const (*words)[1]).read_volatile(),
                (&raw const (*words)[2]).read_volatile(),
                (&raw const (*words)[3]).read_volatile(),
            ]
        }
    }

    /// Identifies the socket as long as it lives. For programs whose context is the socket itself.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the pointer is the program's context.
        unsafe { bpf_get_socket_cookie(self.0.cast()) }
    }
}
