//! Which flows a mode does not have to carry yet, and why. They are counted and listed, never passed.

use crate::{
    case::{Action, Case, Flow},
    world::{Host, World},
};

/// What upstream's mode of this name does not do either; a case that requires it is not for that mode.
const NOT_IN_MODE: &[(&str, &str)] = &[
    ("nftables", "localhost-nodeports"),
    ("nftables", "nodeports-on-all-addresses"),
    ("nftables", "bridged-pods"),
    ("nftables", "flows-of-its-own"),
    ("nftables", "forward-of-legacy"),
    ("nftables", "forward-of-nft"),
    ("iptables", "bridged-pods"),
    ("iptables", "flows-of-its-own"),
    // The rules are in one of the two.
    ("iptables nft", "forward-of-legacy"),
    ("iptables legacy", "forward-of-nft"),
];

/// Which iptables a node uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum IptablesInUse {
    /// That of nftables.
    Nft,
    /// The old one.
    Legacy,
}

impl IptablesInUse {
    const fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// Has node1 show that it uses this one, as the kubelet does.
    pub fn hint(self, world: &World) -> anyhow::Result<()> {
        ["iptables", "ip6tables"].iter().try_for_each(|command| {
            let line = format!("{command}-{} -t mangle -N KUBE-IPTABLES-HINT", self.name());
            world.run(Host::Node1, &line).map(drop)
        })
    }
}

/// What is pending in a run.
#[derive(Clone, Debug)]
pub struct Pending {
    mode: String,
    iptables: IptablesInUse,
    hosts: Vec<Host>,
    not_on_machine: Vec<&'static str>,
}

/// What not every kernel has, and the command on a host that fails where it has not.
const MACHINES: &[(&str, &str)] =
    &[("vlan-links", "ip link add link eth0 name probe type vlan id 1 && ip link delete probe")];

impl Pending {
    /// Flows from `hosts`, and what the mode has not.
    pub fn new(mode: &str, hosts: &[Host]) -> Self {
        let iptables = IptablesInUse::Nft;
        Self { mode: mode.to_owned(), iptables, hosts: hosts.to_vec(), not_on_machine: Vec::new() }
    }

    /// On a node that uses this iptables.
    #[must_use]
    pub fn beside(self, iptables: IptablesInUse) -> Self {
        Self { iptables, ..self }
    }

    /// And what this machine has not.
    #[must_use]
    pub fn on_machine(self, world: &World) -> Self {
        let missing = MACHINES.iter().filter(|(_, probe)| world.run(Host::Node1, probe).is_err());
        Self { not_on_machine: missing.map(|(tag, _)| *tag).collect(), ..self }
    }

    /// Why a flow of a case is pending; None if it has to hold.
    pub fn reason(&self, case: &Case, flow: &Flow) -> Option<String> {
        self.other_mode(case)
            .or_else(|| self.tag_not_in_mode(case))
            .or_else(|| self.tag_not_on_machine(case))
            .or_else(|| self.is_from_pending_host(flow).then(|| "asked for with --pending-from".to_owned()))
    }

    /// Probes of the proxy itself need no translation.
    fn is_from_pending_host(&self, flow: &Flow) -> bool {
        self.hosts.contains(&flow.from) && !matches!(flow.action, Action::Get(_))
    }

    fn other_mode(&self, case: &Case) -> Option<String> {
        let is_for = case.modes.is_empty() || case.modes.contains(&self.mode);
        (!is_for).then(|| format!("is for {}", case.modes.join(" and ")))
    }

    fn tag_not_in_mode(&self, case: &Case) -> Option<String> {
        let with_iptables = format!("{} {}", self.mode, self.iptables.name());
        let is_meant = |mode: &str| mode == self.mode || mode == with_iptables;
        let missing = |tag: &str| NOT_IN_MODE.iter().any(|(mode, no)| is_meant(mode) && *no == tag);
        let tag = case.requires.iter().find(|tag| missing(tag))?;
        Some(format!("mode {} has no {tag}, as upstream", self.mode))
    }

    fn tag_not_on_machine(&self, case: &Case) -> Option<String> {
        let tag = case.requires.iter().find(|tag| self.not_on_machine.contains(&tag.as_str()))?;
        Some(format!("this kernel has no {tag}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(head: &str) -> Case {
        let flows = "{from: client, to: '10.96.0.1:80', proto: tcp, reach: [a1]}, \
                     {from: client, http: 'http://192.168.57.11/', status: 200}, \
                     {from: a1, to: '10.96.0.1:80', proto: tcp, reach: [a1]}";
        format!("{{name: x, about: y, {head} steps: [{{flows: [{flows}]}}]}}").parse().unwrap()
    }

    fn pending(case: &Case, mode: &str, hosts: &[Host]) -> Vec<bool> {
        let pending = Pending::new(mode, hosts);
        case.steps[0].flows.iter().map(|flow| pending.reason(case, flow).is_some()).collect()
    }

    #[test]
    fn no_mode_has_flows_pending_by_itself() {
        assert_eq!(pending(&case(""), "ebpf", &[]), [false; 3]);
    }

    #[test]
    fn flows_from_the_hosts_asked_for_are_pending_but_probes_of_the_proxy_are_not() {
        assert_eq!(pending(&case(""), "nftables", &[Host::Client]), [true, false, false]);
        assert_eq!(pending(&case(""), "nftables", &[Host::A1]), [false, false, true]);
    }

    #[test]
    fn a_case_for_other_modes_is_pending() {
        let case = case("modes: [ebpf, ipvs],");
        assert_eq!(pending(&case, "nftables", &[]), [true; 3]);
        assert_eq!(pending(&case, "ipvs", &[]), [false; 3]);
    }

    #[test]
    fn a_case_that_requires_what_the_mode_has_not_is_pending_there() {
        let case = case("requires: [localhost-nodeports],");
        assert_eq!(pending(&case, "nftables", &[]), [true; 3]);
        assert_eq!(pending(&case, "iptables", &[]), [false; 3]);
    }
}
