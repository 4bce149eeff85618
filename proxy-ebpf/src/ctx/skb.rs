//! The context of the link hooks: a packet.

use core::marker::PhantomData;

use aya_ebpf::programs::TcContext;

/// What a link's packets begin with.
pub trait Layer {
    /// Bytes before the IP header.
    const HEADER: u32;
}

/// Links with Ethernet frames.
pub enum Ethernet {}

impl Layer for Ethernet {
    const HEADER: u32 = 14;
}

/// Links with bare IP packets: tunnels.
pub enum Ip {}

impl Layer for Ip {
    const HEADER: u32 = 0;
}

/// `struct __sk_buff`: a packet on a link.
pub struct Skb<L> {
    ctx: TcContext,
    layer: PhantomData<L>,
}

impl<L: Layer> Skb<L> {
    /// Takes a program's context.
    #[inline(always)]
    pub const fn new(ctx: TcContext) -> Self {
        Self { ctx, layer: PhantomData }
    }
}
