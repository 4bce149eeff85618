//! A frame in memory, with the checksum rules of the kernel's helpers.

use std::{
    cell::{Cell, RefCell},
    vec::Vec,
};

use super::{ChecksumState, InputFrame};
use crate::{
    Addr, Protocol,
    checksum::Difference,
    layout::Endpoint,
    packet::{self, ChecksumCoverage, ETHERNET_HEADER, Frame, IpVersion, Route, RoutedPacket, Tuple},
};

/// A frame in memory. `TUNNELED` says that it came through the tunnel from another node.
#[derive(Debug)]
pub struct MemoryFrame<const TUNNELED: bool> {
    octets: RefCell<Vec<u8>>,
    mark: Cell<u32>,
    note: Cell<u32>,
    link: u32,
    ingress_link: u32,
    segment_size: u32,
    priority: Cell<u32>,
    redirected_to: Cell<u32>,
    is_for_peer: Cell<bool>,
    /// The kernel writes the Ethernet header as the frame leaves.
    is_headed_by_kernel: Cell<bool>,
    tunneled_to: Cell<Option<Addr>>,
    tunnel_source: Option<Addr>,
    route: Option<Route>,
    socket: Option<Endpoint>,
    checksum: ChecksumState,
    /// The sum that the hardware computed of all but the Ethernet header (`skb->csum`).
    hardware_sum: Cell<u64>,
    /// The frame was cut to become an answer. The kernel forgets the sum then. If the frame had the
    /// length already, a wrong sum is left, and the driver of the link looks at no sum.
    is_cut: Cell<bool>,
}

impl<const TUNNELED: bool> MemoryFrame<TUNNELED> {
    /// Returns a copy of an input frame.
    pub fn new(input: &InputFrame) -> Self {
        Self {
            octets: RefCell::new(input.bytes.clone()),
            mark: Cell::new(input.mark),
            note: Cell::new(input.note),
            link: input.link,
            ingress_link: input.ingress_link,
            segment_size: input.segments.map_or(0, |(size, _)| size),
            priority: Cell::new(0),
            redirected_to: Cell::new(0),
            is_for_peer: Cell::new(false),
            is_headed_by_kernel: Cell::new(false),
            tunneled_to: Cell::new(None),
            tunnel_source: input.tunnel_source,
            route: input.route,
            socket: input.socket,
            checksum: input.checksum,
            hardware_sum: Cell::new(sum(&input.bytes)),
            is_cut: Cell::new(false),
        }
    }

    /// Returns the note.
    pub fn note_left(&self) -> u32 {
        self.note.get()
    }

    /// Returns the index of the link to which the frame was redirected, or 0.
    pub fn redirected_to(&self) -> u32 {
        self.redirected_to.get()
    }

    /// Returns true if the frame goes to the peer of that link.
    pub fn is_for_peer(&self) -> bool {
        self.is_for_peer.get()
    }

    /// Returns true if the kernel writes the Ethernet header as the frame leaves.
    pub fn is_headed_by_kernel(&self) -> bool {
        self.is_headed_by_kernel.get()
    }

    /// Returns the node to which the frame goes through the tunnel.
    pub fn tunneled_to(&self) -> Option<Addr> {
        self.tunneled_to.get()
    }

    /// Returns the bytes of the frame.
    pub fn into_bytes(self) -> Vec<u8> {
        self.octets.into_inner()
    }

    /// Returns the offset and version of the IP header, if there is one.
    pub fn ip(&self) -> Option<(u32, IpVersion)> {
        packet::ip_header(self, u16::from_be_bytes(self.load(ETHERNET_HEADER - 2)?), ETHERNET_HEADER)
    }

    /// Returns true if the destination of the Ethernet header is the address of lo, all zeros.
    pub fn is_for_this_host(&self) -> bool {
        self.load::<6>(0) == Some([0; 6])
    }

    /// Returns true unless the frame has a sum of the hardware that is wrong.
    pub fn is_hardware_sum_correct(&self) -> bool {
        // The remainder maps both forms of zero in ones' complement to 0.
        self.is_cut.get()
            || self.checksum != ChecksumState::Complete
            || self.hardware_sum.get() % 0xffff == sum(&self.octets.borrow()) % 0xffff
    }

    fn add_to_hardware_sum(&self, words: u32) {
        self.hardware_sum.set(self.hardware_sum.get() + u64::from(words));
    }
}

/// Returns the sum of all words after the Ethernet header, which is not folded yet.
fn sum(bytes: &[u8]) -> u64 {
    let payload = bytes.get(ETHERNET_HEADER as usize..).unwrap_or_default();
    let word = |pair: &[u8]| u64::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    payload.chunks(2).map(word).sum()
}

/// Returns true if `bpf_l3_csum_replace` and `bpf_l4_csum_replace` accept the offset.
const fn is_checksum_offset(offset: u32) -> bool {
    offset <= 0xffff && offset.is_multiple_of(2)
}

impl<const TUNNELED: bool> MemoryFrame<TUNNELED> {
    /// A frame from the tunnel has no Ethernet header before, so offsets change.
    fn assert_that_offsets_are_valid(&self) {
        assert!(!TUNNELED || !self.is_headed_by_kernel.get(), "the frame has got an Ethernet header");
    }
}

