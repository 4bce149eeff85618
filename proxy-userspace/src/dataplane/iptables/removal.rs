//! Removes kube-proxy's chains from a table, and the rules that lead to them.

use super::jumps::MODE;
use crate::{
    dataplane::{
        iptables_text::{
            Chain, KUBELET_FIREWALL, ROUTES_LOCALNET, SavedLine, Table, TableWriter, saved_lines, target,
        },
        ipvs,
    },
    kernel::iptables::Backend,
};

/// With more chains than this, iptables-nft is made to look at all of them: see [`TableWriter`].
const MANY_CHAINS: usize = 1000;

/// The kubelet creates this chain in order to notice a flush. If it exists, the kubelet uses `KUBE-FIREWALL` too.
const KUBELET_CANARY: &str = "KUBE-KUBELET-CANARY";

/// Returns true if the kubelet works with the tables of this iptables. `mangle` is its table mangle.
pub(super) fn has_kubelet(mangle: &str) -> bool {
    has_chain(mangle, |name| name == KUBELET_CANARY)
}

/// Returns true if the iptables mode set `route_localnet`. `mangle` is the table mangle.
pub(super) fn has_set_route_localnet(mangle: &str) -> bool {
    has_chain(mangle, |name| ROUTES_LOCALNET.is_named(name))
}

fn has_chain(saved: &str, is_it: impl Fn(&str) -> bool) -> bool {
    saved_lines(saved).any(|line| matches!(line, SavedLine::Chain { name, .. } if is_it(name)))
}

/// Which of the chains that kube-proxy writes are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RemovalScope {
    /// The chains of both modes.
    All {
        /// Except `KUBE-FIREWALL`, which another program needs.
        keep_kubelet_firewall: bool,
        /// Except [`ROUTES_LOCALNET`], which the iptables mode still needs.
        keep_routes_localnet: bool,
    },
    /// All chains except those of the iptables mode.
    AllButIptablesMode,
    /// All chains except those of the ipvs mode.
    AllButIpvsMode {
        /// And except `KUBE-FIREWALL`, which another program needs.
        keep_kubelet_firewall: bool,
    },
}

impl RemovalScope {
    fn has_chain(self, table: Table, name: &str) -> bool {
        match (self, Chain::parse(name)) {
            (Self::AllButIpvsMode { .. }, _) if (ipvs::MODE.parse)(table, name).is_some() => false,
            (_, None) => Table::ALL.iter().any(|table| (ipvs::MODE.parse)(*table, name).is_some()),
            (Self::AllButIptablesMode, Some(_)) => false,
            (Self::AllButIpvsMode { keep_kubelet_firewall }, Some(chain)) => {
                !(keep_kubelet_firewall && chain == KUBELET_FIREWALL)
            }
            (Self::All { keep_kubelet_firewall, keep_routes_localnet }, Some(chain)) => {
                !(keep_kubelet_firewall && chain == KUBELET_FIREWALL
                    || keep_routes_localnet && chain == ROUTES_LOCALNET)
            }
        }
    }

    /// Returns true if a rule of another program's chain has to go: it leads to a chain that is removed, or it is
    /// a jump that the remaining mode does not write.
    fn has_jump(self, table: Table, from: &str, rule: &str) -> bool {
        let Some(target) = target(rule) else { return false };
        let is_stray = match self {
            Self::All { .. } => false,
            Self::AllButIptablesMode => {
                Chain::parse(target).is_some_and(|chain| chain != KUBELET_FIREWALL)
                    && MODE.jump(table, from, rule).is_none()
            }
            Self::AllButIpvsMode { .. } => {
                (ipvs::MODE.parse)(table, target).is_some() && ipvs::MODE.jump(table, from, rule).is_none()
            }
        };
        self.has_chain(table, target) || (is_stray && is_built_in(from))
    }
}

fn is_built_in(chain: &str) -> bool {
    ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"].contains(&chain)
}

/// Returns the input that removes chains from a table, and the rules of other programs that lead to them; `None`
/// if there are none.
pub(super) fn removal_input(
    table: Table,
    saved: &str,
    backend: Backend,
    scope: RemovalScope,
) -> Option<String> {
    let mut writer = TableWriter::new(table);
    let mut chains = Vec::new();
    for line in saved_lines(saved) {
        match line {
            SavedLine::Chain { name, .. } if scope.has_chain(table, name) => chains.push(name),
            SavedLine::Rule { chain, rule }
                if !scope.has_chain(table, chain)
                    && Chain::parse(chain).is_none()
                    && scope.has_jump(table, chain, rule) =>
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

    const ALL: RemovalScope = RemovalScope::All { keep_kubelet_firewall: false, keep_routes_localnet: false };

    #[test]
    fn chains_and_the_rules_that_lead_to_them_are_removed() {
        let input = removal_input(Table::Nat, SAVED, Backend::Nft, ALL);
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
        assert_eq!(removal_input(Table::Nat, empty, Backend::Nft, ALL), None);
    }

    #[test]
    fn chains_of_the_ipvs_mode_and_their_jumps_are_kept() {
        let saved = "*filter\n:KUBE-SERVICES - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-FIREWALL - [0:0]\n\
            -A INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\n\
            -A FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A INPUT -j KUBE-FIREWALL\nCOMMIT\n";
        let scope = RemovalScope::AllButIpvsMode { keep_kubelet_firewall: true };
        let input = removal_input(Table::Filter, saved, Backend::Legacy, scope);
        let expected = "*filter\n\
            -D INPUT -m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\n\
            -D FORWARD -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            :KUBE-SERVICES - [0:0]\n-X KUBE-SERVICES\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }

    #[test]
    fn beside_the_iptables_mode_only_chains_of_the_ipvs_mode_are_removed() {
        let saved = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n\
            -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
            -A PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            -A CNI -j KUBE-SERVICES\n\
            -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n";
        let input = removal_input(Table::Nat, saved, Backend::Legacy, RemovalScope::AllButIptablesMode);
        let expected = "*nat\n-D PREROUTING -m comment --comment \"of long ago\" -j KUBE-SERVICES\n\
            :KUBE-NODE-PORT - [0:0]\n-X KUBE-NODE-PORT\nCOMMIT\n";
        assert_eq!(input.as_deref(), Some(expected));
    }
}
