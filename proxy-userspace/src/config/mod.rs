//! What the operator wants: kube-proxy's flags and its `KubeProxyConfiguration` file, with our own settings beside them.
//!
//! Flags and file end in one table of settings by field, each checked in the same way; flags that are given override the
//! file. Everything wrong is reported at once.
#![forbid(unsafe_code)]

mod duration;
mod environment;
mod flags;
mod problem;
mod resolve;
mod schema;
mod settings;
mod value;

#[cfg(test)]
mod tests;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use environment::Environment;
pub use flags::{Flags, ProbeOutput};
pub use problem::{ConfigError, Problem};

use crate::{
    dataplane::{
        ebpf::EbpfSettings, iptables::IptablesSettings, ipvs::IpvsSettings, nftables::NftablesSettings,
    },
    model::ModelSettings,
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
    /// Where `/healthz` and `/livez` answer.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where `/metrics` and `/proxyMode` answer.
    pub metrics_bind_address: Option<SocketAddr>,
    /// Exit where an address to listen on is taken.
    pub bind_address_hard_fail: bool,
    /// How often the kernel is compared with what it should hold; above zero.
    pub sync_period: Duration,
    /// Under load, the least time between two changes of the kernel; may be zero.
    pub min_sync_period: Duration,
    /// How often objects are refreshed from the API server; above zero.
    pub config_sync_period: Duration,
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
    /// Fields of the file that are set but that nothing here reads.
    pub unread_fields: Vec<&'static str>,
}

impl Config {
    /// Reads the file that the flags name, if any, and puts flags, file and defaults together.
    pub fn load(flags: &Flags, environment: &Environment) -> Result<Self, ConfigError> {
        Self::load_with_auto(flags, environment, Mode::Ebpf)
    }

    /// The same where `auto` stands for this mode: sections and defaults are that mode's.
    pub fn load_with_auto(flags: &Flags, environment: &Environment, auto: Mode) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => Some(read_file(path)?),
            None => None,
        };
        Self::from_parts(flags, file.as_ref(), environment, auto)
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

fn read_file(path: &PathBuf) -> Result<serde_yaml_ng::Value, ConfigError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.clone(), source })?;
    serde_yaml_ng::from_str(&text).map_err(|source| ConfigError::Syntax { path: path.clone(), source })
}
