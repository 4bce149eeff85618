//! What is wrong with a configuration: all of it at once.

use std::{fmt, io, path::PathBuf};

/// One setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The flag (`--mode`) or the path in the file (`iptables.syncPeriod`).
    pub setting: String,
    /// What it was set to, as written.
    pub value: String,
    /// What it may be.
    pub allowed: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.setting, self.value, self.allowed)
    }
}

/// One setting that was given in vain: unknown, without an effect, or not looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The flag (`--kube-api-qps`) or the path in the file (`clientConnection.qps`).
    pub setting: String,
    /// Why it has no effect.
    pub why: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.setting, self.why)
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("--config: {}: cannot be read; must be a KubeProxyConfiguration file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no YAML or JSON.
    #[error("--config: {}: is neither YAML nor JSON", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_yaml_ng::Error,
    },
    /// Settings that cannot be used.
    #[error("invalid configuration:{}", lines(problems))]
    Invalid {
        /// All of them.
        problems: Vec<Problem>,
    },
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().fold(String::new(), |lines, problem| lines + "\n  " + &problem.to_string())
}
