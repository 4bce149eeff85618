//! Which iptables the node uses, nftables' or the old one, told as upstream's iptables-wrapper tells
//! (<https://github.com/kubernetes-sigs/iptables-wrappers>): two programs that use different ones do not see each other's rules.

use std::collections::BTreeMap;

use super::names::Table;
use crate::{
    kernel::{
        KernelError,
        command::SearchPath,
        iptables::{Backend, Family, Iptables},
    },
    model::IpFamily,
};

/// Chains that the kubelet makes in the table mangle of the iptables it uses.
const HINTS: [&str; 2] = [":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY "];

/// What rules of a family are worked with.
pub(super) const fn family(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::V4,
        IpFamily::V6 => Family::V6,
    }
}

/// All that is installed, of families that this network namespace has.
pub(super) fn installed(path: &SearchPath) -> Vec<(IpFamily, Iptables)> {
    let families = IpFamily::ALL.into_iter().filter(|of| family(*of).is_available());
    families
        .flat_map(|of| Iptables::installed(family(of), path).into_iter().map(move |iptables| (of, iptables)))
        .collect()
}

/// The commands to use, by family; an error where there are none for IPv4.
pub(in crate::dataplane) fn in_use(path: &SearchPath) -> Result<BTreeMap<IpFamily, Iptables>, KernelError> {
    let installed = installed(path);
    let backend = backend(&installed);
    let used = installed.into_iter().filter(|(_, iptables)| iptables.backend == backend);
    let used: BTreeMap<_, _> = used.collect();
    if used.contains_key(&IpFamily::V4) {
        Ok(used)
    } else {
        Err(KernelError::CommandNotFound { program: "iptables-restore".into() })
    }
}

fn backend(installed: &[(IpFamily, Iptables)]) -> Backend {
    let of = |backend| installed.iter().map(|(_, iptables)| iptables).filter(move |i| i.backend == backend);
    let is_hinted = |backend| of(backend).any(|iptables| has_hint(&saved(iptables, Table::Mangle)));
    let rules = |backend| of(backend).map(count_rules).sum::<usize>();
    for backend in [Backend::Nft, Backend::Legacy] {
        let other = if backend == Backend::Nft { Backend::Legacy } else { Backend::Nft };
        if of(other).next().is_none() || is_hinted(backend) {
            return backend;
        }
    }
    if rules(Backend::Legacy) > rules(Backend::Nft) { Backend::Legacy } else { Backend::Nft }
}

/// What cannot be read holds nothing, as upstream takes it.
fn saved(iptables: &Iptables, table: Table) -> String {
    iptables.save(table.name()).unwrap_or_default()
}

fn has_hint(saved: &str) -> bool {
    saved.lines().any(|line| HINTS.iter().any(|hint| line.starts_with(hint)))
}

fn count_rules(iptables: &Iptables) -> usize {
    let rules = |table| saved(iptables, table).lines().filter(|line| line.starts_with('-')).count();
    Table::ALL.into_iter().map(rules).sum()
}
