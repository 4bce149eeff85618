//! The code that shunt's eBPF programs and its userspace share: the layout of the maps, and the
//! decisions about packets and connections.
#![no_std]
#![expect(
    clippy::inline_always,
    reason = "in a BPF program a function call costs stack, and the limit is 512 bytes"
)]

#[cfg(any(test, feature = "testing", feature = "user"))]
extern crate std;

mod addr;
pub mod checksum;
pub mod flow;
pub mod hash;
pub mod layout;
mod lifetime;
pub mod link;
pub mod maglev;
pub mod packet;
#[cfg(feature = "user")]
mod pod;
pub mod prefilter;
pub mod protocol;
pub mod rewrite;
pub mod select;
pub mod service;
pub mod tables;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod verdict;

pub use self::addr::{Addr, AddrV4};
pub use protocol::Protocol;
