//! What tests need to run the decisions on links: frames to give them, maps to ask, and scenarios to play, on the host as in the
//! kernel.

mod bed;
mod frame;
pub mod generate;
mod memory;
pub mod scenarios;
mod scene;
mod sent;
mod world;

pub use bed::{Bed, Given, Hook, Ran, Sum};
pub use frame::Bytes;
pub use memory::Memory;
pub use scene::{Places, Scene, Service};
pub use sent::{Carries, Extension, Part, Sent, assert_checksums};
pub use world::{Noted, World};
