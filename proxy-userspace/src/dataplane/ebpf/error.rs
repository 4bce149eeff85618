//! Errors of the eBPF dataplane.

use std::sync::Arc;

use crate::kernel::KernelError;

/// An error of the eBPF dataplane.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The kernel refused something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The netfilter rules are wrong or missing. All service ports are programmed.
    #[error("cannot install the netfilter rules: {0}")]
    Rules(#[source] Arc<KernelError>),
    /// Some service ports or links are not programmed. All others are.
    #[error("cannot program {what}; the first is {first}: {source}")]
    Incomplete {
        /// Only service ports failed.
        only_ports: bool,
        /// What failed, with numbers.
        what: String,
        /// The first of these, and what may help.
        first: String,
        /// The cause.
        source: Box<KernelError>,
    },
}
