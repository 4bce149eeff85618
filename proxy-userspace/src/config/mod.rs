//! What the operator wants: kube-proxy's flags and its `KubeProxyConfiguration` file, with our own settings beside them.
//!
//! Flags and file end in one table of settings by field, each checked in the same way; flags that count beside the file override
//! it. Everything wrong is reported at once, and so is what was given in vain.
#![forbid(unsafe_code)]

mod change;
mod duration;
mod environment;
mod file;
mod flags;
mod lists;
mod node;
mod problem;
mod resolve;
mod schema;
mod settings;
mod value;
mod written;

#[cfg(test)]
mod tests;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use change::Change;
pub use environment::Environment;
pub use file::{ConfigFile, FileChanges};
pub use flags::{Flags, ProbeOutput};
pub use problem::{ConfigError, Note, Problem};
pub use written::Effective;

use crate::{
    dataplane::{
        ebpf::EbpfSettings, iptables::IptablesSettings, ipvs::IpvsSettings, nftables::NftablesSettings,
    },
    model::ModelSettings,
    node::NodeSettings,
};
use settings::Settings;

/// A way of programming the kernel that this build has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// eBPF.
    Ebpf,
    /// nftables.
    Nftables,
    /// iptables.
    Iptables,
    /// IPVS, the kernel's virtual server. `auto` never stands for it.
    Ipvs,
}

impl Mode {
    /// All of them, in the order in which `auto` prefers them.
    pub const ALL: [Self; 4] = [Self::Ebpf, Self::Nftables, Self::Iptables, Self::Ipvs];

    /// The name it is chosen by, and that `/proxyMode` answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
        }
    }
}

/// Where Services, EndpointSlices and the Node come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    /// A directory of manifests.
    Manifests(PathBuf),
    /// The API server; with neither field, as the cluster tells its pods.
    Api {
        /// `--kubeconfig`.
        kubeconfig: Option<PathBuf>,
        /// `--master`.
        master: Option<String>,
    },
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The whole configuration, checked and with defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The mode; the preferred one where it is for the kernel to decide.
    pub mode: Mode,
    /// The mode was `auto`.
    pub mode_is_auto: bool,
    /// Where objects come from.
    pub source: ObjectSource,
    /// What resolution depends on, the node's name included.
    pub model: ModelSettings,
    /// What is set on the node at start.
    pub node: NodeSettings,
    /// Where `/healthz` and `/livez` answer.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where `/metrics` and `/proxyMode` answer.
    pub metrics_bind_address: Option<SocketAddr>,
    /// Exit where an address to listen on is taken.
    pub bind_address_hard_fail: bool,
    /// Answer profiling requests where metrics are.
    pub profiling: bool,
    /// How often the kernel is compared with what it should hold; above zero.
    pub sync_period: Duration,
    /// Under load, the least time between two changes of the kernel; may be zero.
    pub min_sync_period: Duration,
    /// Settings of the eBPF mode.
    pub ebpf: EbpfSettings,
    /// Settings of the nftables mode.
    pub nftables: NftablesSettings,
    /// Settings of the iptables mode.
    pub iptables: IptablesSettings,
    /// Settings of the ipvs mode.
    pub ipvs: IpvsSettings,
    /// How logs are written.
    pub log_format: LogFormat,
    /// Which logs are written, in the syntax of `RUST_LOG`.
    pub log_filter: String,
    /// What was given in vain, each with the reason.
    pub notes: Vec<Note>,
    /// All settings in effect, to be written.
    pub effective: Effective,
    /// The file that was read.
    pub file: Option<ConfigFile>,
}

impl Config {
    /// Reads the file that the flags name, if any, and puts flags, file and defaults together.
    pub fn load(flags: &Flags, environment: &Environment) -> Result<Self, ConfigError> {
        Self::load_with_auto(flags, environment, Mode::Ebpf)
    }

    /// The same where `auto` stands for this mode: sections and defaults are that mode's.
    pub fn load_with_auto(flags: &Flags, environment: &Environment, auto: Mode) -> Result<Self, ConfigError> {
        let file = flags.config.as_ref().map(ConfigFile::read).transpose()?;
        Self::load_from(flags, file, environment, auto)
    }

    /// The same from a file that was read already.
    pub fn load_from(
        flags: &Flags,
        file: Option<ConfigFile>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let yaml = file.as_ref().map(ConfigFile::yaml).transpose()?;
        let config = Self::from_parts(flags, yaml.as_ref(), environment, auto)?;
        Ok(Self { file, ..config })
    }

    fn from_parts(
        flags: &Flags,
        file: Option<&serde_yaml_ng::Value>,
        environment: &Environment,
        auto: Mode,
    ) -> Result<Self, ConfigError> {
        let mut settings = Settings::default();
        if let Some(file) = file {
            settings.add_file(file);
        }
        flags.add_to(&mut settings);
        resolve::resolve(settings, environment, auto)
    }
}
