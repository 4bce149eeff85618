//! A frame in memory, with the checksum rules of the kernel's helpers.

use std::{
    cell::{Cell, RefCell},
    vec::Vec,
};

use super::{Given, Sum};
use crate::{
    checksum::Difference,
    packet::{self, Covered, Frame, IpVersion},
};

/// A frame in memory.
#[derive(Debug)]
pub struct Bytes {
    octets: RefCell<Vec<u8>>,
    mark: Cell<u32>,
    sum: Sum,
    /// The sum that the hardware took of all but the Ethernet header (`skb->csum`).
    taken: Cell<u64>,
}

/// The link's index: that of lo, on which the kernel runs test frames.
const LINK: u32 = 1;
const ETHERNET_HEADER: u32 = 14;

impl Bytes {
    /// Takes a frame.
    pub fn new(given: &Given) -> Self {
        Self {
            octets: RefCell::new(given.bytes.clone()),
            mark: Cell::new(given.mark),
            sum: given.sum,
            taken: Cell::new(sum(&given.bytes)),
        }
    }

    /// The frame as it is now.
    pub fn into_bytes(self) -> Vec<u8> {
        self.octets.into_inner()
    }

    /// Where the IP header begins, and its version; none of other frames.
    pub fn ip(&self) -> Option<(u32, IpVersion)> {
        packet::ip_header(self, u16::from_be_bytes(self.load(ETHERNET_HEADER - 2)?), ETHERNET_HEADER)
    }

    /// The Ethernet header names this host, whose link has the address of lo: zeros.
    pub fn is_for_this_host(&self) -> bool {
        self.load::<6>(0) == Some([0; 6])
    }

    /// The sum that the hardware took would still be right.
    pub fn is_sum_right(&self) -> bool {
        // Both are zero, of which ones' complement has two forms, or none is.
        self.sum != Sum::Complete || self.taken.get() % 0xffff == sum(&self.octets.borrow()) % 0xffff
    }

    fn take_up(&self, words: u32) {
        self.taken.set(self.taken.get() + u64::from(words));
    }
}

/// The sum of all words behind the Ethernet header; to be folded.
fn sum(bytes: &[u8]) -> u64 {
    let carried = bytes.get(ETHERNET_HEADER as usize..).unwrap_or_default();
    let word = |pair: &[u8]| u64::from(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    carried.chunks(2).map(word).sum()
}

/// What `bpf_l3_csum_replace` and `bpf_l4_csum_replace` take for an offset.
const fn is_checksum_offset(offset: u32) -> bool {
    offset <= 0xffff && offset.is_multiple_of(2)
}

impl Frame for Bytes {
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.octets.borrow().get(offset as usize..)?.first_chunk().copied()
    }

    fn store<const N: usize>(&self, offset: u32, bytes: &[u8; N]) -> Option<()> {
        let mut all = self.octets.borrow_mut();
        *all.get_mut(offset as usize..)?.first_chunk_mut()? = *bytes;
        Some(())
    }

    fn fix_header_checksum(&self, offset: u32, difference: Difference) -> Option<()> {
        assert!(is_checksum_offset(offset));
        let field = self.load(offset)?;
        self.store(offset, &difference.apply(field))
    }

    fn fix_checksum(&self, offset: u32, difference: Difference, covered: Covered) -> Option<()> {
        assert!(is_checksum_offset(offset));
        let field: [u8; 2] = self.load(offset)?;
        if covered.may_be_absent && field == [0, 0] {
            return Some(());
        }
        let new = match (self.sum, covered.pseudo_header) {
            (Sum::Partial, None) => field,
            // The field holds the sum itself, and not its complement.
            (Sum::Partial, Some(_)) => difference.apply(field.map(|byte| !byte)).map(|byte| !byte),
            (Sum::None | Sum::Complete, _) => difference.apply(field),
        };
        if self.sum == Sum::Complete && covered.pseudo_header == Some(IpVersion::V4) {
            // The field made up for the change; the header's own checksum did already.
            self.take_up(!difference.wsum());
        }
        self.store(offset, if covered.may_be_absent && new == [0, 0] { &[0xff; 2] } else { &new })
    }

    fn note_uncovered(&self, difference: Difference) {
        self.take_up(difference.wsum());
    }

    fn length(&self) -> u32 {
        u32::try_from(self.octets.borrow().len()).expect("no frame is that long")
    }

    fn link(&self) -> u32 {
        LINK
    }

    fn mark(&self) -> u32 {
        self.mark.get()
    }

    fn set_mark(&self, mark: u32) {
        self.mark.set(mark);
    }
}
