//! A socket, as programs see it.

use aya_ebpf::{bindings::bpf_sock, helpers::generated::bpf_get_socket_cookie};

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

    /// Identifies the socket as long as it lives. For programs whose context is the socket itself.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the pointer is the program's context.
        unsafe { bpf_get_socket_cookie(self.0.cast()) }
    }
}
