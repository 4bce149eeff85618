//! The context of the XDP program: a frame before the kernel makes an `sk_buff` of it.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{xdp_action, xdp_md},
    helpers::generated::bpf_redirect,
    programs::XdpContext,
};
use proxy_common::{
    Addr, Protocol,
    checksum::Difference,
    link::Outcome,
    packet::{self, ChecksumCoverage, ETHERNET_HEADER, Frame, IpVersion, Route, RoutedPacket, Tuple},
};

use super::linear::{Aligned, Linear};

/// `struct xdp_md`: a frame that came in on a link. It has neither a mark nor notes.
pub struct Xdp(*mut xdp_md);

impl Xdp {
    /// Wraps the context of a program.
    #[inline(always)]
    pub const fn new(ctx: XdpContext) -> Self {
        Self(ctx.ctx)
    }

    /// Returns offset and version of the IP header, if there is one.
    #[inline(always)]
    pub fn ip(&self) -> Option<(u32, IpVersion)> {
        let ethertype = self.load(ETHERNET_HEADER - 2)?;
        packet::ip_header(self, u16::from_be_bytes(ethertype), ETHERNET_HEADER)
    }

    /// Returns the code that makes an outcome happen.
    #[inline(always)]
    pub const fn code(outcome: Outcome) -> u32 {
        match outcome {
            Outcome::Proceed | Outcome::Forward | Outcome::Refuse => xdp_action::XDP_PASS,
            Outcome::Drop => xdp_action::XDP_DROP,
            Outcome::Redirect => xdp_action::XDP_REDIRECT,
            Outcome::Transmit => xdp_action::XDP_TX,
        }
    }

    /// Returns the part of the frame that is in one piece: all of it, because the kernel runs a
    /// program like this one over no other frame.
    #[inline(always)]
    fn linear(&self) -> Linear {
        // SAFETY: the context is valid while the program runs.
        unsafe {
            Linear {
                start: (&raw const (*self.0).data).read_volatile(),
                end: (&raw const (*self.0).data_end).read_volatile(),
            }
        }
    }
}

impl Frame for Xdp {
    const IS_ETHERNET: bool = true;
    const IS_TUNNELED: bool = false;

    #[inline(always)]
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = MaybeUninit::<Aligned<N>>::uninit();
        // SAFETY: the bounds are those of the context, and the room is aligned.
        if !unsafe { self.linear().load::<N>(offset, bytes.as_mut_ptr().cast()) } {
            return None;
        }
        // SAFETY: all bytes were written.
        Some(unsafe { bytes.assume_init() }.0)
    }

    #[inline(always)]
    fn load_words<const N: usize>(&self, offset: u32) -> Option<[[u8; 4]; N]> {
        // SAFETY: the bounds are those of the context.
        unsafe { self.linear().load_words(offset) }
    }

    #[inline(always)]
    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()> {
        // SAFETY: the bounds are those of the context, and XDP programs may write their frame.
        let is_stored = unsafe { self.linear().store(offset, bytes) };
        if is_stored { Some(()) } else { None }
    }

    #[inline(always)]
    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()> {
        let field = self.load(offset)?;
        self.store(offset, &difference.apply(field))
    }

    #[inline(always)]
    fn fix_checksum(&self, offset: u32, difference: Difference, coverage: ChecksumCoverage) -> Option<()> {
        let new = difference.apply(self.load(offset)?);
        // Zero means no checksum.
        self.store(offset, if coverage.is_optional && new == [0; 2] { &[0xff; 2] } else { &new })
    }

    /// A native program runs before there is a sum of the hardware. A generic one cannot reach it:
    /// a receiver on this host then computes the sum itself.
    #[inline(always)]
    fn update_hardware_checksum(&self, _: Difference) {}

    #[inline(always)]
    fn length(&self) -> u32 {
        let Linear { start, end } = self.linear();
        end.wrapping_sub(start)
    }

    #[inline(always)]
    fn link(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.0).ingress_ifindex).read_volatile() }
    }

    #[inline(always)]
    fn mark(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn set_mark(&self, _: u32) {}

    #[inline(always)]
    fn note(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn set_note(&self, _: u32) {}

    #[inline(always)]
    fn ingress_link(&self) -> u32 {
        self.link()
    }

    /// The kernel has not put segments together yet. If another host did, the frame is as long.
    #[inline(always)]
    fn segment_size(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn has_vlan_tag(&self) -> bool {
        false
    }

    #[inline(always)]
    fn priority(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn set_priority(&self, _: u32) {}

    #[inline(always)]
    fn has_socket(&self, _: Protocol, _: &Tuple) -> bool {
        false
    }

    #[inline(always)]
    fn find_route(&self, _: &RoutedPacket<'_>, _: &mut Route) -> bool {
        false
    }

    #[inline(always)]
    fn redirect(&self, link: u32) {
        // SAFETY: the helper only notes the link. If there is none, the kernel drops the frame.
        unsafe { bpf_redirect(link, 0) };
    }

    /// XDP programs cannot do that.
    #[inline(always)]
    fn redirect_to_peer(&self, link: u32) {
        self.redirect(link);
    }

    #[inline(always)]
    fn tunnel_to(&self, _: &Addr, _: &Addr) -> Option<()> {
        None
    }

    #[inline(always)]
    fn tunnel_source(&self) -> Option<Addr> {
        None
    }

    #[inline(always)]
    fn cut(&self, _: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn insert(&self, _: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn insert_tunnel_headers(&self, _: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn remove_tunnel_headers(&self, _: u32) -> Option<()> {
        None
    }

    #[inline(always)]
    fn redirect_to(&self, route: &Route) {
        self.redirect(route.link);
    }
}
