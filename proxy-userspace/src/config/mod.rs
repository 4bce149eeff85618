//! The configuration: kube-proxy's flags and `KubeProxyConfiguration` file, and own settings.
//!
//! Flags and the file end in one table of settings by field, and each setting is checked in the
//! same way. All errors are reported at once, and so are all settings without an effect.
#![forbid(unsafe_code)]

mod change;
mod effective;
mod environment;
mod error;
mod file;
mod flags;
mod gates;
mod go;
mod lists;
mod resolve;
mod resolved;
mod schema;
mod settings;
mod value;

#[cfg(test)]
mod tests;

pub use self::{
    change::ConfigChange,
    effective::EffectiveSettings,
    environment::Environment,
    error::{ConfigError, DeprecatedSetting, IneffectiveSetting, InvalidSetting},
    file::{ConfigFile, FileWatcher},
    flags::{Flags, Generated, ProbeOutput},
    gates::{FeatureGate, FeatureGates},
    resolve::log_filter_at,
    resolved::{Config, EbpfConfig, IpvsConfig, LogFormat, ObjectSource},
};
