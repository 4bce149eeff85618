//! The sysctls that kube-proxy's ipvs mode sets (`NewProxier` of `pkg/proxy/ipvs/proxier.go`).

use nix::sys::utsname::uname;

use super::{error::IpvsError, settings::IpvsSettings};
use crate::kernel::{KernelError, ipvs, probe, sysctl::Sysctl};

const CONNTRACK: Sysctl = Sysctl("ipv4/vs/conntrack");
const EXPIRE_NODEST: Sysctl = Sysctl("ipv4/vs/expire_nodest_conn");
const EXPIRE_QUIESCENT: Sysctl = Sysctl("ipv4/vs/expire_quiescent_template");

/// The first kernel in which a reused client port reaches a real server without delay even if
/// `conn_reuse_mode` is 1 (<https://github.com/kubernetes/kubernetes/issues/93297>).
const REUSE_FIXED: (u32, u32) = (5, 9);
/// The first kernel that has `conn_reuse_mode`.
const REUSE_INTRODUCED: (u32, u32) = (4, 1);

/// Returns the sysctls that exist on this kernel and have the wrong value, with the right value.
pub(super) fn to_change(settings: &IpvsSettings) -> Result<Vec<(Sysctl, i64)>, KernelError> {
    let kernel = uname().ok().and_then(|uname| probe::version(&uname.release().to_string_lossy()));
    let mut changes = Vec::new();
    for (setting, value) in desired(settings, kernel) {
        match setting.read()? {
            Some(held) if held != value => changes.push((setting, value)),
            Some(_) => {}
            None => tracing::debug!(setting = setting.0, "this kernel does not have the sysctl"),
        }
    }
    Ok(changes)
}

/// Loads the module and sets the sysctls of this mode, for a process that may not set them.
/// Continues after errors and returns them all.
pub fn set_up_kernel(settings: &IpvsSettings) -> Vec<KernelError> {
    ipvs::load_module(&settings.launcher);
    match to_change(settings) {
        Ok(changes) => changes.into_iter().filter_map(|(name, value)| write(name, value).err()).collect(),
        Err(error) => vec![error],
    }
}

/// Writes a sysctl.
pub(super) fn write(setting: Sysctl, value: i64) -> Result<(), KernelError> {
    tracing::info!(setting = setting.0, value, "setting the sysctl");
    setting.write(value)
}

/// Fails, as upstream, if the kernel does not have the sysctl that the mode needs, and logs the
/// consequence if it does not have another one. `read` returns the value of a sysctl.
pub(super) fn check(read: impl Fn(Sysctl) -> Result<Option<i64>, KernelError>) -> Result<(), IpvsError> {
    if read(CONNTRACK)?.is_none() {
        return Err(IpvsError::NoConntrack);
    }
    for (setting, consequence) in [
        (
            EXPIRE_NODEST,
            "packets of connections to removed endpoints are dropped until the connections time out",
        ),
        (EXPIRE_QUIESCENT, "clients with affinity stay with an endpoint that is being removed"),
    ] {
        if read(setting)?.is_none() {
            tracing::warn!(setting = setting.0, "this kernel does not have the sysctl: {consequence}");
        }
    }
    Ok(())
}

fn desired(settings: &IpvsSettings, kernel: Option<(u32, u32)>) -> Vec<(Sysctl, i64)> {
    let mut desired = vec![
        // Connections are tracked. Only then can rules masquerade what IPVS translated.
        (CONNTRACK, 1),
        // A packet to a removed real server ends the connection. Clients with affinity then move to
        // another real server.
        (EXPIRE_NODEST, 1),
        (EXPIRE_QUIESCENT, 1),
        (Sysctl("ipv4/ip_forward"), 1),
    ];
    if kernel.is_some_and(|kernel| (REUSE_INTRODUCED..REUSE_FIXED).contains(&kernel)) {
        desired.push((Sysctl("ipv4/vs/conn_reuse_mode"), 0));
    }
    if settings.strict_arp {
        // The node does not announce addresses of Services by ARP.
        desired.push((Sysctl("ipv4/conf/all/arp_ignore"), 1));
        desired.push((Sysctl("ipv4/conf/all/arp_announce"), 2));
    }
    desired
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(settings: &IpvsSettings, kernel: (u32, u32)) -> Vec<&'static str> {
        desired(settings, Some(kernel)).into_iter().map(|(setting, _)| setting.0).collect()
    }

    #[test]
    fn only_the_sysctl_for_conntrack_is_required() {
        let without = |missing: &[Sysctl]| check(|setting| Ok((!missing.contains(&setting)).then_some(0)));
        assert!(matches!(without(&[CONNTRACK]), Err(IpvsError::NoConntrack)));
        assert!(without(&[EXPIRE_NODEST, EXPIRE_QUIESCENT]).is_ok());
    }

    #[test]
    fn conn_reuse_mode_is_set_on_kernels_that_need_it() {
        let settings = IpvsSettings::default();
        for (kernel, is_set) in
            [((4, 0), false), ((4, 19), true), ((5, 8), true), ((5, 9), false), ((6, 1), false)]
        {
            assert_eq!(names(&settings, kernel).contains(&"ipv4/vs/conn_reuse_mode"), is_set, "{kernel:?}");
        }
    }

    #[test]
    fn arp_sysctls_are_set_only_if_strict_arp_is_on() {
        assert!(!names(&IpvsSettings::default(), (6, 1)).contains(&"ipv4/conf/all/arp_ignore"));
        let strict = IpvsSettings { strict_arp: true, ..IpvsSettings::default() };
        assert!(names(&strict, (6, 1)).contains(&"ipv4/conf/all/arp_announce"));
    }
}
