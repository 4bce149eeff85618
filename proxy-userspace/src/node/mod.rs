//! Settings of the node that do not belong to a Service (conntrack limits, `oom_score_adj`), and
//! Kubernetes Events.
#![forbid(unsafe_code)]

mod conntrack;
mod event;

pub use conntrack::ConntrackSettings;
pub use event::{NodeEvent, NodeEvents, RecentEvent};

use crate::kernel::{self, KernelError, sysctl::Sysctl};

const FORWARD: Sysctl = Sysctl("ipv4/ip_forward");

/// Upstream's default (`KubeProxyOOMScoreAdj` in `pkg/kubelet/qos/policy.go`): the kernel kills it
/// late.
const OOM_SCORE_ADJ: i32 = -999;

/// The settings of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// `conntrack`.
    pub conntrack: ConntrackSettings,
    /// `oomScoreAdj`: from -1000, which means never, to 1000.
    pub oom_score_adj: i32,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self { conntrack: ConntrackSettings::default(), oom_score_adj: OOM_SCORE_ADJ }
    }
}

/// Makes all settings. Continues after errors and returns them.
pub fn set_up(settings: &NodeSettings) -> Vec<KernelError> {
    let mut errors = set_up_kernel(settings);
    errors.extend(kernel::sysctl::set_oom_score_adj(settings.oom_score_adj).err());
    errors
}

/// Makes the settings of the kernel, but not those of this process.
pub fn set_up_kernel(settings: &NodeSettings) -> Vec<KernelError> {
    settings.conntrack.set(kernel::sysctl::processors())
}

/// Returns true if this node forwards IPv4 packets. If it does not, clients outside the node cannot
/// reach its pods. Upstream turns it on in the ipvs mode only; otherwise the pod network does.
pub fn forwards_ipv4() -> Result<bool, KernelError> {
    Ok(FORWARD.read()? != Some(0))
}
