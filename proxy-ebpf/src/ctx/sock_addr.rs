//! The context of the socket programs: connect, sendmsg, recvmsg, getpeername.

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use proxy_common::{Addr, layout::Endpoint};

use super::{Socket, read_words};

/// `struct bpf_sock_addr`: a socket, and the address of the system call, which programs may change.
pub struct SockAddr(SockAddrContext);

impl SockAddr {
    /// Wraps the context of a program.
    #[inline(always)]
    pub const fn new(ctx: SockAddrContext) -> Self {
        Self(ctx)
    }

    /// Returns the context, for socket storage.
    #[inline(always)]
    pub const fn raw(&self) -> &SockAddrContext {
        &self.0
    }

    #[inline(always)]
    const fn pointer(&self) -> *mut bpf_sock_addr {
        self.0.sock_addr
    }

    /// Returns the socket.
    #[inline(always)]
    pub fn socket(&self) -> Socket {
        // SAFETY: the context is valid while the program runs. The field is the socket in all these
        // hooks.
        Socket::new(unsafe { (*self.pointer()).__bindgen_anon_1.sk })
    }

    /// Returns the IP protocol of the socket.
    #[inline(always)]
    pub fn protocol(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.pointer()).protocol).read_volatile() }
    }

    /// Returns the cookie of the socket.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the pointer is the context of the program.
        unsafe { bpf_get_socket_cookie(self.0.as_ptr()) }
    }

    /// Returns the network namespace cookie of the socket. Minimum kernel: 5.7 (f318903c0bf4).
    #[inline(always)]
    pub fn netns(&self) -> u64 {
        // SAFETY: the pointer is the context of the program.
        unsafe { bpf_get_netns_cookie(self.0.as_ptr()) }
    }

    /// Returns the address and port of the system call.
    #[inline(always)]
    pub fn address<F: Family>(&self) -> Endpoint {
        // SAFETY: the context is valid while the program runs. The port is 16 bits in network byte
        // order within a word.
        let port = unsafe { (&raw const (*self.pointer()).user_port).read_volatile() };
        Endpoint::new(F::address(self), u16::from_be(port as u16))
    }

    /// Replaces the address and port of the system call.
    #[inline(always)]
    pub fn set_address<F: Family>(&self, address: &Endpoint) {
        F::set_address(self, &address.addr);
        // SAFETY: the context is valid while the program runs, and all these hooks may write the
        // port.
        unsafe { (&raw mut (*self.pointer()).user_port).write_volatile(u32::from(address.port.to_be())) };
    }
}

/// The difference between the hooks of IPv4 and IPv6 sockets: the fields with the addresses.
pub trait Family {
    /// Returns the address of the system call.
    fn address(ctx: &SockAddr) -> Addr;
    /// Replaces the address of the system call.
    fn set_address(ctx: &SockAddr, address: &Addr);
    /// Returns the address to which the socket is bound, if it is.
    fn bound_source(ctx: &SockAddr) -> Option<Addr>;
}

/// IPv4 sockets.
pub enum V4 {}

impl Family for V4 {
    #[inline(always)]
    fn address(ctx: &SockAddr) -> Addr {
        // SAFETY: the context is valid while the program runs.
        let ip = unsafe { (&raw const (*ctx.pointer()).user_ip4).read_volatile() };
        Addr::from_v4(ip.to_ne_bytes())
    }

    #[inline(always)]
    fn set_address(ctx: &SockAddr, address: &Addr) {
        let [_, _, _, ip] = address.words();
        // SAFETY: the context is valid while the program runs, and all these hooks may write the
        // address.
        unsafe { (&raw mut (*ctx.pointer()).user_ip4).write_volatile(ip) };
    }

    #[inline(always)]
    fn bound_source(ctx: &SockAddr) -> Option<Addr> {
        let ip = ctx.socket().source_v4();
        (ip != 0).then(|| Addr::from_v4(ip.to_ne_bytes()))
    }
}

/// IPv6 sockets, also for IPv4-mapped addresses.
pub enum V6 {}

impl Family for V6 {
    #[inline(always)]
    fn address(ctx: &SockAddr) -> Addr {
        // SAFETY: the context is valid while the program runs.
        Addr::from_words(unsafe { read_words(&raw const (*ctx.pointer()).user_ip6) })
    }

    #[inline(always)]
    fn set_address(ctx: &SockAddr, address: &Addr) {
        let [a, b, c, d] = address.words();
        // SAFETY: the context is valid while the program runs, and all these hooks may write the
        // address.
        unsafe {
            let words = &raw mut (*ctx.pointer()).user_ip6;
            (&raw mut (*words)[0]).write_volatile(a);
            (&raw mut (*words)[1]).write_volatile(b);
            (&raw mut (*words)[2]).write_volatile(c);
            (&raw mut (*words)[3]).write_volatile(d);
        }
    }

    #[inline(always)]
    fn bound_source(ctx: &SockAddr) -> Option<Addr> {
        let address = Addr::from_words(ctx.socket().source_v6());
        (!address.is_unspecified()).then_some(address)
    }
}
