//! The errors of the ipvs mode.

use crate::{
    dataplane::FamilyError,
    kernel::KernelError,
    model::{IpFamily, ServicePortKey},
};

/// An error of the ipvs mode.
#[derive(Debug, thiserror::Error)]
pub enum IpvsError {
    /// A command or system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel has no IPVS.
    #[error(
        "this kernel has no IPVS, built in or as a module (CONFIG_IP_VS): load it on the node with `modprobe ip_vs`, or choose \
         another mode: {0}"
    )]
    NoIpvs(#[source] KernelError),
    /// The kernel does not have the scheduler.
    #[error(
        "this kernel has no IPVS scheduler {name}, built in or as a module (ip_vs_{name}): load it on the node with `modprobe \
         ip_vs_{name}`, or set ipvs.scheduler (--ipvs-scheduler) to one that it has, such as rr: {source}"
    )]
    NoScheduler {
        /// The name of the scheduler.
        name: String,
        /// The kernel's error.
        source: KernelError,
    },
    /// The IPVS of the kernel does not work with conntrack.
    #[error(
        "IPVS of this kernel does not use conntrack, without which rules cannot masquerade its connections: the sysctl \
         net.ipv4.vs.conntrack does not exist (CONFIG_IP_VS_NFCT): use another kernel, or choose another mode"
    )]
    NoConntrack,
    /// The kernel has no dummy links.
    #[error(
        "this kernel has no dummy links, which hold the addresses of Services (CONFIG_DUMMY): load them on the node with \
         `modprobe dummy`: {0}"
    )]
    NoDummyLinks(#[source] KernelError),
    /// The command ipset does not work, or the kernel has no ipsets.
    #[error(
        "cannot use ipset, which the mode's rules need: install ipset; the kernel needs CONFIG_IP_SET: {0}"
    )]
    NoIpset(#[source] KernelError),
    /// Some service ports are not served completely. All others are.
    #[error(
        "the kernel rejected objects of {count} service ports, which are left out; the first is {first}: {message}"
    )]
    LeftOut {
        /// The number of service ports.
        count: usize,
        /// One of them.
        first: ServicePortKey,
        /// Why the kernel rejected its object.
        message: String,
    },
    /// The kernel rejected more than this number of entries of ipsets in one step.
    #[error(
        "the kernel rejected more than {0} entries of ipsets at once: the entries after them are missing"
    )]
    TooManyRejected(usize),
    /// Only the rules of one family failed. Everything else was applied.
    #[error(transparent)]
    OfFamily(#[from] FamilyError<IpvsError>),
    /// Some changes of virtual and real servers failed. All others were made.
    #[error("cannot make {count} of {all} changes to IPVS; the first: {source}")]
    Servers {
        /// The number of changes that failed.
        count: usize,
        /// The number of all changes.
        all: usize,
        /// The family of those that failed, if it is one.
        family: Option<IpFamily>,
        /// The first error.
        source: KernelError,
    },
    /// Some addresses of the dummy link could not be added or deleted. All others were.
    #[error("cannot change addresses of the dummy link; the first: {source}")]
    Addresses {
        /// The family of these addresses, if it is one.
        family: Option<IpFamily>,
        /// The first error.
        source: KernelError,
    },
    /// Rules could not be written.
    #[error("cannot write {family} rules: {source}")]
    Rules {
        /// The family.
        family: IpFamily,
        /// The command's error.
        source: KernelError,
    },
}

impl IpvsError {
    /// Returns the family of everything that failed, if it is one.
    pub(super) const fn family(&self) -> Option<IpFamily> {
        match self {
            Self::Rules { family, .. } => Some(*family),
            Self::Servers { family, .. } | Self::Addresses { family, .. } => *family,
            _ => None,
        }
    }
}
