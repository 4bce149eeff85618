//! Finds out which modes of kube-proxy have rules in the kernel, whoever wrote them.

use super::{Mode, iptables::Iptables, ipvs, nftables::Nftables};
use crate::kernel::command::Launcher;

/// Returns the modes of kube-proxy whose rules are in the kernel. Those of the ipvs mode include
/// chains of iptables.
pub fn modes_with_rules(launcher: &Launcher) -> Vec<Mode> {
    let found = [
        (Mode::Nftables, Nftables::has_tables()),
        (Mode::Iptables, Iptables::has_rules(launcher)),
        (Mode::Ipvs, ipvs::has_link()),
    ];
    found.into_iter().filter(|(_, is_there)| *is_there).map(|(mode, _)| mode).collect()
}
