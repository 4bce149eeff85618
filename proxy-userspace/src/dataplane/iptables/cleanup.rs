//! Removes the rules of kube-proxy's modes: all of them, or those that the running mode does not use.

use std::io;

use super::{
    Iptables, IptablesError, IptablesSettings, ROUTE_LOCALNET, detect,
    removal::{RemovalScope, has_kubelet, has_set_route_localnet, removal_input},
    routes_localnet,
};
use crate::{
    dataplane::iptables_text::Table,
    kernel::{KernelError, iptables::Iptables as Commands},
};

impl Iptables {
    /// Removes all that any process of both modes ever wrote, with both backends of iptables. Continues after
    /// errors and returns them all.
    pub fn remove(settings: &IptablesSettings) -> Vec<IptablesError> {
        let installed = detect::installed(&settings.launcher);
        let mut errors: Vec<KernelError> = reset_route_localnet(&installed).err().into_iter().collect();
        errors.extend(installed.iter().flat_map(|commands| remove(commands, all(commands, false))));
        errors.into_iter().map(IptablesError::Kernel).collect()
    }

    /// Removes what is not of this mode, and everything from the backend that the node does not use.
    pub fn remove_others(settings: &IptablesSettings) -> Vec<IptablesError> {
        Self::remove_but(settings, true, |_| RemovalScope::AllButIptablesMode)
    }

    /// Removes what is not of the ipvs mode, and everything from the backend that the node does not use.
    pub fn remove_beside_ipvs(settings: &IptablesSettings) -> Vec<IptablesError> {
        let reset = reset_route_localnet(&detect::installed(&settings.launcher));
        let mut errors: Vec<_> = reset.err().into_iter().map(IptablesError::Kernel).collect();
        errors.extend(Self::remove_but(settings, false, |commands| RemovalScope::AllButIpvsMode {
            keep_kubelet_firewall: needs_kubelet_firewall(commands),
        }));
        errors
    }

    fn remove_but(
        settings: &IptablesSettings,
        keep_routes_localnet: bool,
        scope_of_used: impl Fn(&Commands) -> RemovalScope,
    ) -> Vec<IptablesError> {
        let used = detect::in_use(&settings.launcher).unwrap_or_default();
        let scope = |commands: &Commands| {
            let is_used = used.values().any(|used| used == commands);
            if is_used { scope_of_used(commands) } else { all(commands, keep_routes_localnet) }
        };
        let installed = detect::installed(&settings.launcher);
        let errors = installed.iter().flat_map(|commands| remove(commands, scope(commands)));
        errors.map(IptablesError::Kernel).collect()
    }
}

fn all(commands: &Commands, keep_routes_localnet: bool) -> RemovalScope {
    RemovalScope::All { keep_kubelet_firewall: needs_kubelet_firewall(commands), keep_routes_localnet }
}

/// `KUBE-FIREWALL` stays if the kubelet uses it, or if the kernel routes loopback addresses: then the chain keeps
/// other hosts from them, for whoever set `route_localnet`.
fn needs_kubelet_firewall(commands: &Commands) -> bool {
    let mangle = commands.save(Table::Mangle.name()).unwrap_or_default();
    has_kubelet(&mangle) || routes_localnet().unwrap_or(true)
}

/// Sets `route_localnet` to 0 if the iptables mode set it. The caller removes `KUBE-FIREWALL`, which keeps other
/// hosts from loopback addresses, only after that.
fn reset_route_localnet(installed: &[Commands]) -> Result<(), KernelError> {
    let is_recorded = |commands: &Commands| {
        commands.save(Table::Mangle.name()).is_ok_and(|saved| has_set_route_localnet(&saved))
    };
    if routes_localnet()? && installed.iter().any(is_recorded) {
        tracing::info!("setting route_localnet to 0: node ports are not served on 127.0.0.1 any more");
        ROUTE_LOCALNET.write(0)?;
    }
    Ok(())
}

fn remove(commands: &Commands, scope: RemovalScope) -> Vec<KernelError> {
    let remove_from = |table: Table| {
        let saved = commands.save(table.name())?;
        if !Commands::is_complete(&saved) {
            let why = "it holds rules that iptables does not know; remove them with nft first";
            let table = format!("table {} of {commands}", table.name());
            return Err(KernelError::call("list", table)(io::Error::other(why)));
        }
        let input = removal_input(table, &saved, commands.backend, scope);
        input.map_or(Ok(()), |input| commands.restore_all(input))
    };
    Table::ALL.into_iter().filter_map(|table| remove_from(table).err()).collect()
}
