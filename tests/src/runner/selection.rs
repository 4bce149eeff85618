//! Selects the cases of a run. Cases for other modes, and cases that need what this kernel lacks,
//! are skipped and listed with the reason.

use super::LinkFlags;
use crate::{
    case::Case,
    world::{Host, World},
};

const IPVS: &str = "ipvs";

/// Tags that a mode does not support, as upstream's mode of this name. A case that requires one is
/// not for that mode.
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
    // With a flag for links, or with one value of it.
    ("ebpf --links-path", "a-link-path-of-its-own"),
    ("ebpf --links-xdp", "an-xdp-mode-of-its-own"),
    ("ebpf --links-path netfilter", "bridged-pods"),
    ("ebpf --links-path netfilter", "flows-of-its-own"),
    ("ebpf --links-path programs", "rules-that-need-netfilter"),
    ("ebpf --links-path direct", "rules-that-need-netfilter"),
    // With --links-direct whole, packets pass these rules by.
    ("ebpf --links-direct whole", "forward-of-legacy"),
    ("ebpf --links-direct whole", "forward-of-nft"),
    // The rules are in only one of the two variants.
    ("iptables nft", "forward-of-legacy"),
    ("iptables legacy", "forward-of-nft"),
    ("ipvs nft", "forward-of-legacy"),
    ("ipvs legacy", "forward-of-nft"),
];

/// The iptables variant of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum IptablesVariant {
    /// iptables-nft.
    Nft,
    /// iptables-legacy.
    Legacy,
}

impl IptablesVariant {
    const fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// Creates the chain by which node1 signals this variant, as the kubelet does.
    pub fn write_hint(self, world: &World) -> anyhow::Result<()> {
        ["iptables", "ip6tables"].iter().try_for_each(|command| {
            let line = format!("{command}-{} -t mangle -N KUBE-IPTABLES-HINT", self.name());
            world.run(Host::Node1, &line).map(drop)
        })
    }
}

/// The selection of cases for a run.
#[derive(Clone, Debug)]
pub struct Selection {
    mode: String,
    iptables: IptablesVariant,
    links: LinkFlags,
    missing_features: Vec<&'static str>,
}

/// Features that not every kernel has, each with a command that fails on a kernel without it.
const KERNEL_FEATURES: &[(&str, &str)] = &[
    ("bonds", "ip link add probe type bond && ip link delete probe"),
    ("vlan-links", "ip link add link eth0 name probe type vlan id 1 && ip link delete probe"),
    // The first SCTP socket of an agent has loaded the module.
    ("sctp", "test -e /proc/net/sctp"),
    (
        "ifb",
        "ip link add probe type ifb && tc qdisc add dev probe root tbf rate 1mbit burst 4kb latency 9ms \
         && ip link delete probe",
    ),
    // Without the right to load extension programs, libxdp attaches programs without a dispatcher.
    (
        "libxdp",
        "export LIBXDP_BPFFS=${PINS%/*}; ip link add probe type veth; \
         trap 'xdp-loader unload -a probe; ip link delete probe' EXIT; \
         xdp-loader load -m skb probe $(ls /usr/lib/*/bpf/xdpfilt_alw_all.o /usr/lib*/bpf/xdpfilt_alw_all.o | head -n 1); \
         xdp-loader status probe | grep xdp_dispatcher",
    ),
    (
        "ipsec",
        "ip xfrm state add src 192.0.2.1 dst 192.0.2.2 proto esp spi 0x100 mode transport \
         auth 'hmac(sha256)' 0x11223344556677881122334455667788 enc 'cbc(aes)' 0x11223344556677881122334455667788 \
         && ip xfrm state flush",
    ),
];

impl Selection {
    /// Selects all cases for this mode.
    pub fn new(mode: &str) -> Self {
        Self {
            mode: mode.to_owned(),
            iptables: IptablesVariant::Nft,
            links: LinkFlags::default(),
            missing_features: Vec::new(),
        }
    }

    /// Selects the cases for a node with this iptables variant.
    #[must_use]
    pub fn with_iptables(self, iptables: IptablesVariant) -> Self {
        Self { iptables, ..self }
    }

    /// Selects the cases for a proxy with these flags for links.
    #[must_use]
    pub fn with_links(self, links: LinkFlags) -> Self {
        Self { links, ..self }
    }

    /// Removes the cases that need a feature that this kernel lacks.
    #[must_use]
    pub fn without_unsupported(self, world: &World) -> Self {
        let missing = KERNEL_FEATURES.iter().filter(|(_, probe)| world.run(Host::Node1, probe).is_err());
        Self { missing_features: missing.map(|(tag, _)| *tag).collect(), ..self }
    }

