//! What can go wrong.

use crate::{
    dataplane::OneFamily,
    kernel::KernelError,
    model::{IpFamily, ServicePortKey},
};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum IpvsError {
    /// A command or the kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel has no IPVS.
    #[error(
        "this kernel has no IPVS, built in or as a module (CONFIG_IP_VS): load it on the node with `modprobe ip_vs`, or choose \
         another mode: {source}"
    )]
    NoIpvs {
        /// What it said.
        source: KernelError,
    },
    /// The kernel does not have the scheduler.
    #[error(
        "this kernel has no IPVS scheduler {name}, built in or as a module (ip_vs_{name}): load it on the node with `modprobe \
         ip_vs_{name}`, or set ipvs.scheduler (--ipvs-scheduler) to one that it has, such as rr: {source}"
    )]
    NoScheduler {
        /// Its name.
        name: String,
        /// What it said.
        source: KernelError,
    },
    /// The kernel has no dummy links.
    #[error(
        "this kernel has no dummy links, which hold the addresses of Services (CONFIG_DUMMY): load them on the node with \
         `modprobe dummy`: {source}"
    )]
    NoDummyLinks {
        /// What it said.
        source: KernelError,
    },
    /// ipset, or the kernel's part of it.
    #[error(
        "ipset does not work, which the mode's rules match by: install ipset; the kernel needs CONFIG_IP_SET: {source}"
    )]
    NoIpset {
        /// What it said.
        source: KernelError,
    },
    /// Some service ports are not served as asked for; all others are.
    #[error(
        "the kernel refuses something of {count} service ports, which is left out; the first is {first}: {said}"
    )]
    LeftOut {
        /// How many.
        count: usize,
        /// One of them.
        first: ServicePortKey,
        /// What was said of it.
        said: String,
    },
    /// More than can be told apart at once.
    #[error("more than {most} entries of ipsets are refused at once")]
    TooManyRefused {
        /// So many were left out, and those after them are not there.
        most: usize,
    },
    /// The rules of one family alone failed; all else is as it should be.
    #[error(transparent)]
    OfFamily(#[from] OneFamily<IpvsError>),
    /// Some changes were refused; all others were made.
    #[error("{count} of {all} changes to IPVS were refused; the first: {source}")]
    Refused {
        /// How many.
        count: usize,
        /// Of how many.
        all: usize,
        /// The first of them.
        source: KernelError,
    },
    /// Rules were not taken.
    #[error("{family} rules were refused: {source}")]
    Rules {
        /// The family.
        family: IpFamily,
        /// Why.
        source: KernelError,
    },
}

impl IpvsError {
    /// The family that it is of, if it is of one.
    pub(super) const fn family(&self) -> Option<IpFamily> {
        if let Self::Rules { family, .. } = self { Some(*family) } else { None }
    }
}
