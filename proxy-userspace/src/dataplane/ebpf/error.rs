//! What can go wrong in the eBPF dataplane.

use crate::kernel::KernelError;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The kernel refused something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The netfilter rules are not as they should be; all service ports are.
    #[error("cannot put the netfilter rules: {source}")]
    Rules {
        /// Why.
        source: KernelError,
    },
    /// Some service ports or links are not as they should be; all others are.
    #[error("cannot program {what}; the first is {first}: {source}")]
    Incomplete {
        /// How many of which.
        what: String,
        /// One of them, and what may help.
        first: String,
        /// Why.
        source: Box<KernelError>,
    },
}
