//! Reads the headers of TCP segments.

use super::{Frame, Packet};
use crate::Protocol;

/// The offset of the length of the header of TCP.
const TCP_LENGTH: u32 = 12;
/// The offset of the sequence number in the header of TCP.
pub(super) const TCP_SEQUENCE: u32 = 4;
/// The offset of the acknowledgement number.
pub(super) const TCP_ACKNOWLEDGEMENT: u32 = 8;

impl Packet {
    /// Returns the flags of a TCP segment, and no flags for other protocols. Returns `None` if the
    /// segment is truncated before the end of its checksum, because it could not be rewritten.
    #[inline(always)]
    pub fn tcp_flags(&self, frame: &impl Frame, protocol: Protocol) -> Option<TcpFlags> {
        match protocol {
            Protocol::Tcp => {
                let [_, flags, _, _, _, _] = frame.load(self.payload() + TCP_LENGTH)?;
                Some(TcpFlags(flags))
            }
            Protocol::Udp | Protocol::Sctp => Some(TcpFlags(0)),
        }
    }

    /// Returns the flags of a TCP segment, as [`Self::tcp_flags`], and its acknowledgement number,
    /// which counts if the flag ACK is set.
    ///
    /// The number is no `Option`: LLVM would leave it undefined for other protocols, and the
    /// verifiers of older kernels do not permit to copy an undefined value.
    #[inline(always)]
    pub fn tcp_answer(&self, frame: &impl Frame, protocol: Protocol) -> Option<(TcpFlags, u32)> {
        match protocol {
            Protocol::Tcp => {
                let [a, b, c, d, _, flags, _, _, _, _] = frame.load(self.payload() + TCP_ACKNOWLEDGEMENT)?;
                Some((TcpFlags(flags), u32::from_be_bytes([a, b, c, d])))
            }
            Protocol::Udp | Protocol::Sctp => Some((TcpFlags(0), 0)),
        }
    }

    /// Returns the sequence number of a TCP segment.
    #[inline(always)]
    pub fn tcp_sequence(&self, frame: &impl Frame) -> Option<u32> {
        frame.load(self.payload() + TCP_SEQUENCE).map(u32::from_be_bytes)
    }

    /// Returns the bytes of the header of a TCP segment.
    #[inline(always)]
    pub fn tcp_header(&self, frame: &impl Frame) -> Option<u32> {
        let [words, _] = frame.load(self.payload() + TCP_LENGTH)?;
        Some(u32::from(words >> 4) * 4)
    }

    /// Returns the acknowledgement number of a TCP segment.
    #[inline(always)]
    pub fn tcp_acknowledgement(&self, frame: &impl Frame) -> Option<u32> {
        frame.load(self.payload() + TCP_ACKNOWLEDGEMENT).map(u32::from_be_bytes)
    }
}

/// The flags of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    const FIN: u8 = 1;
    const SYN: u8 = 1 << 1;
    const RST: u8 = 1 << 2;
    const ACK: u8 = 1 << 4;

    /// Returns true for the first segment of a client.
    #[inline(always)]
    pub const fn is_syn(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN
    }

    /// Returns true for the first segment of a server.
    #[inline(always)]
    pub const fn is_syn_ack(self) -> bool {
        self.0 & (Self::SYN | Self::ACK) == Self::SYN | Self::ACK
    }

    /// Returns true if the acknowledgement number counts.
    #[inline(always)]
    pub const fn has_ack(self) -> bool {
        self.0 & Self::ACK != 0
    }

    /// Returns true if the sender closes its side.
    #[inline(always)]
    pub const fn has_fin(self) -> bool {
        self.0 & Self::FIN != 0
    }

    /// Returns true for a segment that neither opens, closes nor resets a connection.
    #[inline(always)]
    pub const fn is_of_open_connection(self) -> bool {
        self.0 & (Self::ACK | Self::SYN | Self::FIN | Self::RST) == Self::ACK
    }

    /// Returns true for a segment that neither is the first of its connection nor resets it. All
    /// of these acknowledge something (RFC 9293, section 3.1). None both opens and closes.
    #[inline(always)]
    pub const fn is_after_first(self) -> bool {
        self.0 & (Self::ACK | Self::RST) == Self::ACK && self.sequence_length() < 2
    }

    /// Returns how many sequence numbers the flags take: one for SYN and one for FIN.
    #[inline(always)]
    pub const fn sequence_length(self) -> u32 {
        (self.0 >> 1 & 1) as u32 + (self.0 & Self::FIN) as u32
    }

    /// Returns true if the sender resets the connection.
    #[inline(always)]
    pub const fn has_rst(self) -> bool {
        self.0 & Self::RST != 0
    }
}