impl<const TUNNELED: bool> Frame for MemoryFrame<TUNNELED> {
    const IS_ETHERNET: bool = true;
    const IS_TUNNELED: bool = TUNNELED;

    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.assert_that_offsets_are_valid();
        self.octets.borrow().get(offset as usize..)?.first_chunk().copied()
    }

    fn load_words<const N: usize>(&self, offset: u32) -> Option<[[u8; 4]; N]> {
        let octets = self.octets.borrow();
        octets.get(offset as usize..)?.as_chunks().0.first_chunk().copied()
    }

    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()> {
        self.assert_that_offsets_are_valid();
        let mut all = self.octets.borrow_mut();
        *all.get_mut(offset as usize..)?.first_chunk_mut()? = *bytes;
        Some(())
    }

    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()> {
        assert!(is_checksum_offset(offset));
        let field = self.load(offset)?;
        self.store(offset, &difference.apply(field))
    }

    fn fix_checksum(&self, offset: u32, difference: Difference, coverage: ChecksumCoverage) -> Option<()> {
        assert!(is_checksum_offset(offset));
        let field: [u8; 2] = self.load(offset)?;
        if coverage.is_optional && field == [0, 0] {
            return Some(());
        }
        let new = match (self.checksum, coverage.pseudo_header) {
            (ChecksumState::Partial, None) => field,
            // The field holds the sum, not its complement.
            (ChecksumState::Partial, Some(_)) => difference.apply(field.map(|byte| !byte)).map(|byte| !byte),
            (ChecksumState::None | ChecksumState::Complete, _) => difference.apply(field),
        };
        if self.checksum == ChecksumState::Complete && coverage.pseudo_header == Some(IpVersion::V4) {
            // The field now compensates for the change of the addresses. The checksum of the IPv4
            // header already did.
            self.add_to_hardware_sum(!difference.wsum());
        }
        self.store(offset, if coverage.is_optional && new == [0, 0] { &[0xff; 2] } else { &new })
    }

    fn update_hardware_checksum(&self, difference: Difference) {
        self.add_to_hardware_sum(difference.wsum());
    }

    fn length(&self) -> u32 {
        u32::try_from(self.octets.borrow().len()).expect("no frame is that long")
    }

    fn link(&self) -> u32 {
        self.link
    }

    fn mark(&self) -> u32 {
        self.mark.get()
    }

    fn set_mark(&self, mark: u32) {
        self.mark.set(mark);
    }

    fn note(&self) -> u32 {
        self.note.get()
    }

    fn set_note(&self, note: u32) {
        self.note.set(note);
    }

    fn ingress_link(&self) -> u32 {
        self.ingress_link
    }

    fn segment_size(&self) -> u32 {
        self.segment_size
    }

    fn has_vlan_tag(&self) -> bool {
        false
    }

    fn priority(&self) -> u32 {
        self.priority.get()
    }

    fn set_priority(&self, priority: u32) {
        self.priority.set(priority);
    }

    fn has_socket(&self, _: Protocol, tuple: &Tuple) -> bool {
        self.socket == Some(tuple.destination)
    }

    fn find_route(&self, _: &RoutedPacket<'_>, route: &mut Route) -> bool {
        *route = self.route.unwrap_or(Route::NONE);
        self.route.is_some()
    }

    fn redirect(&self, link: u32) {
        self.redirected_to.set(link);
    }

    fn redirect_to_peer(&self, link: u32) {
        self.redirected_to.set(link);
        self.is_for_peer.set(true);
    }

    fn tunnel_to(&self, node: &Addr, source: &Addr) -> Option<()> {
        assert!(source.is_unspecified() || source.is_v4() == node.is_v4());
        self.tunneled_to.set(Some(*node));
        Some(())
    }

    fn tunnel_source(&self) -> Option<Addr> {
        self.tunnel_source
    }

    fn cut(&self, length: u32) -> Option<()> {
        let mut octets = self.octets.borrow_mut();
        let is_shorter = octets.len() < length as usize;
        octets.truncate(length as usize);
        self.is_cut.set(true);
        (!is_shorter).then_some(())
    }

    fn insert(&self, bytes: u32) -> Option<()> {
        let at = ETHERNET_HEADER as usize;
        self.octets.borrow_mut().splice(at..at, std::iter::repeat_n(0, bytes as usize));
        Some(())
    }

    fn insert_tunnel_headers(&self, bytes: u32) -> Option<()> {
        // Nobody looks at the sum of the hardware when the packet leaves.
        self.is_cut.set(true);
        self.insert(bytes)
    }

    fn remove_tunnel_headers(&self, bytes: u32) -> Option<()> {
        let at = ETHERNET_HEADER as usize;
        let before = sum(&self.octets.borrow());
        self.octets.borrow_mut().drain(at..at + bytes as usize);
        let removed = (before - sum(&self.octets.borrow())) % 0xffff;
        self.hardware_sum.set(self.hardware_sum.get() + 0xffff - removed);
        Some(())
    }

    fn redirect_to(&self, route: &Route) {
        self.redirected_to.set(route.link);
        self.is_headed_by_kernel.set(true);
    }
}
