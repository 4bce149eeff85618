//! Errors of a configuration, and settings without an effect.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// A setting whose value cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {value}: {allowed}")]
pub struct InvalidSetting {
    /// The flag (`--mode`) or the path in the file (`iptables.syncPeriod`).
    pub setting: String,
    /// The value as written.
    pub value: String,
    /// What the value must be.
    pub allowed: String,
}

/// A setting that was given and has no effect: it is unknown, ignored, or of another mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IneffectiveSetting {
    /// The flag (`--kube-api-qps`) or the path in the file (`clientConnection.qps`).
    pub setting: String,
    /// The reason why it has no effect.
    pub why: String,
}

impl fmt::Display for IneffectiveSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.setting, self.why)
    }
}

/// A setting that was given, has its effect, and is deprecated in kube-proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeprecatedSetting {
    /// The flag.
    pub setting: String,
    /// The flag to use.
    pub instead: String,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {} (--config)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is neither YAML nor JSON.
    #[error("cannot parse the configuration file {} (--config) as YAML or JSON", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The cause, with its line.
        source: serde_yaml_ng::Error,
    },
    /// The file has more than one document.
    #[error(
        "the configuration file {} (--config) has several YAML documents (---): it must have one \
         KubeProxyConfiguration",
        .0.display()
    )]
    SeveralDocuments(PathBuf),
    /// Some settings cannot be used.
    #[error("invalid configuration{}:{}{}", named(file.as_deref()), lines(invalid), without_effect(ineffective))]
    Invalid {
        /// The file that was read, whose settings these may be.
        file: Option<PathBuf>,
        /// What cannot be used.
        invalid: Vec<InvalidSetting>,
        /// What would have no effect, such as a field whose name is misspelt.
        ineffective: Vec<IneffectiveSetting>,
    },
}

impl ConfigError {
    /// Returns the error with the file that was read.
    pub(super) fn in_file(mut self, read: Option<PathBuf>) -> Self {
        if let Self::Invalid { file, .. } = &mut self {
            *file = read;
        }
        self
    }
}

fn named(file: Option<&Path>) -> String {
    file.map(|path| format!(" (flags and the file {})", path.display())).unwrap_or_default()
}

fn lines(settings: &[impl fmt::Display]) -> String {
    settings.iter().fold(String::new(), |lines, setting| lines + "\n  " + &setting.to_string())
}

fn without_effect(settings: &[IneffectiveSetting]) -> String {
    if settings.is_empty() { String::new() } else { format!("\nwithout an effect:{}", lines(settings)) }
}
