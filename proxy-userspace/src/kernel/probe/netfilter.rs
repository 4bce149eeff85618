//! Probes nft and iptables with the kinds of rules that Services need.

use super::Fact;
use crate::{
    kernel::{KernelError, command::Launcher, iptables::Iptables, nft::Nft},
    net::IpFamily,
};

/// Hooks and statements that need a module or a newer kernel.
const NFT_TRIAL: &str = "
table inet shunt_probe {
    chain prerouting {
        type filter hook prerouting priority mangle;
        meta mark 1 meta l4proto tcp reject with tcp reset
        meta mark 1 reject with icmpx type port-unreachable
    }
    chain forward {
        type filter hook forward priority filter;
        meta mark 1 ct state invalid drop
    }
    chain postrouting {
        type nat hook postrouting priority srcnat - 1;
        meta mark 1 masquerade fully-random
    }
}
";

pub(super) fn nftables(launcher: &Launcher) -> Fact {
    Fact::of(Nft::new(launcher.clone()).apply(NFT_TRIAL))
}

/// Probes iptables. One working family and backend is enough; the details name what does not work.
pub(super) fn iptables(launcher: &Launcher) -> Fact {
    let mut found = Vec::new();
    let mut errors = Vec::new();
    for iptables in IpFamily::ALL.into_iter().flat_map(|family| Iptables::installed(family, launcher)) {
        match iptables.try_rules() {
            Ok(()) => found.push(iptables.to_string()),
            Err(error) => errors.push(error.to_string()),
        }
    }
    if !found.is_empty() {
        let found = [vec![found.join(", ")], errors].concat();
        return Fact::Present(found.join("; "));
    }
    if errors.is_empty() {
        let error = KernelError::CommandNotFound("iptables".into());
        return Fact::Missing(error.to_string());
    }
    Fact::Missing(errors.join("; "))
}
