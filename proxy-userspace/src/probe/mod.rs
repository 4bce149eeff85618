//! Evaluates the facts about a kernel: which modes work, what each lacks, which one `auto` takes.
#![forbid(unsafe_code)]

mod text;

#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

use crate::{
    kernel::probe::{Fact, Facts, Feature},
    mode::Mode,
};

/// What a mode needs: at least one of several features.
struct Requirement {
    /// The features, in order of preference.
    any_of: &'static [Feature],
    /// The limitation without the features. `None` if the mode does not work at all without them.
    without: Option<&'static str>,
    /// What the operator can do to provide one of the features.
    remedy: &'static str,
}

const fn required(any_of: &'static [Feature], remedy: &'static str) -> Requirement {
    Requirement { any_of, without: None, remedy }
}

const fn optional(any_of: &'static [Feature], without: &'static str, remedy: &'static str) -> Requirement {
    Requirement { any_of, without: Some(without), remedy }
}

const PRIVILEGES: &str =
    "run it as root, or with CAP_NET_ADMIN, and CAP_SYS_ADMIN or CAP_BPF and CAP_PERFMON";
const KERNEL: &str =
    "use a kernel from 5.10 on, with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET_CLS_BPF";
const NFT: &str = "install nft (the package nftables); the kernel needs CONFIG_NF_TABLES_INET, CONFIG_NFT_MASQ, CONFIG_NFT_CT and CONFIG_NFT_REJECT";
const NFT_MAPS: &str = "use a kernel from 5.13 on, with CONFIG_NF_TABLES_IPV4, CONFIG_NF_TABLES_IPV6, CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_NUMGEN, CONFIG_NFT_CT, CONFIG_NFT_REJECT, CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6";
const IPTABLES: &str = "install iptables with the backend that the node uses";

const EBPF: &[Requirement] = &[
    required(&[Feature::Capabilities], PRIVILEGES),
    required(&[Feature::SocketPrograms], KERNEL),
    required(&[Feature::LinkPrograms], KERNEL),
    required(&[Feature::Maps], KERNEL),
    required(&[Feature::Bpffs], "mount one: mount -t bpf bpf /sys/fs/bpf; in a container, mount the host's"),
    required(
        &[Feature::Cgroup2],
        "mount one: mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's",
    ),
    required(&[Feature::Tcx, Feature::Clsact], "use a kernel with CONFIG_NET_SCH_INGRESS, or 6.6 and newer"),
    optional(
        &[Feature::Nftables, Feature::Iptables],
        "traffic from outside that must be masqueraded or refused is not handled correctly",
        NFT,
    ),
    optional(
        &[Feature::SetRetval],
        "connections to a Service without endpoints fail with \"Operation not permitted\", not \"Connection refused\"",
        "use a kernel from 6.1 on",
    ),
    optional(
        &[Feature::NetnsCookie],
        "in a node that is itself a container, the programs assume the initial network namespace until they run",
        "use a kernel from 5.14 on",
    ),
    optional(
        &[Feature::SocketDestroy],
        "connected UDP sockets stay connected to a removed endpoint",
        "use a kernel with CONFIG_INET_DIAG_DESTROY",
    ),
];

const LEGACY_PRIVILEGES: &str = "run it as root, or with CAP_NET_ADMIN";
const NFTABLES_MODE: &[Requirement] =
    &[required(&[Feature::NetAdmin], LEGACY_PRIVILEGES), required(&[Feature::NftablesMaps], NFT_MAPS)];
const IPTABLES_MODE: &[Requirement] =
    &[required(&[Feature::NetAdmin], LEGACY_PRIVILEGES), required(&[Feature::Iptables], IPTABLES)];
const IPVS_MODE: &[Requirement] = &[
    required(&[Feature::NetAdmin], LEGACY_PRIVILEGES),
    required(&[Feature::Ipvs], "load the module: modprobe ip_vs; the kernel needs CONFIG_IP_VS"),
    required(&[Feature::DummyLinks], "load the module: modprobe dummy; the kernel needs CONFIG_DUMMY"),
    required(&[Feature::Iptables], IPTABLES),
    required(&[Feature::Ipset], "install ipset; the kernel needs CONFIG_IP_SET"),
];

const fn requirements(mode: Mode) -> &'static [Requirement] {
    match mode {
        Mode::Ebpf => EBPF,
        Mode::Nftables => NFTABLES_MODE,
        Mode::Iptables => IPTABLES_MODE,
        Mode::Ipvs => IPVS_MODE,
    }
}

