//! What the facts about a kernel mean: which modes can work, what each lacks and what to do about it, and which one `auto` takes.

mod text;

#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

use crate::kernel::probe::{Fact, Facts, Feature};

/// How much a mode wants something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    /// It does not work without.
    Needed,
    /// It works without, but not in this respect.
    Useful(&'static str),
}

/// One of these features, in the order they are preferred, and what brings one of them.
struct Wish {
    any_of: &'static [Feature],
    want: Want,
    remedy: &'static str,
}

const fn needed(any_of: &'static [Feature], remedy: &'static str) -> Wish {
    Wish { any_of, want: Want::Needed, remedy }
}

const fn useful(any_of: &'static [Feature], without: &'static str, remedy: &'static str) -> Wish {
    Wish { any_of, want: Want::Useful(without), remedy }
}

const PRIVILEGES: &str =
    "run it as root, or with CAP_NET_ADMIN, and CAP_SYS_ADMIN or CAP_BPF and CAP_PERFMON";
const KERNEL: &str =
    "use a kernel from 5.10 on, with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET_CLS_BPF";
const NFT: &str = "install nft (the package nftables); the kernel needs CONFIG_NF_TABLES_INET, CONFIG_NFT_MASQ, CONFIG_NFT_CT and CONFIG_NFT_REJECT";
const NFT_MAPS: &str = "use a kernel from 5.13 on, with CONFIG_NF_TABLES_IPV4, CONFIG_NF_TABLES_IPV6, CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_NUMGEN, CONFIG_NFT_CT, CONFIG_NFT_REJECT, CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6";
const IPTABLES: &str = "install iptables, of the backend that the node uses";

const EBPF: &[Wish] = &[
    needed(&[Feature::Capabilities], PRIVILEGES),
    needed(&[Feature::SocketPrograms], KERNEL),
    needed(&[Feature::LinkPrograms], KERNEL),
    needed(&[Feature::Maps], KERNEL),
    needed(&[Feature::Bpffs], "mount one: mount -t bpf bpf /sys/fs/bpf; in a container, mount the host's"),
    needed(
        &[Feature::Cgroup2],
        "mount one: mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's",
    ),
    needed(&[Feature::Tcx, Feature::Clsact], "use a kernel with CONFIG_NET_SCH_INGRESS, or 6.6 and newer"),
    useful(
        &[Feature::Nftables, Feature::Iptables],
        "traffic from outside that has to be masqueraded or refused is not served right",
        NFT,
    ),
    useful(
        &[Feature::SetRetval],
        "connections to a Service without endpoints fail with \"Operation not permitted\", not \"Connection refused\"",
        "use a kernel from 6.1 on",
    ),
    useful(
        &[Feature::NetnsCookie],
        "a node inside a container takes the initial network namespace for its own until its programs run",
        "use a kernel from 5.14 on",
    ),
    useful(
        &[Feature::SocketDestroy],
        "connected UDP sockets stay with an endpoint that is gone",
        "use a kernel with CONFIG_INET_DIAG_DESTROY",
    ),
];

const LEGACY_PRIVILEGES: &str = "run it as root, or with CAP_NET_ADMIN";
const NFTABLES_MODE: &[Wish] =
    &[needed(&[Feature::NetAdmin], LEGACY_PRIVILEGES), needed(&[Feature::NftablesMaps], NFT_MAPS)];
const IPTABLES_MODE: &[Wish] =
    &[needed(&[Feature::NetAdmin], LEGACY_PRIVILEGES), needed(&[Feature::Iptables], IPTABLES)];
const IPVS_MODE: &[Wish] = &[
    needed(&[Feature::NetAdmin], LEGACY_PRIVILEGES),
    needed(&[Feature::Ipvs], "load the module: modprobe ip_vs; the kernel needs CONFIG_IP_VS"),
    needed(&[Feature::DummyLinks], "load the module: modprobe dummy; the kernel needs CONFIG_DUMMY"),
    needed(&[Feature::Iptables], IPTABLES),
    needed(&[Feature::Ipset], "install ipset; the kernel needs CONFIG_IP_SET"),
];

