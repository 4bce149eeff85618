//! A socket in the view of programs.

use aya_ebpf::{bindings::bpf_sock, helpers::generated::bpf_get_socket_cookie};
use proxy_common::{Addr, layout::Endpoint};

use super::read_words;

const AF_INET6: u32 = 10;
/// The state of connected sockets, including UDP sockets.
const TCP_ESTABLISHED: u32 = 1;

/// `struct bpf_sock`.
pub struct Socket(*mut bpf_sock);

impl Socket {
    /// Wraps the socket of a context, which is valid while the program runs.
    #[inline(always)]
    pub(crate) const fn new(socket: *mut bpf_sock) -> Self {
        Self(socket)
    }

    /// Returns the pointer, for helpers.
    #[inline(always)]
    pub const fn raw(&self) -> *mut bpf_sock {
        self.0
    }

    /// Returns the IP protocol with which the socket was created.
    #[inline(always)]
    pub fn protocol(&self) -> u32 {
        // SAFETY: the socket is valid while the program runs, and all programs may read the field.
        unsafe { (&raw const (*self.0).protocol).read_volatile() }
    }

    /// Returns true if the socket is connected. A UDP socket stays so until it connects to
    /// `AF_UNSPEC`, for which there is no hook.
    #[inline(always)]
    pub fn is_connected(&self) -> bool {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).state).read_volatile() == TCP_ESTABLISHED }
    }

    /// Returns the IPv4 address to which the socket is bound, or 0. In network byte order.
    #[inline(always)]
    pub fn source_v4(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.0).src_ip4).read_volatile() }
    }

    /// Returns the IPv6 address to which the socket is bound, or zeros. Words in network byte
    /// order.
    #[inline(always)]
    pub fn source_v6(&self) -> [u32; 4] {
        // SAFETY: as above.
        unsafe { read_words(&raw const (*self.0).src_ip6) }
    }

    /// Returns the address and port to which the socket is connected, or zeros.
    #[inline(always)]
    pub fn peer(&self) -> Endpoint {
        // SAFETY: as above. The port is 16 bits in network byte order. Older kernels allow only to
        // read it as a word.
        let (family, port) = unsafe {
            let port = (&raw const (*self.0).dst_port).cast::<u32>();
            ((&raw const (*self.0).family).read_volatile(), port.read_volatile())
        };
        // Both addresses are read before one is chosen. Otherwise the compiler merges the reads of
        // two branches into one read at a variable offset.
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
        // SAFETY: as above.
        unsafe { read_words(&raw const (*self.0).dst_ip6) }
    }

    /// Returns the cookie of the socket. Only for programs whose context is the socket itself.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the pointer is the context of the program.
        unsafe { bpf_get_socket_cookie(self.0.cast()) }
    }
}
