//! The context of the socket address hooks: connect, sendmsg, recvmsg, getpeername.

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use proxy_common::{Addr, layout::Endpoint};

use super::Socket;

/// `struct bpf_sock_addr`: a socket and the address in question, which the program may change.
pub struct SockAddr(SockAddrContext);

impl SockAddr {
    /// Takes a program's context.
    #[inline(always)]
    pub const fn new(ctx: SockAddrContext) -> Self {
        Self(ctx)
    }

    /// The context, for socket storage.
    #[inline(always)]
    pub const fn raw(&self) -> &SockAddrContext {
        &self.0
    }

    #[inline(always)]
    const fn pointer(&self) -> *mut bpf_sock_addr {
        self.0.sock_addr
    }

    /// The socket.
    #[inline(always)]
    pub fn socket(&self) -> Socket {
        // SAFETY: the kernel's context; the field holds the socket in each of these hooks.
        Socket::new(unsafe { (*self.pointer()).__bindgen_anon_1.sk })
    }

    /// The socket's IP protocol.
    #[inline(always)]
    pub fn protocol(&self) -> u32 {
        // SAFETY: the kernel's context.
        unsafe { (&raw const (*self.pointer()).protocol).read_volatile() }
    }

    /// Identifies the socket as long as it lives.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the pointer is the program's context.
        unsafe { bpf_get_socket_cookie(self.0.as_ptr()) }
    }

    /// Identifies the socket's network namespace as long as the kernel runs. Kernel 5.7 (f318903c0bf4).
    #[inline(always)]
    pub fn netns(&self) -> u64 {
        // SAFETY: the pointer is the program's context.
        unsafe { bpf_get_netns_cookie(self.0.as_ptr()) }
    }

    /// The address in question.
    #[inline(always)]
    pub fn address<F: Family>(&self) -> Endpoint {
        // SAFETY: the kernel's context. The port is 16 bits in network byte order within a word.
        let port = unsafe { (&raw const (*self.pointer()).user_port).read_volatile() };
        Endpoint::new(F::address(self), u16::from_be(port as u16))
    }

    /// Puts another address in its place.
    #[inline(always)]
    pub fn set_address<F: Family>(&self, address: &Endpoint) {
        F::set_address(self, &address.addr);
        // SAFETY: the kernel's context; the port may be written in each of these hooks.
        unsafe { (&raw mut (*self.pointer()).user_port).write_volatile(u32::from(address.port.to_be())) };
    }
}

/// What differs between the hooks of IPv4 and IPv6 sockets: where the address stands.
pub trait Family {
    /// The address in question.
    fn address(ctx: &SockAddr) -> Addr;
    /// Puts another address in its place.
    fn set_address(ctx: &SockAddr, address: &Addr);
    /// The address the socket is bound to, if any.
    fn bound_source(ctx: &SockAddr) -> Option<Addr>;
}

/// IPv4 sockets.
pub enum V4 {}

impl Family for V4 {
    #[inline(always)]
    fn address(ctx: &SockAddr) -> Addr {
        // SAFETY: the kernel's context.
        let ip = unsafe { (&raw const (*ctx.pointer()).user_ip4).read_volatile() };
        Addr::from_v4(ip.to_ne_bytes())
    }

    #[inline(always)]
    fn set_address(ctx: &SockAddr, address: &Addr) {
        let [_, _, _, ip] = address.words();
        // SAFETY: the kernel's context; the address may be written in each of these hooks.
        unsafe { (&raw mut (*ctx.pointer()).user_ip4).write_volatile(ip) };
    }

    #[inline(always)]
    fn bound_source(ctx: &SockAddr) -> Option<Addr> {
        let ip = ctx.socket().source_v4();
        (ip != 0).then(|| Addr::from_v4(ip.to_ne_bytes()))
    }
}

/// IPv6 sockets, those that talk to IPv4-mapped addresses included.
pub enum V6 {}

impl Family for V6 {
    #[inline(always)]
    fn address(ctx: &SockAddr) -> Addr {
        // SAFETY: the kernel's context. One read a word: the verifier wants each access at a fixed offset.
        unsafe {
            let words = &raw const (*ctx.pointer()).user_ip6;
            Addr::from_words([
                (&raw const (*words)[0]).read_volatile(),
                (&raw const (*words)[1]).read_volatile(),
                (&raw const (*words)[2]).read_volatile(),
                (&raw const (*words)[3]).read_volatile(),
            ])
        }
    }

    #[inline(always)]
    fn set_address(ctx: &SockAddr, address: &Addr) {
        let [a, b, c, d] = address.words();
        // SAFETY: the kernel's context; the address may be written in each of these hooks.
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
