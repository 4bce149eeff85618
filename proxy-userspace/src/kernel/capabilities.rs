//! Checks this process's capabilities: errors of the kernel do not say which one is missing.

use super::KernelError;

const STATUS: &str = "/proc/self/status";

/// A capability by its name and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability(&'static str, u32);

/// For netfilter, traffic control, links and network sysctls. Every mode needs it.
pub const NET_ADMIN: Capability = Capability("CAP_NET_ADMIN", 12);
/// For raw sockets, which iptables-legacy opens.
pub const NET_RAW: Capability = Capability("CAP_NET_RAW", 13);
/// For entering network namespaces, and for everything that [`FOR_BPF`] allows.
pub const SYS_ADMIN: Capability = Capability("CAP_SYS_ADMIN", 21);
/// Replaced `CAP_SYS_ADMIN` for eBPF in kernel 5.8 (2c78ee898d8f, c9d516cefe65).
const FOR_BPF: [Capability; 2] = [Capability("CAP_PERFMON", 38), Capability("CAP_BPF", 39)];

/// Returns an error if this process may not load and attach eBPF programs.
pub fn check_bpf() -> Result<(), KernelError> {
    let missing = missing_for_bpf(own()?);
    if missing.is_empty() { Ok(()) } else { Err(KernelError::NotPermitted(missing.join(", "))) }
}

/// Returns an error if this process may not change the network.
pub fn check_net_admin() -> Result<(), KernelError> {
    if is_held(NET_ADMIN)? { Ok(()) } else { Err(KernelError::NoNetAdmin) }
}

/// Returns true if this process has the capability.
pub fn is_held(capability: Capability) -> Result<bool, KernelError> {
    own().map(|effective| has(effective, capability))
}

fn own() -> Result<u64, KernelError> {
    let status = std::fs::read_to_string(STATUS).map_err(KernelError::path("read", STATUS))?;
    Ok(effective(&status).unwrap_or(u64::MAX))
}

fn has(effective: u64, Capability(_, number): Capability) -> bool {
    effective & (1 << number) != 0
}

fn missing_for_bpf(effective: u64) -> Vec<&'static str> {
    let for_bpf = FOR_BPF.into_iter().filter(|_| !has(effective, SYS_ADMIN));
    let needed = [NET_ADMIN].into_iter().chain(for_bpf);
    needed.filter(|capability| !has(effective, *capability)).map(|Capability(name, _)| name).collect()
}

/// Returns the effective capabilities as bits by number.
fn effective(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ebpf_needs_sys_admin_or_all_capabilities_that_replaced_it() {
        for (set, missing) in [
            ("000001ffffffffff", vec![]),
            ("0000000000201000", vec![]),
            ("0000000000200000", vec!["CAP_NET_ADMIN"]),
            ("000000c000001000", vec![]),
            ("0000008000001000", vec!["CAP_PERFMON"]),
            ("0000000000000000", vec!["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]),
        ] {
            let status = format!("CapPrm:\t000001ffffffffff\nCapEff:\t{set}\nCapBnd:\t0\n");
            assert_eq!(missing_for_bpf(effective(&status).expect("a set")), missing, "{set}");
        }
    }
}
