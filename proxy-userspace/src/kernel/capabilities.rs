//! Whether this process may do what is asked of it: the kernel's own answers do not say what is missing.

use super::KernelError;

const STATUS: &str = "/proc/self/status";

/// A capability by its name and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability(&'static str, u32);

/// Netfilter, traffic control, links, sysctls of the network: no mode works without.
pub const NET_ADMIN: Capability = Capability("CAP_NET_ADMIN", 12);
/// Raw sockets, which the old iptables opens.
pub const NET_RAW: Capability = Capability("CAP_NET_RAW", 13);
/// Entering network namespaces, and all that [`FOR_BPF`] allows.
pub const SYS_ADMIN: Capability = Capability("CAP_SYS_ADMIN", 21);
/// What has taken the place of `CAP_SYS_ADMIN` for eBPF: kernel 5.8 (2c78ee898d8f, c9d516cefe65).
const FOR_BPF: [Capability; 2] = [Capability("CAP_PERFMON", 38), Capability("CAP_BPF", 39)];

/// Whether this process may load and attach programs.
pub fn check_bpf() -> Result<(), KernelError> {
    let missing = missing_for_bpf(own()?);
    if missing.is_empty() { Ok(()) } else { Err(KernelError::NotPermitted { missing: missing.join(", ") }) }
}

/// Whether this process may change anything of the network.
pub fn check_net_admin() -> Result<(), KernelError> {
    if is_held(NET_ADMIN)? { Ok(()) } else { Err(KernelError::NoNetAdmin) }
}

/// Whether this process has it.
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

/// The effective capabilities: bits by number.
fn effective(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_sys_admin_or_all_that_replaced_it_will_do() {
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
