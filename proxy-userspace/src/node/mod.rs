//! What is done on the node beside all that is done for Services: what is set at start, conntrack's limits and how soon the kernel
//! may kill this process for want of memory, and what is told of it.
#![forbid(unsafe_code)]

mod conntrack;
mod event;

pub use conntrack::ConntrackSettings;
pub use event::{NodeEvent, NodeEvents};

use crate::kernel::{self, KernelError, sysctl::Sysctl};

const FORWARD: Sysctl = Sysctl("ipv4/ip_forward");

/// Upstream's default (`KubeProxyOOMScoreAdj` in `pkg/kubelet/qos/policy.go`): one of the last.
const OOM_SCORE_ADJ: i32 = -999;

/// What to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// `conntrack`.
    pub conntrack: ConntrackSettings,
    /// `oomScoreAdj`: from -1000, never, to 1000.
    pub oom_score_adj: i32,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self { conntrack: ConntrackSettings::default(), oom_score_adj: OOM_SCORE_ADJ }
    }
}

/// Sets all, going on past errors, which are returned.
pub fn set_up(settings: &NodeSettings) -> Vec<KernelError> {
    let mut errors = set_up_kernel(settings);
    errors.extend(kernel::sysctl::set_oom_score_adj(settings.oom_score_adj).err());
    errors
}

/// The same without what is of this process alone.
pub fn set_up_kernel(settings: &NodeSettings) -> Vec<KernelError> {
    settings.conntrack.set(kernel::sysctl::processors())
}

/// Whether this node passes IPv4 packets on. One that does not lets nobody from outside reach its pods. Upstream sees to it in the
/// ipvs mode only: in others it is for whoever gives pods their network to turn it on.
pub fn forwards() -> Result<bool, KernelError> {
    Ok(FORWARD.read()? != Some(0))
}
