//! Probes what this kernel and machine offer, by trying. A probe that changes a network namespace
//! uses a fresh one, which ends with its thread. Nothing stays.

mod bpffs;
mod maps;
mod netfilter;
mod netlink;

pub use maps::version;

use std::{collections::BTreeMap, error::Error, path::Path};

use aya::{
    maps::MapType,
    programs::{ProgramType, tc::qdisc_add_clsact},
    sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported},
};
use nix::sys::utsname::uname;
use serde::Serialize;

use super::{KernelError, bpf, capabilities, cgroup, command::Launcher, netns, own_link::OwnLink, sock_diag};

/// A feature that a mode may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Feature {
    /// The capability to change the network.
    NetAdmin,
    /// The capabilities to use eBPF.
    Capabilities,
    /// Socket programs on a cgroup (`cgroup/connect4` and others).
    SocketPrograms,
    /// Link programs.
    LinkPrograms,
    /// Every type of map that the programs use.
    Maps,
    /// A bpffs where this process may pin maps.
    Bpffs,
    /// A cgroup v2 hierarchy.
    Cgroup2,
    /// The kernel's BTF, `/sys/kernel/btf/vmlinux`.
    Btf,
    /// TCX hooks of links (kernel 6.6).
    Tcx,
    /// The clsact qdisc.
    Clsact,
    /// `bpf_set_retval` in socket programs (kernel 6.1).
    SetRetval,
    /// `SO_NETNS_COOKIE` (kernel 5.14).
    NetnsCookie,
    /// Destruction of sockets (`CONFIG_INET_DIAG_DESTROY`).
    SocketDestroy,
    /// The command nft, with nftables in the kernel.
    Nftables,
    /// Translation by maps of nftables, over netlink (kernel 5.13).
    NftablesMaps,
    /// The iptables commands of either backend, with their tables in the kernel.
    Iptables,
    /// The ipset command.
    Ipset,
    /// IPVS.
    Ipvs,
    /// Dummy links.
    DummyLinks,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Fact {
    /// The feature is present, with details.
    Present(String),
    /// The feature is missing, with the reason.
    Missing(String),
    /// A security module denies the feature to this process. Names the module, and what the
    /// operator can do.
    Denied(String),
    /// The feature could not be probed, with the reason.
    Unknown(String),
}

/// The results of all probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The kernel's release.
    pub kernel: String,
    /// The results by feature.
    pub features: BTreeMap<Feature, Fact>,
}

impl Fact {
    /// Returns true if the feature was probed and cannot be used.
    pub const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing(_) | Self::Denied(_))
    }

    /// Returns the details or the reason.
    pub fn detail(&self) -> &str {
        match self {
            Self::Present(detail) | Self::Missing(detail) | Self::Denied(detail) | Self::Unknown(detail) => {
                detail
            }
        }
    }

    fn of<T, E: std::fmt::Display>(result: Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Present(String::new()),
            Err(error) => Self::Missing(error.to_string()),
        }
    }

    fn supported<E: Error>(result: Result<bool, E>) -> Self {
        match result {
            Ok(true) => Self::Present(String::new()),
            Ok(false) => Self::Missing("this kernel does not have it".into()),
            Err(error) => Self::Unknown(reason(&error)),
        }
    }
}

/// Runs all probes. Maps are to be pinned in `pin_dir`, which may not exist yet.
pub fn facts(launcher: &Launcher, pin_dir: &Path) -> Facts {
    let kernel = uname().map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned());
    let mut features = BTreeMap::from([
        (Feature::NetAdmin, Fact::of(capabilities::check_net_admin())),
        (Feature::Capabilities, Fact::of(capabilities::check_bpf())),
        (Feature::SocketPrograms, Fact::supported(is_program_supported(ProgramType::CgroupSockAddr))),
        (Feature::LinkPrograms, Fact::supported(is_program_supported(ProgramType::SchedClassifier))),
        (Feature::Maps, maps()),
        (Feature::Bpffs, bpffs::probe(pin_dir)),
        (Feature::Cgroup2, cgroup2()),
        (Feature::Btf, btf()),
        (
            Feature::SetRetval,
            Fact::supported(is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval)),
        ),
        (Feature::NetnsCookie, Fact::supported(netns::current_cookie().map(|cookie| cookie.is_some()))),
        (Feature::Ipset, installed(launcher, "ipset")),
    ]);
    features.extend(in_fresh_namespace(launcher, &kernel));
    Facts { kernel, features }
}

