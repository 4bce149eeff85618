//! What the checks judge.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    dataplane::Mode,
    health::{NodeReport, ReportedMap},
    inspect::{DriftRow, LeftOutRow},
    kernel::Confinement,
    link_path::Evidence,
    probe::Evaluation,
};

/// The facts about a node.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) daemon: Daemon,
    /// Service ports that the daemon leaves out.
    pub(super) left_out_ports: Vec<LeftOutRow>,
    /// What the kernel holds otherwise than the daemon wrote it.
    pub(super) drift: Vec<DriftRow>,
    /// What this machine offers to each mode.
    pub(super) evaluation: Evaluation,
    /// The processes named `kube-proxy` in this network namespace.
    pub(super) kube_proxies: Vec<u32>,
    /// The modes whose rules are in the kernel.
    pub(super) rules: Vec<Mode>,
    pub(super) pins: Pins,
    pub(super) sysctls: Sysctls,
    /// The rules and filters of others. `None` if they could not be read.
    pub(super) evidence: Option<Evidence>,
    /// This process has the user ID 0.
    pub(super) is_root: bool,
    /// The security module that confines this process, if no daemon says what confines it.
    pub(super) confinement: Option<Confinement>,
    /// What could not be read, with the error.
    pub(super) unread: Vec<String>,
}

/// The daemon of this network namespace.
#[derive(Clone, Debug)]
pub(super) enum Daemon {
    Running(Box<NodeReport>),
    /// None listens.
    NotRunning,
    /// One listens, but does not answer.
    Silent(String),
}

impl Daemon {
    pub(super) const fn report(&self) -> Option<&NodeReport> {
        match self {
            Self::Running(report) => Some(report),
            Self::NotRunning | Self::Silent(_) => None,
        }
    }
}

/// The directory of pins.
#[derive(Clone, Debug, Default)]
pub(super) struct Pins {
    pub(super) directory: PathBuf,
    /// The pinned links of programs.
    pub(super) links: usize,
    /// How full the maps are, if no daemon says it.
    pub(super) maps: Vec<ReportedMap>,
    /// What an interrupted replacement of maps left.
    pub(super) unfinished: Vec<PathBuf>,
}

/// Sysctls of this network namespace. `None` if the kernel does not have one.
#[derive(Clone, Debug, Default)]
pub(super) struct Sysctls {
    pub(super) forwards_ipv4: Option<i64>,
    pub(super) forwards_ipv6: Option<i64>,
    pub(super) conntrack_entries: Option<i64>,
    pub(super) conntrack_max: Option<i64>,
    /// By link, with `all` and `default`.
    pub(super) rp_filter: BTreeMap<String, i64>,
    pub(super) route_localnet: BTreeMap<String, i64>,
}
