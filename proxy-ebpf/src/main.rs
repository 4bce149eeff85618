//! The entry points of shunt's eBPF programs.
//!
//! Built for the host, the crate is an empty program, so that commands for the whole workspace
//! work.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(
    target_arch = "bpf",
    expect(unsafe_code, reason = "entry points and the license need fixed symbol names and sections")
)]

#[cfg(target_arch = "bpf")]
mod ctx;
#[cfg(target_arch = "bpf")]
mod link;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod object;
#[cfg(target_arch = "bpf")]
mod socket;
#[cfg(target_arch = "bpf")]
mod trace;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{
        bindings::xdp_md,
        macros::{cgroup_sock, cgroup_sock_addr, classifier, xdp},
        programs::{SockAddrContext, SockContext, TcContext, XdpContext},
    };

    use proxy_common::layout::Program;

    use crate::{
        ctx::{Ethernet, Ip, Skb, SockAddr, Socket, Tunnel, V4, V6, Xdp},
        link,
        maps::EntryPoint,
        socket::{self, Hook},
    };

    /// Declares the type of an entry point.
    macro_rules! this {
        ($program:ident) => {
            enum This {}
            impl EntryPoint for This {
                const PROGRAM: Program = Program::$program;
            }
        };
    }

    /// Declares the program of a socket address hook.
    macro_rules! socket_hook {
        ($name:ident, $attach:ident, $program:ident, $job:ident::<$family:ty>) => {
            #[cgroup_sock_addr($attach)]
            pub fn $name(ctx: SockAddrContext) -> i32 {
                this!($program);
                impl Hook for This {
                    type Family = $family;
                }
                socket::$job::<This>(&SockAddr::new(ctx)).code()
            }
        };
    }

    socket_hook!(shunt_connect4, connect4, Connect4, connect::<V4>);
    socket_hook!(shunt_connect6, connect6, Connect6, connect::<V6>);
    socket_hook!(shunt_sendmsg4, sendmsg4, Sendmsg4, sendmsg::<V4>);
    socket_hook!(shunt_sendmsg6, sendmsg6, Sendmsg6, sendmsg::<V6>);
    socket_hook!(shunt_recvmsg4, recvmsg4, Recvmsg4, recvmsg::<V4>);
    socket_hook!(shunt_recvmsg6, recvmsg6, Recvmsg6, recvmsg::<V6>);
    socket_hook!(shunt_getpeer4, getpeername4, Getpeer4, getpeername::<V4>);
    socket_hook!(shunt_getpeer6, getpeername6, Getpeer6, getpeername::<V6>);

    /// Declares the program of a link hook.
    macro_rules! link_hook {
        ($name:ident, $program:ident, $job:ident::<$layer:ty>) => {
            #[classifier]
            pub fn $name(ctx: TcContext) -> i32 {
                this!($program);
                link::$job::<$layer, This>(&Skb::new(ctx))
            }
        };
    }

    link_hook!(shunt_in_eth, InEth, ingress::<Ethernet>);
    link_hook!(shunt_in_ip, InIp, ingress::<Ip>);
    link_hook!(shunt_in_tunnel, InTunnel, tunneled::<Tunnel>);
    link_hook!(shunt_out_eth, OutEth, egress::<Ethernet>);
    link_hook!(shunt_out_ip, OutIp, egress::<Ip>);

    #[xdp]
    pub fn shunt_xdp(ctx: XdpContext) -> u32 {
        this!(Xdp);
        link::early::<This>(&Xdp::new(ctx))
    }

    /// Declares the XDP program that replaces a function of libxdp's dispatcher. Both must have the
    /// same parameter and return type.
    #[unsafe(no_mangle)]
    #[unsafe(link_section = "freplace")]
    pub extern "C" fn shunt_xdp_ext(ctx: *mut xdp_md) -> u32 {
        this!(Xdp);
        link::early::<This>(&Xdp::new(XdpContext::new(ctx)))
    }

    #[cgroup_sock(sock_release)]
    pub fn shunt_release(ctx: SockContext) -> i32 {
        this!(Release);
        socket::release::<This>(&Socket::new(ctx.sock));
        1
    }
}
