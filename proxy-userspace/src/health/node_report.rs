//! What the process reports about itself on the local socket, for `shunt doctor`: the facts of
//! `/statusz` for programs.

use serde::{Deserialize, Serialize};

use super::{ProxyHealth, Status, WatchReport, Watches};
use crate::{
    dataplane::MapFill,
    kernel::Confinement,
    model::{ChosenPath, LinkPath, SocketScope},
};

/// The state of the proxy on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// The version of the binary that runs.
    pub version: String,
    /// The mode. `None` while none runs.
    pub mode: Option<String>,
    /// Why the mode runs.
    pub mode_reason: Option<String>,
    /// The netfilter mode beneath the programs, if there is one.
    pub backstop: Option<String>,
    /// Why netfilter translates on links, if it does instead of programs.
    pub netfilter_on_links: Option<String>,
    /// Why programs do not serve all sockets. `None` if they do.
    pub sockets_left_alone: Option<String>,
    /// Links that are not served.
    pub left_out_links: Vec<String>,
    /// Links on which another program runs first, as `LINK by PROGRAM`.
    pub displaced_links: Vec<String>,
    /// What cannot be read in the directory of manifests.
    pub unreadable_manifests: Vec<String>,
    /// The families of the pods on this node, `IPv4` or `IPv6`. Empty if they are not known.
    #[serde(default)]
    pub families: Vec<String>,
    /// Kinds of objects that are not up to date, with the error.
    pub watch_errors: Vec<String>,
    /// The watches of the API server. Empty with manifests.
    #[serde(default)]
    pub watches: Vec<WatchReport>,
    /// How many seconds the clock of this node is ahead of the API server's.
    #[serde(default)]
    pub clock_ahead_seconds: Option<i64>,
    /// The security module that confines the process, and what the operator can do.
    #[serde(default)]
    pub confined_by: Option<(String, String)>,
    /// Tasks that fail, with the error.
    pub failing: Vec<String>,
    /// Why the changed configuration file cannot be used.
    #[serde(default)]
    pub configuration_refused: Option<String>,
    /// How long ago another shunt on this node ended because this one runs, in seconds.
    #[serde(default)]
    pub second_shunt_seconds_ago: Option<u64>,
    /// Why `/healthz` answers 503.
    pub not_ready: Vec<String>,
    /// How long the oldest change waits that the kernel does not have yet, in seconds.
    pub oldest_pending_seconds: Option<u64>,
    /// How full maps are.
    pub maps: Vec<ReportedMap>,
    /// The directory of pins of the configuration.
    pub pin_directory: String,
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportedMap {
    /// The name of the map.
    pub name: String,
    /// The number of entries.
    pub entries: usize,
    /// The maximum number of entries.
    pub capacity: u32,
}

impl From<MapFill> for ReportedMap {
    fn from(MapFill { map, entries, capacity }: MapFill) -> Self {
        Self { name: map.to_owned(), entries, capacity }
    }
}

impl NodeReport {
    /// Reads the state now.
    pub fn new(status: &Status, health: &ProxyHealth, pin_directory: String) -> Self {
        let progress = health.progress();
        let facts = status.facts();
        let running = facts.mode.as_ref();
        let netfilter_on_links = match &facts.link_path {
            Some(ChosenPath { path: LinkPath::Netfilter { .. }, why }) => Some(why.as_ref().to_owned()),
            _ => None,
        };
        let scope = facts.socket_scope.as_ref().filter(|reported| reported.scope == SocketScope::Node);
        let why_of_scope =
            scope.map(|reported| reported.why.as_deref().unwrap_or("as configured").to_owned());
        let pending = progress.families.iter().filter_map(|family| family.oldest_pending).max();
        let maps = facts.map_fill.iter().copied().map(ReportedMap::from);
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: running.map(|running| running.mode.name().to_owned()),
            mode_reason: running.map(|running| running.why.clone()),
            backstop: facts.backstop.as_ref().map(|backstop| backstop.mode.name().to_owned()),
            netfilter_on_links,
            sockets_left_alone: why_of_scope,
            left_out_links: facts.left_out.iter().map(ToString::to_string).collect(),
            displaced_links: facts.displaced.iter().map(ToString::to_string).collect(),
            unreadable_manifests: facts.unreadable_manifests.clone(),
            families: facts.node_families.iter().map(|family| family.name().to_owned()).collect(),
            watch_errors: facts.watch_errors.clone(),
            watches: facts.watches.as_ref().map(Watches::read).unwrap_or_default(),
            clock_ahead_seconds: facts.clock_ahead,
            confined_by: Confinement::of_this_process()
                .map(|module| (module.to_string(), module.remedy().to_owned())),
            failing: facts.failing.iter().map(|(task, error)| format!("cannot {task}: {error}")).collect(),
            configuration_refused: facts.configuration_refused.clone(),
            second_shunt_seconds_ago: facts.second_shunt.map(|at| at.elapsed().as_secs()),
            not_ready: progress.not_ready.iter().map(ToString::to_string).collect(),
            oldest_pending_seconds: pending.map(|since| since.as_secs()),
            maps: maps.collect(),
            pin_directory,
        }
    }
}
