//! Which cases a run leaves out: those for other modes, and those that need what this kernel has not. They are listed, with the reason.

use crate::{
    case::Case,
    world::{Host, World},
};

const IPVS: &str = "ipvs";

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
    ("ipvs", "bridged-pods"),
    ("ipvs", "flows-of-its-own"),
    // The rules are in one of the two.
    ("iptables nft", "forward-of-legacy"),
    ("iptables legacy", "forward-of-nft"),
    ("ipvs nft", "forward-of-legacy"),
    ("ipvs legacy", "forward-of-nft"),
];

/// Which iptables a node uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum IptablesVariant {
    /// That of nftables.
    Nft,
    /// The old one.
    Legacy,
}

impl IptablesVariant {
    const fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// Has node1 show that it uses this one, as the kubelet does.
    pub fn write_hint(self, world: &World) -> anyhow::Result<()> {
        ["iptables", "ip6tables"].iter().try_for_each(|command| {
            let line = format!("{command}-{} -t mangle -N KUBE-IPTABLES-HINT", self.name());
            world.run(Host::Node1, &line).map(drop)
        })
    }
}

/// Which cases a run has.
#[derive(Clone, Debug)]
pub struct Selection {
    mode: String,
    iptables: IptablesVariant,
    not_on_machine: Vec<&'static str>,
}

/// What not every kernel has, and the command on a host that fails where it has not.
const MACHINES: &[(&str, &str)] =
    &[("vlan-links", "ip link add link eth0 name probe type vlan id 1 && ip link delete probe")];

impl Selection {
    /// All cases for this mode.
    pub fn new(mode: &str) -> Self {
        Self { mode: mode.to_owned(), iptables: IptablesVariant::Nft, not_on_machine: Vec::new() }
    }

    /// On a node that uses this iptables.
    #[must_use]
    pub fn with_iptables(self, iptables: IptablesVariant) -> Self {
        Self { iptables, ..self }
    }

    /// Without those that need what this machine has not.
    #[must_use]
    pub fn without_unsupported(self, world: &World) -> Self {
        let missing = MACHINES.iter().filter(|(_, probe)| world.run(Host::Node1, probe).is_err());
        Self { not_on_machine: missing.map(|(tag, _)| *tag).collect(), ..self }
    }

    /// Why a case is left out; None if its flows have to hold.
    pub fn skip_reason(&self, case: &Case) -> Option<String> {
        self.other_mode(case)
            .or_else(|| self.other_modes_of_steps(case))
            .or_else(|| self.tag_not_in_mode(case))
            .or_else(|| self.tag_not_on_machine(case))
    }

    fn other_mode(&self, case: &Case) -> Option<String> {
        let is_for = case.modes.is_empty() || case.modes.contains(&self.mode);
        (!is_for).then(|| format!("for {}", case.modes.join(" and ")))
    }

    /// What goes through several modes runs in all runs but those of ipvs, and if ipvs is among them in those alone: many kernels
    /// lack it, and a virtual machine is slow.
    fn other_modes_of_steps(&self, case: &Case) -> Option<String> {
        let mut modes = case.steps.iter().filter_map(|step| step.mode.as_deref()).peekable();
        modes.peek()?;
        let has_ipvs = modes.any(|mode| mode == IPVS);
        let whose = if has_ipvs { "--mode ipvs" } else { "other modes than ipvs" };
        (has_ipvs != (self.mode == IPVS)).then(|| format!("for {whose}"))
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
        Some(format!("this kernel has no {tag}; `cargo xtask vm` runs it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_run(head: &str, mode: &str) -> bool {
        let flow = "{from: client, to: '10.96.0.1:80', proto: tcp, reach: [a1]}";
        let case = format!("{{name: x, about: y, {head} steps: [{{flows: [{flow}]}}]}}").parse().unwrap();
        Selection::new(mode).skip_reason(&case).is_none()
    }

    #[test]
    fn a_case_that_asks_for_nothing_is_for_every_mode() {
        assert!(["ebpf", "nftables", "iptables", "ipvs"].iter().all(|mode| is_run("", mode)));
    }

    #[test]
    fn a_case_for_other_modes_is_left_out() {
        assert!(!is_run("modes: [ebpf, ipvs],", "nftables"));
        assert!(is_run("modes: [ebpf, ipvs],", "ipvs"));
    }

    #[test]
    fn a_case_through_several_modes_runs_in_the_virtual_machine_if_ipvs_is_among_them_and_nowhere_else() {
        let is_run = |from: &str, to: &str, mode: &str| {
            let case =
                format!("{{name: x, about: y, steps: [{{mode: {from}}}, {{stop: true, mode: {to}}}]}}");
            Selection::new(mode).skip_reason(&case.parse().unwrap()).is_none()
        };
        assert!(is_run("ebpf", "iptables", "nftables") && !is_run("ebpf", "iptables", "ipvs"));
        assert!(is_run("ebpf", "ipvs", "ipvs") && !is_run("ipvs", "ebpf", "ebpf"));
    }

    #[test]
    fn a_case_that_requires_what_the_mode_has_not_is_left_out_there() {
        assert!(!is_run("requires: [localhost-nodeports],", "nftables"));
        assert!(is_run("requires: [localhost-nodeports],", "iptables"));
    }
}
