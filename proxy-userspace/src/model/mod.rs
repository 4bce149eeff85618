//! What Services mean on this node: objects in, [`Snapshot`] out, without I/O and without a clock.
#![forbid(unsafe_code)]

mod objects;
mod settings;
mod snapshot;
mod state;

pub use objects::*;
pub use settings::*;
pub use snapshot::*;
pub use state::Model;
