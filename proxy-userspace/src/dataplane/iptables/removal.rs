//! Removes the rules of kube-proxy's modes: all of them, or those that the running mode does not
//! use.

use std::io;

use super::{
    Iptables, IptablesError, IptablesSettings, ROUTE_LOCALNET,
    detect::{self, Contents},
    fixed_chains::MODE,
    routes_localnet,
};
use crate::{
    dataplane::{
        iptables_text::{
            Chain, KUBELET_FIREWALL, ModeChains, ROUTES_LOCALNET, SavedLine, Table, TableWriter, has_chain,
            save, saved_lines, target,
        },
        ipvs,
    },
    kernel::{
        KernelError,
        command::Launcher,
        iptables::{Backend, Iptables as Commands},
    },
};

/// The kubelet creates this chain in order to notice a flush. If it exists, the kubelet uses
/// `KUBE-FIREWALL` too.
const KUBELET_CANARY: Chain = Chain::Fixed("KUBE-KUBELET-CANARY");

/// The chain of Services, in both modes.
const SERVICES: Chain = Chain::Fixed("KUBE-SERVICES");

/// With more chains than this, iptables-nft is made to look at all of them: see [`TableWriter`].
const MANY_CHAINS: usize = 1000;

impl Iptables {
    /// Removes all that any process of both modes ever wrote, with both backends of iptables.
    /// Continues after errors and returns them all.
    pub fn remove(settings: &IptablesSettings) -> Vec<IptablesError> {
        remove_but(settings, None, false)
    }

    /// Returns true if any process, including kube-proxy, wrote the chain of Services with either
    /// backend of iptables.
    pub fn has_rules(launcher: &Launcher) -> bool {
        detect::installed(launcher).iter().any(|commands| {
            let saved = commands.save(Table::Nat.name());
            saved.is_ok_and(|saved| has_chain(&saved, SERVICES))
        })
    }

    /// Removes what is not of this mode, and everything from the backend that the node does not
    /// use.
    pub fn remove_others(settings: &IptablesSettings) -> Vec<IptablesError> {
        remove_but(settings, Some(&MODE), true)
    }

    /// Removes what is not of the ipvs mode, and everything from the backend that the node does not
    /// use.
    pub fn remove_all_but_ipvs(settings: &IptablesSettings) -> Vec<IptablesError> {
        remove_but(settings, Some(&ipvs::MODE), false)
    }
}

/// Removes all chains except those of a mode in the backend that the node uses, and
/// [`ROUTES_LOCALNET`] if `keeps_routes_localnet` is true.
fn remove_but(
    settings: &IptablesSettings,
    mode: Option<&'static ModeChains>,
    keeps_routes_localnet: bool,
) -> Vec<IptablesError> {
    let contents = Contents::read(&settings.launcher);
    let used = detect::backend_in_use(&contents);
    let mut errors = Vec::new();
    if !keeps_routes_localnet {
        errors.extend(reset_route_localnet(&contents).err());
    }
    for contents in &contents {
        let removal = Removal {
            mode: mode.filter(|_| used == Some(contents.commands.backend)),
            keeps_kubelet_firewall: needs_kubelet_firewall(contents),
            keeps_routes_localnet,
        };
        errors.extend(remove(&contents.commands, removal));
    }
    errors.into_iter().map(IptablesError::Kernel).collect()
}

/// `KUBE-FIREWALL` stays if the kubelet uses it, or if the kernel routes loopback addresses: then
/// the chain keeps other hosts from them, for whoever set `route_localnet`.
fn needs_kubelet_firewall(contents: &Contents) -> bool {
    contents.mangle_has_chain(KUBELET_CANARY) || routes_localnet().unwrap_or(true)
}

/// Sets `route_localnet` to 0 if the iptables mode set it. `KUBE-FIREWALL`, which keeps other hosts
/// from loopback addresses, may be removed only after that.
fn reset_route_localnet(contents: &[Contents]) -> Result<(), KernelError> {
    if routes_localnet()? && contents.iter().any(|contents| contents.mangle_has_chain(ROUTES_LOCALNET)) {
        tracing::info!("setting route_localnet to 0: node ports are not served on 127.0.0.1 any more");
        ROUTE_LOCALNET.write(0)?;
    }
    Ok(())
}

/// Reads the tables again: other programs may have changed them.
fn remove(commands: &Commands, removal: Removal) -> Vec<KernelError> {
    let remove_from = |table: Table, saved: String| {
        if !Commands::is_complete(&saved) {
            let why = "it holds rules that iptables does not know; remove them with nft first";
            let table = format!("table {} of {commands}", table.name());
            return Err(KernelError::call("list", table)(io::Error::other(why)));
        }
        let input = removal.input(table, &saved, commands.backend);
        input.map_or(Ok(()), |input| commands.restore_all(input))
    };
    let tables = save(commands, &Table::ALL).into_iter();
    tables.filter_map(|(table, saved)| saved.and_then(|saved| remove_from(table, saved)).err()).collect()
}

