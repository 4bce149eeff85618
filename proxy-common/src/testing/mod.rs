//! What the tests of the link programs share: packets, maps in memory, and scenarios that run on
//! the host and in the kernel.

mod checksums;
#[cfg(test)]
mod forwarding;
pub mod generate;
mod maps;
mod memory_frame;
mod memory_maps;
mod node;
mod packet;
#[cfg(test)]
mod properties;
mod runner;
pub mod scenarios;

pub use checksums::has_correct_checksums;
pub use maps::{ConfigMaps, StateMaps};
pub use memory_frame::MemoryFrame;
pub use memory_maps::MemoryMaps;
pub use node::{Addresses, Service, TestNode, UptimeTooShort};
pub use packet::{Extension, FragmentRange, Payload, TestPacket};
pub use runner::{ChecksumState, FrameResult, FrameRunner, Hook, InputFrame, LO};

/// The UDP port of the tunnel to other nodes in tests.
pub const TUNNEL_PORT: u16 = 4790;
