//! Finds which iptables the node uses, nftables' or legacy, as upstream's iptables-wrapper does
//! (<https://github.com/kubernetes-sigs/iptables-wrappers>). Two programs that use different ones
//! do not see each other's rules.

use std::collections::BTreeMap;

use crate::{
    dataplane::iptables_text::{Chain, Table, has_chain, save},
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

/// Installed commands and what they see.
pub(super) struct Contents {
    pub(super) commands: Iptables,
    /// The lines of the table mangle. A table that cannot be read counts as empty, as upstream.
    mangle: String,
    /// The number of rules in all tables.
    rules: usize,
}

impl Contents {
    /// Reads the tables of all installed commands.
    pub(super) fn read(launcher: &Launcher) -> Vec<Self> {
        installed(launcher).into_iter().map(Self::of).collect()
    }

    fn of(commands: Iptables) -> Self {
        let (mut mangle, mut rules) = (String::new(), 0);
        for (table, saved) in save(&commands, &Table::ALL) {
            let saved = saved.unwrap_or_default();
            rules += saved.lines().filter(|line| line.starts_with('-')).count();
            if table == Table::Mangle {
                mangle = saved;
            }
        }
        Self { commands, mangle, rules }
    }

    /// Returns true if the table mangle has this chain.
    pub(super) fn mangle_has_chain(&self, chain: Chain) -> bool {
        has_chain(&self.mangle, chain)
    }
}

/// Returns the backend that the node uses; `None` if it has no commands for IPv4.
pub(super) fn backend_in_use(contents: &[Contents]) -> Option<Backend> {
    let of = |backend| contents.iter().filter(move |contents| contents.commands.backend == backend);
    let backend = choose(
        |backend| of(backend).next().is_some(),
        |backend| of(backend).any(|contents| has_hint(&contents.mangle)),
        |backend| of(backend).map(|contents| contents.rules).sum(),
    );
    of(backend).any(|contents| contents.commands.family == IpFamily::V4).then_some(backend)
}

/// Returns the commands to use, by family. Fails if there are none for IPv4.
fn in_use(launcher: &Launcher) -> Result<BTreeMap<IpFamily, Iptables>, KernelError> {
    let installed = installed(launcher);
    let of = |backend| installed.iter().filter(move |commands| commands.backend == backend);
    let mangle = |commands: &Iptables| commands.save(Table::Mangle.name()).unwrap_or_default();
    let backend = choose(
        |backend| of(backend).next().is_some(),
        |backend| of(backend).any(|commands| has_hint(&mangle(commands))),
        |backend| of(backend).map(|commands| Contents::of(commands.clone()).rules).sum(),
    );
    let used: BTreeMap<_, _> = of(backend).map(|commands| (commands.family, commands.clone())).collect();
    if used.contains_key(&IpFamily::V4) {
        Ok(used)
    } else {
        Err(KernelError::CommandNotFound("iptables-restore".into()))
    }
}

fn has_hint(mangle: &str) -> bool {
    HINTS.into_iter().any(|hint| has_chain(mangle, hint))
}

/// Chooses as upstream's iptables-wrapper does: the backend with the kubelet's hint, otherwise the
/// one with more rules.
fn choose(
    is_installed: impl Fn(Backend) -> bool,
    has_hint: impl Fn(Backend) -> bool,
    rules: impl Fn(Backend) -> usize,
) -> Backend {
    for (backend, other) in [(Backend::Nft, Backend::Legacy), (Backend::Legacy, Backend::Nft)] {
        if !is_installed(other) || has_hint(backend) {
            return backend;
        }
    }
    if rules(Backend::Legacy) > rules(Backend::Nft) { Backend::Legacy } else { Backend::Nft }
}

/// Returns the commands to use, by family, and logs them. Fails if there are none for IPv4.
///
/// Leaves out IPv6 if the kernel does not accept its rules, as upstream does
/// (`platformCheckSupported` in `cmd/kube-proxy/app/server_linux.go`).
pub(in crate::dataplane) fn find_commands(
    launcher: &Launcher,
) -> Result<BTreeMap<IpFamily, Iptables>, KernelError> {
    let mut commands = in_use(launcher)?;
    let refusal = match (commands.get(&IpFamily::V4), commands.get(&IpFamily::V6)) {
        (Some(v4), Some(v6)) => v6.ipv6_refusal(v4),
        _ => None,
    };
    if refusal.is_some() {
        commands.remove(&IpFamily::V6);
    }
    for family in IpFamily::ALL {
        if let Some(commands) = commands.get(&family) {
            tracing::info!(%family, %commands, "using these iptables commands");
        } else {
            let why = refusal.as_ref().map_or_else(
                || "the kernel has the family disabled, or its iptables commands are not installed".into(),
                KernelError::to_string,
            );
            tracing::warn!(%family, why, "Services of this IP family are not served");
        }
    }
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use super::*;

    /// Creates the iptables commands of both families. Those of IPv4 accept everything, those of
    /// IPv6 run `script`.
    fn commands_in(directory: &Path, script: &str) -> Launcher {
        for (prefix, script) in [("iptables-legacy", "exit 0"), ("ip6tables-legacy", script)] {
            for name in [prefix.to_owned(), format!("{prefix}-save"), format!("{prefix}-restore")] {
                let path = directory.join(name);
                fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
            }
        }
        Launcher::only_in([directory.to_owned()])
    }

    #[test]
    fn ipv6_is_left_out_if_the_kernel_has_no_tables_for_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let no_nat = "echo \"can't initialize ip6tables table `nat': Table does not exist\" >&2; exit 3";
        for (script, expected) in [(no_nat, &[IpFamily::V4][..]), ("exit 0", &IpFamily::ALL)] {
            let launcher = commands_in(directory.path(), script);
            let found = find_commands(&launcher).expect("IPv4 works");
            assert_eq!(found.into_keys().collect::<Vec<_>>(), expected, "{script}");
        }
    }
}