/// Every mode, in the order in which `auto` prefers them, and what it wants. `auto` never takes ipvs, which upstream gives up.
const MODES: [(&str, &[Wish]); 4] =
    [("ebpf", EBPF), ("nftables", NFTABLES_MODE), ("iptables", IPTABLES_MODE), ("ipvs", IPVS_MODE)];

/// Something a mode wants and does not find.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Lack {
    /// What was looked for; any one of them would do.
    pub any_of: Vec<Feature>,
    /// Why it is not there.
    pub reason: String,
    /// What does not work without; nothing does where this is empty.
    pub without: String,
    /// What to do about it.
    pub remedy: String,
}

/// What a mode can do here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModeVerdict {
    /// The mode's name.
    pub mode: &'static str,
    /// What keeps it from working.
    pub missing: Vec<Lack>,
    /// What it works without.
    pub limits: Vec<Lack>,
}

/// The verdict on all modes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    /// By mode, in the order in which `auto` prefers them.
    pub modes: Vec<ModeVerdict>,
    /// What `auto` takes; none where nothing works.
    pub auto: Option<&'static str>,
    /// Why.
    pub why: String,
}

impl ModeVerdict {
    /// Nothing keeps it from working.
    pub const fn works(&self) -> bool {
        self.missing.is_empty()
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.any_of.iter().map(|feature| text::name(*feature)).collect();
        write!(f, "{}: {}", names.join(" or "), self.reason)?;
        if !self.without.is_empty() {
            write!(f, "; without, {}", self.without)?;
        }
        write!(f, "; {}", self.remedy)
    }
}

/// What these facts mean. Pure.
pub fn judge(facts: &Facts) -> Verdict {
    let modes: Vec<_> = MODES.iter().map(|(mode, wishes)| verdict(mode, wishes, facts)).collect();
    let auto = modes.iter().find(|mode| mode.works() && mode.mode != "ipvs").map(|mode| mode.mode);
    let why = match auto {
        Some(mode) if mode == MODES[0].0 => "it is preferred, and all it needs is there".into(),
        Some(mode) => {
            format!("all it needs is there, and nothing before it works: {}", obstacles(&modes, Some(mode)))
        }
        None => format!("no mode works: {}", obstacles(&modes, None)),
    };
    Verdict { modes, auto, why }
}

fn verdict(mode: &'static str, wishes: &[Wish], facts: &Facts) -> ModeVerdict {
    let lacking = |is_meant: fn(Want) -> bool| {
        wishes.iter().filter(|wish| is_meant(wish.want)).filter_map(|wish| lack(wish, facts)).collect()
    };
    ModeVerdict {
        mode,
        missing: lacking(|want| want == Want::Needed),
        limits: lacking(|want| want != Want::Needed),
    }
}

/// What could not be tried may be there: that is no reason to do without.
fn lack(wish: &Wish, facts: &Facts) -> Option<Lack> {
    let found: Vec<&Fact> = wish.any_of.iter().filter_map(|feature| facts.features.get(feature)).collect();
    if found.is_empty() || found.iter().any(|fact| !fact.is_missing()) {
        return None;
    }
    let reasons: Vec<_> = found.iter().map(|fact| fact.detail()).collect();
    let without = match wish.want {
        Want::Needed => String::new(),
        Want::Useful(without) => without.into(),
    };
    Some(Lack { any_of: wish.any_of.into(), reason: reasons.join("; "), without, remedy: wish.remedy.into() })
}

/// What keeps the modes before this one from working, or all of them.
fn obstacles(modes: &[ModeVerdict], before: Option<&str>) -> String {
    let earlier = modes.iter().take_while(|mode| Some(mode.mode) != before).filter(|mode| !mode.works());
    let described = earlier.map(|mode| match mode.missing.first() {
        Some(lack) => format!("{} lacks {}", mode.mode, text::name(lack.any_of[0])),
        None => mode.mode.to_owned(),
    });
    described.collect::<Vec<_>>().join(", ")
}

/// The facts and the verdict as one JSON document.
pub fn json(facts: &Facts, verdict: &Verdict) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Report<'a> {
        #[serde(flatten)]
        facts: &'a Facts,
        #[serde(flatten)]
        verdict: &'a Verdict,
    }
    serde_json::to_string_pretty(&Report { facts, verdict })
}

pub use text::table;
