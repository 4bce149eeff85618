//! Settings of the node that do not belong to a Service (conntrack limits, `oom_score_adj`), and
//! Kubernetes Events.
#![forbid(unsafe_code)]

mod conntrack;
mod event;

pub use conntrack::ConntrackSettings;
pub use event::{NodeEvent, NodeEvents, PendingEvents, RecentEvent};

use std::{collections::BTreeSet, net::IpAddr};

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

/// Returns true if this node has IPv4 addresses and does not forward IPv4 packets: clients outside
/// the node cannot reach its pods. Upstream turns it on in the ipvs mode only; otherwise the pod
/// network does.
pub fn lacks_ipv4_forwarding() -> Result<bool, KernelError> {
    Ok(FORWARD.read()? == Some(0) && has_ipv4(&kernel::netns::addresses()?))
}

/// Link-local addresses, such as that of a DNS cache, say nothing about the node.
fn has_ipv4(addresses: &BTreeSet<IpAddr>) -> bool {
    addresses.iter().any(|address| matches!(address, IpAddr::V4(v4) if !v4.is_link_local()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_ipv6_alone_needs_no_ipv4_forwarding() {
        let has_ipv4 = |texts: &[&str]| has_ipv4(&texts.iter().map(|text| text.parse().unwrap()).collect());
        assert!(has_ipv4(&["2001:db8::1", "192.0.2.1"]));
        assert!(!has_ipv4(&["2001:db8::1", "169.254.20.10"]));
    }
}
