//! What runs the code of the link programs over a frame: the host, or the kernel.

use std::{fmt, fmt::Write as _, string::String, vec::Vec};

use super::{ConfigMaps, StateMaps, TestPacket};
use crate::{
    Addr,
    layout::{Endpoint, NodeValue},
    link::Outcome,
    packet::Route,
};

/// The hook that a frame passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// It comes in on a link, before the stack.
    Xdp,
    /// It comes in on a link.
    Ingress,
    /// It leaves on a link.
    Egress,
    /// It comes in through the tunnel from another node. The kernel cannot run it.
    Tunnel,
}

/// What the kernel knows of a frame's transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumState {
    /// `CHECKSUM_NONE`: the checksum is in the frame.
    None,
    /// `CHECKSUM_PARTIAL`: the frame holds the checksum of the pseudo header, and the hardware of
    /// the link computes the rest.
    Partial,
    /// `CHECKSUM_COMPLETE`: the hardware of the link computed the sum of the whole packet.
    Complete,
}

/// A frame, and what the kernel knows of it.
#[derive(Clone, PartialEq, Eq)]
pub struct InputFrame {
    /// The frame from its Ethernet header on.
    pub bytes: Vec<u8>,
    /// The mark.
    pub mark: u32,
    /// The state of the transport checksum.
    pub checksum: ChecksumState,
    /// The interface index of the link that it passes.
    pub link: u32,
    /// The note. The kernel accepts none.
    pub note: u32,
    /// The interface index of the link on which it came in, or 0.
    pub ingress_link: u32,
    /// Size and number of the segments into which the kernel will cut the frame (GSO).
    pub segments: Option<(u32, u32)>,
    /// Where the kernel would forward it. In the kernel, its routes say that.
    pub route: Option<Route>,
    /// The node that sent it through the tunnel.
    pub tunnel_source: Option<Addr>,
    /// Address and port of a socket of the node. In the kernel, its sockets say that.
    pub socket: Option<Endpoint>,
}

/// The interface index of lo, on which the kernel runs test frames.
pub const LO: u32 = 1;

impl InputFrame {
    /// Returns a frame without a mark.
    pub const fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            mark: 0,
            checksum: ChecksumState::None,
            link: LO,
            note: 0,
            ingress_link: 0,
            segments: None,
            route: None,
            tunnel_source: None,
            socket: None,
        }
    }
}

impl fmt::Debug for InputFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, mark, checksum, segments, .. } = self;
        write!(f, "{} mark {mark:#x} checksum {checksum:?} segments {segments:?}", hex(bytes))
    }
}

/// A frame after the hook.
#[derive(Clone, PartialEq, Eq)]
pub struct FrameResult {
    /// The frame before the hook.
    pub input: InputFrame,
    /// The frame after the hook.
    pub bytes: Vec<u8>,
    /// The mark after the hook.
    pub mark: u32,
    /// The note after the hook. The kernel does not show it.
    pub note: u32,
    /// The interface index of the link to which the frame was redirected. The kernel does not show
    /// it.
    pub redirected_to: u32,
    /// The frame goes to the peer of that link. The kernel does not show it.
    pub is_for_peer: bool,
    /// The kernel writes the Ethernet header as the frame leaves. It does not show that.
    pub is_headed_by_kernel: bool,
    /// The node to which it goes through the tunnel. The kernel does not show it.
    pub tunneled_to: Option<Addr>,
    /// Whether the frame passes.
    pub outcome: Outcome,
}

impl fmt::Debug for FrameResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { input, bytes, mark, outcome, .. } = self;
        write!(f, "{outcome:?}\ninput  {input:?}\noutput {} mark {mark:#x}", hex(bytes))
    }
}

impl FrameResult {
    /// Returns what the kernel shows of a result.
    pub fn of_kernel(input: &InputFrame, bytes: Vec<u8>, mark: u32, outcome: Outcome) -> Self {
        Self {
            input: input.clone(),
            bytes,
            mark,
            note: 0,
            redirected_to: 0,
            is_for_peer: false,
            is_headed_by_kernel: false,
            tunneled_to: None,
            outcome,
        }
    }

    /// Asserts that the frame passes as this packet.
    #[track_caller]
    pub fn becomes(&self, expected: &TestPacket) -> &Self {
        assert_eq!(self.outcome, Outcome::Proceed, "{self:?}");
        self.has_bytes_of(expected);
        self
    }

    #[track_caller]
    fn has_bytes_of(&self, expected: &TestPacket) {
        let expected = expected.to_frame();
        let [input, output, expected] = [&self.input.bytes, &self.bytes, &expected].map(|bytes| hex(bytes));
        assert!(output == expected, "input    {input}\noutput   {output}\nexpected {expected}");
    }

    /// Asserts that the frame leaves on another link at once as this packet.
    #[track_caller]
    pub fn is_redirected_as(&self, expected: &TestPacket) {
        assert_eq!(self.outcome, Outcome::Redirect, "{self:?}");
        self.has_bytes_of(expected);
    }

    /// Asserts that the frame passes, and that it and its mark are unchanged.
    #[track_caller]
    pub fn is_left_alone(&self) {
        self.is_unchanged();
        assert_eq!(self.mark, self.input.mark, "{self:?}");
    }

    /// Asserts that the frame is dropped.
    #[track_caller]
    pub fn is_dropped(&self) {
        assert_eq!(self.outcome, Outcome::Drop, "{self:?}");
    }

    /// Asserts that the frame passes unchanged with the mark that makes netfilter reject it.
    #[track_caller]
    pub fn is_refused(&self) {
        self.is_unchanged();
        self.is_marked(NodeValue::REJECT_MARK);
    }

    /// Asserts that these bits of the mark are set, and no others changed.
    #[track_caller]
    pub fn is_marked(&self, bits: u32) {
        assert_eq!(self.mark, self.input.mark | bits, "{self:?}");
    }

    /// Asserts that the frame leaves on its own link at once as this packet.
    #[track_caller]
    pub fn is_transmitted_as(&self, expected: &TestPacket) {
        assert_eq!(self.outcome, Outcome::Transmit, "{self:?}");
        self.has_bytes_of(expected);
    }

    #[track_caller]
    fn is_unchanged(&self) {
        assert_eq!(self.outcome, Outcome::Proceed, "{self:?}");
        let [input, output] = [&self.input.bytes, &self.bytes].map(|bytes| hex(bytes));
        assert!(input == output, "input  {input}\noutput {output}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Runs the code of the link programs over frames.
pub trait FrameRunner {
    /// Replaces the content of the maps that userspace writes.
    fn configure(&mut self, config: &ConfigMaps);
    /// Returns the content of the maps that programs write.
    fn state(&mut self) -> StateMaps;
    /// Replaces flows, fragments and affinity, and sets all counters to zero.
    fn set_state(&mut self, state: &StateMaps);
    /// Runs a hook over a frame. Returns `None` if it cannot run over such a frame here.
    fn run(&mut self, hook: Hook, input: &InputFrame) -> Option<FrameResult>;
}