/// Removes the chains of the iptables mode and of the ipvs mode, with these exceptions.
#[derive(Clone, Copy, Debug, Default)]
struct Removal {
    /// The mode whose chains and jumps stay.
    mode: Option<&'static ModeChains>,
    /// `KUBE-FIREWALL` stays, because another program needs it.
    keeps_kubelet_firewall: bool,
    /// [`ROUTES_LOCALNET`] stays, because the iptables mode still needs it.
    keeps_routes_localnet: bool,
}

impl Removal {
    fn removes(self, table: Table, name: &str) -> bool {
        let is_kept = self.mode.is_some_and(|mode| (mode.parse)(table, name).is_some())
            || self.keeps_kubelet_firewall && KUBELET_FIREWALL.is_named(name)
            || self.keeps_routes_localnet && ROUTES_LOCALNET.is_named(name);
        !is_kept
            && (Chain::parse(name).is_some() || ipvs::CHAINS.iter().any(|(_, chain)| chain.is_named(name)))
    }

    /// Returns true if a rule of another program's chain is removed: it leads to a chain that is
    /// removed, or it is a jump to a chain of the kept mode that this mode does not write.
    fn removes_jump(self, table: Table, from: &str, rule: &str) -> bool {
        let Some(target) = target(rule) else { return false };
        let is_stray = |mode: &ModeChains| {
            (mode.parse)(table, target).is_some_and(|chain| chain != KUBELET_FIREWALL)
                && mode.jump(table, from, rule).is_none()
        };
        let is_built_in = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"].contains(&from);
        self.removes(table, target) || (is_built_in && self.mode.is_some_and(is_stray))
    }

    /// Returns the input that removes chains from a table, and the rules of other programs that
    /// lead to them; `None` if there are none.
    fn input(self, table: Table, saved: &str, backend: Backend) -> Option<String> {
        let mut writer = TableWriter::new(table);
        let mut chains = Vec::new();
        for line in saved_lines(saved) {
            match line {
                SavedLine::Chain { name, .. } if self.removes(table, name) => chains.push(name),
                SavedLine::Rule { chain, rule }
                    if !self.removes(table, chain)
                        && Chain::parse(chain).is_none()
                        && self.removes_jump(table, chain, rule) =>
                {
                    writer.line(format_args!("-D {chain} {rule}"));
                }
                _ => {}
            }
        }
        if backend == Backend::Nft && chains.len() > MANY_CHAINS {
            writer.list_all_chains();
        }
        writer.remove_chains(&chains);
        writer.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "\
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-FYZB2HTOW53NRIPL - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A PREROUTING -m comment --comment \"not -j KUBE-SERVICES\" -j MINE
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-FYZB2HTOW53NRIPL
-A MINE -j KUBE-SERVICES
COMMIT
";

    #[test]
    fn chains_and_the_rules_that_lead_to_them_are_removed() {
        let input = Removal::default().input(Table::Nat, SAVED, Backend::Nft);
        let expected = "*nat
-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-D MINE -j KUBE-SERVICES
:KUBE-SERVICES - [0:0]
:KUBE-SVC-FYZB2HTOW53NRIPL - [0:0]
-X KUBE-SERVICES
-X KUBE-SVC-FYZB2HTOW53NRIPL
COMMIT
";
        assert_eq!(input.as_deref(), Some(expected));
    }

    #[test]
    fn a_table_without_our_chains_needs_no_input() {
        let empty = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n";
        assert_eq!(Removal::default().input(Table::Nat, empty, Backend::Nft), None);
    }

    #[test]
    fn chains_of_the_ipvs_mode_and_their_jumps_are_kept() {
        let saved = "*filter\n:KUBE-SERVICES - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-FIREWALL - [0:0]\n\
            -A INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\n\
            -A FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A INPUT -j KUBE-FIREWALL\nCOMMIT\n";
        let removal = Removal { mode: Some(&ipvs::MODE), keeps_kubelet_firewall: true, ..Removal::default() };
        let input = removal.input(Table::Filter, saved, Backend::Legacy);
        let expected = "*filter\n\
            -D INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -D FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            :KUBE-SERVICES - [0:0]\n-X KUBE-SERVICES\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }

    #[test]
    fn chains_of_the_iptables_mode_and_their_jumps_are_kept() {
        let saved = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n\
            -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            -A CNI -j KUBE-SERVICES\n\
            -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n";
        let removal = Removal { mode: Some(&MODE), ..Removal::default() };
        let input = removal.input(Table::Nat, saved, Backend::Legacy);
        let expected = "*nat\n-D PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            :KUBE-NODE-PORT - [0:0]\n-X KUBE-NODE-PORT\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }
}
