//! Finds which iptables the node uses, nftables' or legacy, as upstream's iptables-wrapper does
//! (<https://github.com/kubernetes-sigs/iptables-wrappers>). Two programs that use different ones
//! do not see each other's rules.

use std::collections::BTreeMap;

use crate::{
    dataplane::iptables_text::{Chain, Table, has_chain},
    kernel::{
        KernelError,
        command::Launcher,
        iptables::{self, Backend, Iptables},
    },
    model::IpFamily,
};

/// Chains that the kubelet makes in the table mangle of the iptables that it uses.
const HINTS: [Chain; 2] = [Chain::Fixed("KUBE-IPTABLES-HINT"), Chain::Fixed("KUBE-KUBELET-CANARY")];

/// Returns all installed commands, for the families that this network namespace has.
pub(super) fn installed(launcher: &Launcher) -> Vec<Iptables> {
    let families = IpFamily::ALL.into_iter().filter(|family| iptables::is_available(*family));
    families.flat_map(|family| Iptables::installed(family, launcher)).collect()
}

/// Returns the commands to use, by family. Fails if there are none for IPv4.
pub(super) fn in_use(launcher: &Launcher) -> Result<BTreeMap<IpFamily, Iptables>, KernelError> {
    let installed = installed(launcher);
    let backend = backend(&installed);
    let used = installed.into_iter().filter(|iptables| iptables.backend == backend);
    let used: BTreeMap<_, _> = used.map(|iptables| (iptables.family, iptables)).collect();
    if used.contains_key(&IpFamily::V4) {
        Ok(used)
    } else {
        Err(KernelError::CommandNotFound("iptables-restore".into()))
    }
}

/// Returns the commands to use, by family, and logs them. Fails if there are none for IPv4.
pub(in crate::dataplane) fn find_commands(
    launcher: &Launcher,
) -> Result<BTreeMap<IpFamily, Iptables>, KernelError> {
    let commands = in_use(launcher)?;
    for family in IpFamily::ALL {
        if let Some(commands) = commands.get(&family) {
            tracing::info!(%family, %commands, "using these iptables commands");
        } else {
            let why = "the kernel has the family disabled, or its iptables commands are not installed";
            tracing::warn!(%family, why, "Services of this IP family are not served");
        }
    }
    Ok(commands)
}

fn backend(installed: &[Iptables]) -> Backend {
    let of = |backend| installed.iter().filter(move |iptables| iptables.backend == backend);
    let has_hint = |backend| of(backend).any(has_hint);
    let rules = |backend| of(backend).map(count_rules).sum::<usize>();
    for backend in [Backend::Nft, Backend::Legacy] {
        let other = if backend == Backend::Nft { Backend::Legacy } else { Backend::Nft };
        if of(other).next().is_none() || has_hint(backend) {
            return backend;
        }
    }
    if rules(Backend::Legacy) > rules(Backend::Nft) { Backend::Legacy } else { Backend::Nft }
}

/// Returns the output of iptables-save. A table that cannot be read counts as empty, as upstream.
fn saved(iptables: &Iptables, table: Table) -> String {
    iptables.save(table.name()).unwrap_or_default()
}

fn has_hint(iptables: &Iptables) -> bool {
    let mangle = saved(iptables, Table::Mangle);
    HINTS.into_iter().any(|hint| has_chain(&mangle, hint))
}

fn count_rules(iptables: &Iptables) -> usize {
    let rules = |table| saved(iptables, table).lines().filter(|line| line.starts_with('-')).count();
    Table::ALL.into_iter().map(rules).sum()
}
