//! The settings of a release in the workspace's Cargo.toml.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::cli::steps;

/// What Cargo.toml says about the product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The version of the workspace.
    pub(crate) version: String,
    /// The name of the image, without a tag.
    pub(crate) image: String,
    /// The address of the repository.
    pub(crate) repository: String,
    /// The SPDX expression of the license.
    pub(crate) license: String,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    metadata: Workspace,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: String,
    repository: String,
}

#[derive(Deserialize)]
struct Workspace {
    shunt: Shunt,
}

#[derive(Deserialize)]
struct Shunt {
    image: String,
}

impl Settings {
    /// Reads them with cargo. The network is not needed.
    pub(crate) fn read() -> Result<Self> {
        let run = steps::cargo(steps::SHORT).args(["metadata", "--no-deps", "--format-version", "1"]);
        let read: Metadata = serde_json::from_str(&run.read()?).context(
            "Cargo.toml lacks [workspace.metadata.shunt] with image, or [workspace.package] with repository",
        )?;
        let package = read.packages.into_iter().find(|package| package.name == "proxy-userspace");
        let Package { version, license, repository, .. } =
            package.context("the workspace has no package proxy-userspace")?;
        Ok(Self { version, license, repository, image: read.metadata.shunt.image })
    }

    /// Returns the name of the image with the version as its tag.
    pub(crate) fn reference(&self) -> String {
        format!("{}:{}", self.image, self.version)
    }
}

#[cfg(test)]
impl Settings {
    pub(crate) fn example() -> Self {
        Self {
            version: "1.2.3".into(),
            image: "registry.example/shunt".into(),
            repository: "https://git.example/shunt".into(),
            license: "Apache-2.0".into(),
        }
    }
}