/// A requirement of a mode that this machine does not meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Lack {
    /// The features of which the mode needs one.
    pub any_of: Vec<Feature>,
    /// Why the features are missing.
    pub reason: String,
    /// The limitation without the features. Empty if the mode does not work at all without them.
    pub without: String,
    /// What the operator can do. Empty if the reason says it.
    pub remedy: String,
}

/// Whether and how well a mode works on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModeSupport {
    /// The mode.
    pub mode: Mode,
    /// Required features that are missing.
    pub missing: Vec<Lack>,
    /// Optional features that are missing.
    pub limits: Vec<Lack>,
}

/// The evaluation of all modes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Evaluation {
    /// The modes, in the order in which `auto` prefers them.
    pub modes: Vec<ModeSupport>,
    /// The mode that `auto` takes. None if no mode works.
    pub auto: Option<Mode>,
    /// The reason for this choice.
    pub why: String,
}

impl ModeSupport {
    /// Returns true if no required feature is missing.
    pub const fn works(&self) -> bool {
        self.missing.is_empty()
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.any_of.iter().map(|feature| text::name(*feature)).collect();
        write!(f, "{}: {}", names.join(" or "), self.reason)?;
        if !self.without.is_empty() {
            write!(f, "; without it, {}", self.without)?;
        }
        if self.remedy.is_empty() { Ok(()) } else { write!(f, "; {}", self.remedy) }
    }
}

/// Evaluates the facts. Pure.
pub fn evaluate(facts: &Facts) -> Evaluation {
    let modes: Vec<_> = Mode::ALL.iter().map(|mode| mode_support(*mode, facts)).collect();
    let auto = modes.iter().find(|mode| mode.works() && mode.mode.is_for_auto()).map(|mode| mode.mode);
    let why = match auto {
        Some(mode) if mode == Mode::ALL[0] => {
            "it is the preferred mode and nothing that it needs is missing".into()
        }
        Some(mode) => {
            format!("it is the first mode that works: {}", obstacles(&modes, Some(mode)))
        }
        None => format!("no mode works: {}", obstacles(&modes, None)),
    };
    Evaluation { modes, auto, why }
}

fn mode_support(mode: Mode, facts: &Facts) -> ModeSupport {
    let (required, optional): (Vec<_>, Vec<_>) =
        requirements(mode).iter().partition(|requirement| requirement.without.is_none());
    let lacks = |requirements: Vec<&Requirement>| {
        requirements.into_iter().filter_map(|requirement| lack(requirement, facts)).collect()
    };
    ModeSupport { mode, missing: lacks(required), limits: lacks(optional) }
}

/// Returns what is missing, if the requirement is not met. A feature that could not be tested may
/// exist, so it counts as present.
fn lack(requirement: &Requirement, facts: &Facts) -> Option<Lack> {
    let found: Vec<&Fact> =
        requirement.any_of.iter().filter_map(|feature| facts.features.get(feature)).collect();
    if found.is_empty() || found.iter().any(|fact| !fact.is_missing()) {
        return None;
    }
    let is_denied = found.iter().all(|fact| matches!(fact, Fact::Denied(_)));
    let reasons: Vec<_> = found.iter().map(|fact| fact.detail()).collect();
    Some(Lack {
        any_of: requirement.any_of.into(),
        reason: reasons.join("; "),
        without: requirement.without.unwrap_or_default().into(),
        // A denial names its own remedy.
        remedy: if is_denied { String::new() } else { requirement.remedy.into() },
    })
}

/// Describes what keeps the modes before `before` from working, or all modes if it is None.
fn obstacles(modes: &[ModeSupport], before: Option<Mode>) -> String {
    let earlier = modes.iter().take_while(|mode| Some(mode.mode) != before).filter(|mode| !mode.works());
    let described = earlier.map(|mode| match mode.missing.first() {
        Some(lack) => {
            format!("{} lacks {}: {}", mode.mode, text::name(lack.any_of[0]), lack.reason.replace('\n', " "))
        }
        None => mode.mode.to_string(),
    });
    described.collect::<Vec<_>>().join("; ")
}

/// Returns the facts and the evaluation as one JSON document.
pub fn json(facts: &Facts, evaluation: &Evaluation) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Document<'a> {
        #[serde(flatten)]
        facts: &'a Facts,
        #[serde(flatten)]
        evaluation: &'a Evaluation,
    }
    serde_json::to_string_pretty(&Document { facts, evaluation })
}

pub use text::table;
