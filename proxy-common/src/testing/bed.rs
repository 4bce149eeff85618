//! Something that runs the decisions on links: the host itself, or programs in the kernel.

use std::{fmt, fmt::Write as _, string::String, vec::Vec};

use super::{Noted, Sent, World};
use crate::{layout::NodeValue, link::Outcome};

/// Where a frame passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// It comes in on a link.
    Ingress,
    /// It leaves on one.
    Egress,
}

/// What the kernel knows of a frame's transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// Nothing: it is in the frame (`CHECKSUM_NONE`).
    None,
    /// The frame holds that of the pseudo header; the link's hardware is to do the rest (`CHECKSUM_PARTIAL`).
    Partial,
    /// The link's hardware took one of the whole packet (`CHECKSUM_COMPLETE`).
    Complete,
}

/// A frame and what the kernel knows of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Given {
    /// The frame, from its Ethernet header on.
    pub bytes: Vec<u8>,
    /// Its mark.
    pub mark: u32,
    /// Its checksum.
    pub sum: Sum,
    /// Size and number of the segments that it will be cut into; none of most.
    pub segments: Option<(u32, u32)>,
}

impl Given {
    /// A frame without a mark.
    pub const fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, mark: 0, sum: Sum::None, segments: None }
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, mark, sum, segments } = self;
        write!(f, "{} mark {mark:#x} sum {sum:?} segments {segments:?}", hex(bytes))
    }
}

/// What became of a frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Ran {
    /// What went in.
    pub given: Given,
    /// The frame as it came out.
    pub bytes: Vec<u8>,
    /// Its mark.
    pub mark: u32,
    /// Whether it goes on.
    pub outcome: Outcome,
}

impl fmt::Debug for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { given, bytes, mark, outcome } = self;
        write!(f, "{outcome:?}\ngiven {given:?}\ncame  {} mark {mark:#x}", hex(bytes))
    }
}

impl Ran {
    /// It goes on as this.
    #[track_caller]
    pub fn becomes(&self, wanted: &Sent) -> &Self {
        assert_eq!(self.outcome, Outcome::Proceed, "{self:?}");
        let wanted = wanted.bytes();
        let [given, came, wanted] = [&self.given.bytes, &self.bytes, &wanted].map(|bytes| hex(bytes));
        assert!(came == wanted, "given  {given}\ncame   {came}\nwanted {wanted}");
        self
    }

    /// It goes on unchanged, mark and all.
    #[track_caller]
    pub fn is_left_alone(&self) {
        self.is_unchanged();
        assert_eq!(self.mark, self.given.mark, "{self:?}");
    }

    /// It ends here.
    #[track_caller]
    pub fn is_dropped(&self) {
        assert_eq!(self.outcome, Outcome::Drop, "{self:?}");
    }

    /// It goes on unchanged, to be rejected.
    #[track_caller]
    pub fn is_refused(&self) {
        self.is_unchanged();
        self.is_marked(NodeValue::REJECT_MARK);
    }

    /// Its mark got these bits, and no others.
    #[track_caller]
    pub fn is_marked(&self, bits: u32) {
        assert_eq!(self.mark, self.given.mark | bits, "{self:?}");
    }

    #[track_caller]
    fn is_unchanged(&self) {
        assert_eq!(self.outcome, Outcome::Proceed, "{self:?}");
        let [given, came] = [&self.given.bytes, &self.bytes].map(|bytes| hex(bytes));
        assert!(given == came, "given {given}\ncame  {came}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Runs the decisions on frames.
pub trait Bed {
    /// Puts this in the maps, in place of what userspace had written there.
    fn configure(&mut self, world: &World);
    /// What the programs noted.
    fn noted(&mut self) -> Noted;
    /// Puts flows, fragments and affinity in the maps, in place of those that the programs noted, and counters to zero.
    fn set_noted(&mut self, noted: &Noted);
    /// A frame passes. None if this cannot be given to the programs here.
    fn run(&mut self, hook: Hook, given: &Given) -> Option<Ran>;
}
