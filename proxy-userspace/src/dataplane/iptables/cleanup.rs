//! Removes rules of this mode and of others: all of them, or what is not of the mode that runs.

use std::io;

use super::{
    Iptables, IptablesError, IptablesSettings, ROUTE_LOCALNET, detect, names::Table, removal, removal::Left,
    routes_localnet,
};
use crate::{
    kernel::{KernelError, iptables::Iptables as Commands},
    model::IpFamily,
};

impl Iptables {
    /// Removes all that any process ever wrote, in both kinds of iptables; goes on past errors and returns them all.
    pub fn remove(settings: &IptablesSettings) -> Vec<IptablesError> {
        let installed = detect::installed(&settings.path);
        let mut errors: Vec<KernelError> = set_route_localnet_back(&installed).err().into_iter().collect();
        let remove = |commands: &Commands| remove(commands, nothing_left(commands, false));
        errors.extend(installed.iter().flat_map(|(_, commands)| remove(commands)));
        errors.into_iter().map(IptablesError::Kernel).collect()
    }

    /// Removes what other modes and the iptables that the node does not use hold beside the rules of this mode.
    pub fn remove_others(settings: &IptablesSettings) -> Vec<IptablesError> {
        Self::remove_but(settings, true, |_| Left::IptablesMode)
    }

    /// Removes what this mode and others hold beside the rules of the ipvs mode, in both kinds of iptables.
    pub fn remove_beside_ipvs(settings: &IptablesSettings) -> Vec<IptablesError> {
        let routes = set_route_localnet_back(&detect::installed(&settings.path));
        let mut errors: Vec<_> = routes.err().into_iter().map(IptablesError::Kernel).collect();
        errors.extend(Self::remove_but(settings, false, |commands| match nothing_left(commands, false) {
            Left::Nothing { but_kubelet_firewall, .. } => Left::IpvsMode { but_kubelet_firewall },
            left => left,
        }));
        errors
    }

    /// Of the iptables that the node uses something is left; of the other kind nothing.
    fn remove_but(
        settings: &IptablesSettings,
        but_note: bool,
        left: impl Fn(&Commands) -> Left,
    ) -> Vec<IptablesError> {
        let used = detect::in_use(&settings.path).unwrap_or_default();
        let is_used = |commands: &Commands| used.values().any(|used| used == commands);
        let remove = |commands: &Commands| {
            remove(
                commands,
                if is_used(commands) { left(commands) } else { nothing_left(commands, but_note) },
            )
        };
        let installed = detect::installed(&settings.path);
        installed.iter().flat_map(|(_, commands)| remove(commands)).map(IptablesError::Kernel).collect()
    }
}

/// The kubelet's own chain stays with it, and so it does where loopback addresses are routed: whoever wants them to be, it keeps
/// others from them.
fn nothing_left(commands: &Commands, but_note: bool) -> Left {
    let mangle = commands.save(Table::Mangle.name()).unwrap_or_default();
    let but_kubelet_firewall = removal::has_kubelet(&mangle) || routes_localnet().unwrap_or(true);
    Left::Nothing { but_kubelet_firewall, but_note }
}

/// If it was this mode that set it. Before the chain goes that keeps others from loopback addresses.
fn set_route_localnet_back(installed: &[(IpFamily, Commands)]) -> Result<(), KernelError> {
    let is_noted = |commands: &Commands| {
        commands.save(Table::Mangle.name()).is_ok_and(|saved| removal::has_set_route_localnet(&saved))
    };
    if routes_localnet()? && installed.iter().any(|(_, commands)| is_noted(commands)) {
        tracing::info!("setting route_localnet back to 0: node ports are no longer served on 127.0.0.1");
        ROUTE_LOCALNET.write(0)?;
    }
    Ok(())
}

fn remove(commands: &Commands, left: Left) -> Vec<KernelError> {
    let remove_from = |table: Table| {
        let saved = commands.save(table.name())?;
        if !Commands::is_shown(&saved) {
            let why = "it holds rules that iptables does not know; remove those with nft first";
            let table = format!("table {} of {commands}", table.name());
            return Err(KernelError::call("list", table)(io::Error::other(why)));
        }
        let input = removal::input(table, &saved, commands.backend, left);
        input.map_or(Ok(()), |input| commands.restore_all(input))
    };
    Table::ALL.into_iter().filter_map(|table| remove_from(table).err()).collect()
}
