//! Compares what the kernel holds now with what was written for service ports. Repairs nothing.

use super::{ebpf, iptables, ipvs, nftables};
use crate::kernel::KernelError;

/// What the kernel holds of a mode, as far as it can be compared.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum Held {
    /// The maps of the programs. Their entries are read while they are compared.
    Programs(ebpf::HeldMaps),
    /// The tables of the nftables mode.
    Nftables(nftables::HeldTables),
    /// The tables of the iptables mode.
    Iptables(iptables::HeldTables),
    /// The virtual servers, sets and rules of the ipvs mode.
    Ipvs(ipvs::HeldObjects),
    /// Those of the programs, and of the backstop beneath them.
    Both(Box<(Self, Self)>),
}

/// Reads what the kernel holds. It may take seconds, and runs beside the sync loop.
pub type HeldReader = Box<dyn FnOnce() -> Result<Held, KernelError> + Send>;

/// Describes an object that the kernel should hold: `None` if it holds the same.
pub(super) fn difference<T: PartialEq>(
    wanted: &T,
    held: Option<&T>,
    describe: impl FnOnce(&T) -> String,
) -> Option<String> {
    match held {
        Some(held) if held == wanted => None,
        Some(_) => Some(format!("{} has another value", describe(wanted))),
        None => Some(format!("{} is missing", describe(wanted))),
    }
}
