//! Settings of the kernel that upstream's ipvs mode makes (`NewProxier` of `pkg/proxy/ipvs/proxier.go`).

use super::IpvsSettings;
use crate::kernel::{KernelError, sysctl::NetSetting};

/// From this kernel on, and not before 4.1, a client port that is used again finds a real server at once also where
/// `conn_reuse_mode` is 1 (<https://github.com/kubernetes/kubernetes/issues/93297>).
const REUSE_IS_RIGHT: (u32, u32) = (5, 9);
const REUSE_CAN_BE_SET: (u32, u32) = (4, 1);

/// What is to be changed for these settings on a kernel of this version: settings that are there and have other values.
pub(super) fn to_change(
    settings: &IpvsSettings,
    kernel: Option<(u32, u32)>,
) -> Result<Vec<(NetSetting, i64)>, KernelError> {
    let mut changes = Vec::new();
    for (setting, value) in wanted(settings, kernel) {
        match setting.read()? {
            Some(held) if held != value => changes.push((setting, value)),
            Some(_) => {}
            None => tracing::debug!(setting = setting.0, "this kernel does not have it"),
        }
    }
    Ok(changes)
}

fn wanted(settings: &IpvsSettings, kernel: Option<(u32, u32)>) -> Vec<(NetSetting, i64)> {
    let mut wanted = vec![
        // Connections are tracked, so that what was translated can be masqueraded too.
        (NetSetting("ipv4/vs/conntrack"), 1),
        // Packets to a real server that is gone end the connection, and clients with affinity move on.
        (NetSetting("ipv4/vs/expire_nodest_conn"), 1),
        (NetSetting("ipv4/vs/expire_quiescent_template"), 1),
        (NetSetting("ipv4/ip_forward"), 1),
    ];
    if kernel.is_some_and(|kernel| (REUSE_CAN_BE_SET..REUSE_IS_RIGHT).contains(&kernel)) {
        wanted.push((NetSetting("ipv4/vs/conn_reuse_mode"), 0));
    }
    if settings.strict_arp {
        // Nobody is told by ARP that this node has the addresses of Services.
        wanted.push((NetSetting("ipv4/conf/all/arp_ignore"), 1));
        wanted.push((NetSetting("ipv4/conf/all/arp_announce"), 2));
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(settings: &IpvsSettings, kernel: (u32, u32)) -> Vec<&'static str> {
        wanted(settings, Some(kernel)).into_iter().map(|(setting, _)| setting.0).collect()
    }

    #[test]
    fn connections_are_reused_as_the_kernels_version_asks_for() {
        let settings = IpvsSettings::default();
        for (kernel, is_set) in
            [((4, 0), false), ((4, 19), true), ((5, 8), true), ((5, 9), false), ((6, 1), false)]
        {
            assert_eq!(names(&settings, kernel).contains(&"ipv4/vs/conn_reuse_mode"), is_set, "{kernel:?}");
        }
    }

    #[test]
    fn arp_is_left_alone_unless_it_is_to_be_strict() {
        assert!(!names(&IpvsSettings::default(), (6, 1)).contains(&"ipv4/conf/all/arp_ignore"));
        let strict = IpvsSettings { strict_arp: true, ..IpvsSettings::default() };
        assert!(names(&strict, (6, 1)).contains(&"ipv4/conf/all/arp_announce"));
    }
}