/// Runs the probes that would change the node's network namespace.
fn in_fresh_namespace(launcher: &Launcher, kernel: &str) -> Vec<(Feature, Fact)> {
    let probes: [(Feature, &(dyn Fn() -> Fact + Sync)); 8] = [
        (Feature::Tcx, &|| Fact::of(bpf::tc::tcx::probe())),
        (Feature::Clsact, &|| Fact::of(qdisc_add_clsact("lo"))),
        (Feature::SocketDestroy, &|| Fact::supported(sock_diag::can_destroy())),
        (Feature::Nftables, &|| netfilter::nftables(launcher)),
        (Feature::NftablesMaps, &|| maps::nftables(kernel)),
        (Feature::Iptables, &|| netfilter::iptables(launcher)),
        (Feature::Ipvs, &|| netlink::ipvs(launcher)),
        (Feature::DummyLinks, &|| {
            Fact::of(OwnLink::open("shunt-probe").and_then(|mut link| link.create_dummy()))
        }),
    ];
    let tried = netns::within_new(|| probes.map(|(feature, probe)| (feature, probe())));
    let unknown = |error: KernelError| {
        let reason = format!("{error} (the probe needs root)");
        probes.map(|(feature, _)| (feature, Fact::Unknown(reason.clone())))
    };
    tried.unwrap_or_else(unknown).into()
}

/// Returns an error with its cause, which those of aya do not contain.
fn reason(error: &dyn Error) -> String {
    let text = error.to_string();
    match error.source().map(ToString::to_string) {
        Some(cause) if !text.contains(&cause) => format!("{text}: {cause}"),
        _ => text,
    }
}

fn maps() -> Fact {
    let types = [MapType::Hash, MapType::Array, MapType::LruHash, MapType::LpmTrie, MapType::SkStorage];
    let per_cpu = [MapType::PerCpuArray];
    let mut missing = Vec::new();
    for map in types.into_iter().chain(per_cpu) {
        match is_map_supported(map) {
            Ok(true) => {}
            Ok(false) => missing.push(format!("{map:?}")),
            Err(error) => return Fact::Unknown(format!("{map:?}: {}", reason(&error))),
        }
    }
    if missing.is_empty() {
        Fact::Present(String::new())
    } else {
        Fact::Missing(format!("no {}", missing.join(", ")))
    }
}

fn cgroup2() -> Fact {
    match cgroup::find_root() {
        Ok(root) => Fact::Present(root.display().to_string()),
        Err(error) => Fact::Missing(error.to_string()),
    }
}

fn btf() -> Fact {
    const VMLINUX: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(VMLINUX).exists() {
        Fact::Present(VMLINUX.into())
    } else {
        Fact::Missing(format!("no {VMLINUX}"))
    }
}

fn installed(launcher: &Launcher, program: &str) -> Fact {
    match launcher.find(program) {
        Some(found) => Fact::Present(found.display().to_string()),
        None => Fact::Missing(format!("the command {program} is not installed")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Needs root, as every test of the kernel.
    #[test]
    fn probe_tries_every_feature_and_changes_nothing_here() {
        let links = || fs::read_to_string("/proc/thread-self/net/dev").expect("procfs").lines().count();
        let tables = || fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
        let before = (links(), tables());
        let facts = facts(&Launcher::default(), Path::new(bpf::DEFAULT_PIN_DIR));
        assert_eq!(facts.features.len(), 19);
        for feature in [Feature::SocketPrograms, Feature::LinkPrograms, Feature::Maps, Feature::Clsact] {
            let fact = &facts.features[&feature];
            assert!(matches!(fact, Fact::Present(_)), "{feature:?}: {fact:?}");
        }
        for feature in [Feature::Nftables, Feature::NftablesMaps, Feature::Iptables] {
            let fact = &facts.features[&feature];
            assert!(matches!(fact, Fact::Present(_)), "{feature:?}: {fact:?}");
        }
        let none = super::facts(&Launcher::only_in([]), Path::new(bpf::DEFAULT_PIN_DIR));
        assert!(
            none.features[&Feature::Nftables].is_missing() && none.features[&Feature::Iptables].is_missing()
        );
        assert_eq!((links(), tables()), before);
    }
}
