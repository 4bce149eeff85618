//! The whole configuration as plain values, checked and with defaults filled in.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use ipnet::IpNet;
use proxy_common::{layout::MapSizes, maglev::TableSize};

use super::{
    effective::EffectiveSettings,
    error::{DeprecatedSetting, IneffectiveSetting},
    file::ConfigFile,
    gates::FeatureGates,
};
use crate::{
    kernel::{bpf::LogLevel, ipvs::Timeouts},
    mode::{BackstopPolicy, LinksDirect, LinksPath, Mode, SocketsScope},
    model::ModelSettings,
    net::ContentType,
    node::NodeSettings,
};

/// Where Services, EndpointSlices and the Node come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    /// A directory of manifests.
    Manifests(PathBuf),
    /// The API server. If both fields are empty, it is found as in a pod of the cluster.
    Api {
        /// `--kubeconfig`.
        kubeconfig: Option<PathBuf>,
        /// `--master`: the addresses of the API server.
        servers: Vec<String>,
        /// The encodings of objects that the server may use, the preferred one first.
        content_types: Vec<ContentType>,
    },
}

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each mirrors one setting")]
pub struct Config {
    /// The mode to run.
    pub mode: Mode,
    /// The mode is `auto`, and [`Self::mode`] was chosen for it.
    pub mode_is_auto: bool,
    /// Where objects come from.
    pub source: ObjectSource,
    /// The settings of endpoint resolution, with the node's name.
    pub model: ModelSettings,
    /// The settings of the node that are made at start.
    pub node: NodeSettings,
    /// Where `/healthz` and `/livez` answer.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where `/metrics` and `/proxyMode` answer.
    pub metrics_bind_address: Option<SocketAddr>,
    /// The process ends if an address to listen on is taken.
    pub bind_address_hard_fail: bool,
    /// The metrics address also answers profiling requests.
    pub profiling: bool,
    /// The metrics address also answers `/ui/`.
    pub ui: bool,
    /// The feature gates that were given.
    pub feature_gates: FeatureGates,
    /// How often the kernel is compared with the Snapshot; above zero.
    pub sync_period: Duration,
    /// The least time between two syncs under load; may be zero.
    pub min_sync_period: Duration,
    /// The bit of a packet's mark that asks for masquerade, in the mode that runs.
    pub masquerade_mark: u32,
    /// The iptables mode serves node ports on 127.0.0.1.
    pub localhost_node_ports: bool,
    /// How many service ports have counters of their own in the modes ebpf and ipvs; 0 counts none.
    pub counted_services: u32,
    /// Settings of the ebpf mode.
    pub ebpf: EbpfConfig,
    /// Settings of the ipvs mode.
    pub ipvs: IpvsConfig,
    /// The format of the log.
    pub log_format: LogFormat,
    /// Which log lines are written, in the syntax of `RUST_LOG`.
    pub log_filter: String,
    /// The longest time that a changed file waits before it is applied.
    pub reload_jitter: Duration,
    /// Settings that were given and have no effect.
    pub ineffective: Vec<IneffectiveSetting>,
    /// Settings that were given and are deprecated.
    pub deprecated: Vec<DeprecatedSetting>,
    /// All settings in effect, as `--write-config-to` writes them.
    pub effective: EffectiveSettings,
    /// The file that was read.
    pub file: Option<ConfigFile>,
}

/// Settings of the ebpf mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EbpfConfig {
    /// The cgroup v2 directory whose processes are served.
    pub cgroup_root: PathBuf,
    /// Where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// The sizes of maps.
    pub map_sizes: MapSizes,
    /// The bit of a packet's mark that asks for masquerade.
    pub masquerade_mark: u32,
    /// Which single connections and packets the programs report.
    pub log: LogLevel,
    /// When a netfilter mode's rules are kept beneath the programs.
    pub backstop: BackstopPolicy,
    /// What translates packets that come in on links.
    pub links_path: LinksPath,
    /// Which packets take the direct path.
    pub links_direct: LinksDirect,
    /// The smallest number of entries of a Maglev table.
    pub maglev_table_size: TableSize,
    /// Whose sockets are served.
    pub sockets_scope: SocketsScope,
}

/// Settings of the ipvs mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpvsConfig {
    /// The scheduler of virtual servers.
    pub scheduler: Arc<str>,
    /// Virtual servers in these ranges belong to somebody else.
    pub exclude_cidrs: Vec<IpNet>,
    /// The node does not answer ARP requests for Service addresses.
    pub strict_arp: bool,
    /// Timeouts of connections; zero leaves the kernel's value.
    pub timeouts: Timeouts,
}
