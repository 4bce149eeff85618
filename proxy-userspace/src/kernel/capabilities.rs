//! Whether this process may do with eBPF what is asked of it: the kernel's own answers do not say what is missing.

use super::KernelError;

const STATUS: &str = "/proc/self/status";

const CAP_SYS_ADMIN: u32 = 21;
/// What has taken the place of `CAP_SYS_ADMIN` for eBPF: kernel 5.8 (2c78ee898d8f, c9d516cefe65).
const FOR_BPF: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];

/// Whether this process may load and attach programs.
pub fn check_bpf() -> Result<(), KernelError> {
    let status = std::fs::read_to_string(STATUS).map_err(KernelError::path("read", STATUS))?;
    let effective = effective(&status).unwrap_or(u64::MAX);
    let missing = missing_for_bpf(effective);
    if missing.is_empty() { Ok(()) } else { Err(KernelError::NotPermitted { missing: missing.join(", ") }) }
}

fn missing_for_bpf(effective: u64) -> Vec<&'static str> {
    let has = |capability: u32| effective & (1 << capability) != 0;
    if has(CAP_SYS_ADMIN) {
        return Vec::new();
    }
    FOR_BPF.iter().filter(|(_, capability)| !has(*capability)).map(|(name, _)| *name).collect()
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
            ("0000000000200000", vec![]),
            ("000000c000001000", vec![]),
            ("0000008000001000", vec!["CAP_PERFMON"]),
            ("0000000000000000", vec!["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]),
        ] {
            let status = format!("CapPrm:\t000001ffffffffff\nCapEff:\t{set}\nCapBnd:\t0\n");
            assert_eq!(missing_for_bpf(effective(&status).expect("a set")), missing, "{set}");
        }
    }
}
