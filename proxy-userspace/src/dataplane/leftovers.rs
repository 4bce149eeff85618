//! What kube-proxy's ipvs mode leaves in the kernel, and its removal.

use std::fs;

use crate::kernel::{
    KernelError,
    command::{Command, SearchPath},
};

/// The link that holds the addresses of Services in ipvs mode.
const DUMMY_LINK: &str = "kube-ipvs0";
/// What the names of its ipsets begin with.
const SETS: &str = "KUBE-";

/// Removes the link, the virtual servers and the sets of the ipvs mode; its chains must be gone before, since they use the sets.
/// Where the link is, virtual servers are kube-proxy's, as upstream's own cleanup takes them.
pub fn remove_ipvs(path: &SearchPath) -> Vec<KernelError> {
    let mut errors = Vec::new();
    if fs::exists(format!("/sys/class/net/{DUMMY_LINK}")).unwrap_or(false) {
        if has_virtual_servers() {
            errors.extend(Command::new("ipvsadm", path).args(["--clear"]).run().err());
        }
        errors.extend(Command::new("ip", path).args(["link", "delete", DUMMY_LINK]).run().err());
    }
    errors.extend(remove_sets(path).err());
    errors
}

fn has_virtual_servers() -> bool {
    let lines = fs::read_to_string("/proc/thread-self/net/ip_vs").unwrap_or_default();
    lines.lines().any(|line| ["TCP", "UDP", "SCTP"].iter().any(|protocol| line.starts_with(protocol)))
}

/// Where there is no ipset, there are no sets that we could have a name for.
fn remove_sets(path: &SearchPath) -> Result<(), KernelError> {
    let listed = match Command::new("ipset", path).args(["list", "-name"]).run() {
        Ok(output) => output.stdout,
        Err(KernelError::CommandNotFound { .. }) => return Ok(()),
        // A kernel without ipset.
        Err(KernelError::CommandFailed { stderr, .. }) if stderr.contains("Kernel error received") => {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for set in listed.lines().filter(|name| is_of_ipvs_mode(name)) {
        Command::new("ipset", path).args(["destroy", set]).run()?;
    }
    Ok(())
}

/// The names that upstream gives its sets (`pkg/proxy/ipvs/ipset.go`), and no others that begin alike.
fn is_of_ipvs_mode(set: &str) -> bool {
    const KINDS: [&str; 6] =
        ["CLUSTER-IP", "EXTERNAL-IP", "LOAD-BALANCER", "LOOP-BACK", "NODE-PORT", "HEALTH-CHECK-NODE-PORT"];
    let Some(rest) = set.strip_prefix(SETS) else { return false };
    let rest = rest.strip_prefix("6-").unwrap_or(rest);
    rest == "IPVS-IPS" || KINDS.iter().any(|kind| rest.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_the_ipvs_mode_are_told_from_those_of_others() {
        for set in [
            "KUBE-CLUSTER-IP",
            "KUBE-6-LOAD-BALANCER-SOURCE-CID",
            "KUBE-NODE-PORT-LOCAL-TCP",
            "KUBE-IPVS-IPS",
        ] {
            assert!(is_of_ipvs_mode(set), "{set}");
        }
        for set in ["KUBE-ROUTER-ALL", "KUBE-SRC-AAAA", "cali40all", "KUBE-"] {
            assert!(!is_of_ipvs_mode(set), "{set}");
        }
    }
}