    /// Returns the reason why a case is skipped. None if its flows must hold.
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

    /// A case with steps in several modes runs with every mode except ipvs. If ipvs is one of its
    /// modes, it runs only with `--mode ipvs`: many kernels lack IPVS, and a virtual machine is
    /// slow.
    fn other_modes_of_steps(&self, case: &Case) -> Option<String> {
        let mut modes = case.steps.iter().filter_map(|step| step.mode.as_deref()).peekable();
        modes.peek()?;
        let has_ipvs = modes.any(|mode| mode == IPVS);
        let runs = if has_ipvs { "--mode ipvs" } else { "modes other than ipvs" };
        (has_ipvs != (self.mode == IPVS)).then(|| format!("for {runs}"))
    }

    fn tag_not_in_mode(&self, case: &Case) -> Option<String> {
        let with_iptables = format!("{} {}", self.mode, self.iptables.name());
        let given = self.links.given();
        let with_links: Vec<_> =
            given.map(|(flag, value)| [flag.into(), format!("{flag} {value}")]).collect();
        case.requires.iter().find_map(|tag| {
            let lacks = |name: &str| NOT_IN_MODE.contains(&(name, tag.as_str()));
            let lacks_with = |flag: &&String| lacks(&format!("{} {flag}", self.mode));
            if let Some(flag) = with_links.iter().flatten().find(lacks_with) {
                return Some(format!("not with {flag}: requires {tag}"));
            }
            (lacks(&self.mode) || lacks(&with_iptables))
                .then(|| format!("mode {} does not support {tag}, as upstream", self.mode))
        })
    }

    fn tag_not_on_machine(&self, case: &Case) -> Option<String> {
        let tag = case.requires.iter().find(|tag| self.missing_features.contains(&tag.as_str()))?;
        Some(format!("this kernel lacks {tag}; `cargo xtask vm` runs it"))
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
    fn a_case_without_requirements_runs_in_every_mode() {
        assert!(["ebpf", "nftables", "iptables", "ipvs"].iter().all(|mode| is_run("", mode)));
    }

    #[test]
    fn a_case_for_other_modes_is_skipped() {
        assert!(!is_run("modes: [ebpf, ipvs],", "nftables"));
        assert!(is_run("modes: [ebpf, ipvs],", "ipvs"));
    }

    #[test]
    fn a_case_with_ipvs_among_several_modes_runs_only_with_ipvs() {
        let is_run = |from: &str, to: &str, mode: &str| {
            let case =
                format!("{{name: x, about: y, steps: [{{mode: {from}}}, {{stop: true, mode: {to}}}]}}");
            Selection::new(mode).skip_reason(&case.parse().unwrap()).is_none()
        };
        assert!(is_run("ebpf", "iptables", "nftables") && !is_run("ebpf", "iptables", "ipvs"));
        assert!(is_run("ebpf", "ipvs", "ipvs") && !is_run("ipvs", "ebpf", "ebpf"));
    }

    #[test]
    fn a_case_is_skipped_with_a_link_path_that_it_cannot_have() {
        let case = "{name: x, about: y, requires: [rules-that-need-netfilter], steps: [{}]}".parse().unwrap();
        let reason = |path: Option<&str>| {
            let links = LinkFlags { links_path: path.map(Into::into), ..LinkFlags::default() };
            Selection::new("ebpf").with_links(links).skip_reason(&case)
        };
        assert_eq!(reason(None), None);
        assert_eq!(reason(Some("netfilter")), None);
        let why = "not with --links-path direct: requires rules-that-need-netfilter";
        assert_eq!(reason(Some("direct")).as_deref(), Some(why));
        let links = LinkFlags { links_masquerade: Some("programs".into()), ..LinkFlags::default() };
        assert_eq!(Selection::new("ebpf").with_links(links).skip_reason(&case), None);
    }

    #[test]
    fn a_case_with_its_own_xdp_mode_is_skipped_with_each_other() {
        let case = "{name: x, about: y, requires: [an-xdp-mode-of-its-own], steps: [{}]}".parse().unwrap();
        let links = LinkFlags { links_xdp: Some("generic".into()), ..LinkFlags::default() };
        let why = "not with --links-xdp: requires an-xdp-mode-of-its-own";
        assert_eq!(Selection::new("ebpf").with_links(links).skip_reason(&case).as_deref(), Some(why));
        assert_eq!(Selection::new("ebpf").skip_reason(&case), None);
    }

    #[test]
    fn a_case_is_skipped_in_a_mode_without_a_required_tag() {
        assert!(!is_run("requires: [localhost-nodeports],", "nftables"));
        assert!(is_run("requires: [localhost-nodeports],", "iptables"));
    }
}
