//! The settings of a release in the workspace's Cargo.toml.

use anyhow::{Context as _, Result};
use serde_json::Value;

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

impl Settings {
    /// Reads them with cargo. The network is not needed.
    pub(crate) fn read() -> Result<Self> {
        let run = steps::cargo(steps::SHORT).args(["metadata", "--no-deps", "--format-version", "1"]);
        let read: Value = serde_json::from_str(&run.read()?).context("cannot read cargo's metadata")?;
        let packages = read["packages"].as_array().into_iter().flatten();
        let package = packages.into_iter().find(|package| package["name"] == "proxy-userspace");
        let package = package.context("the workspace has no package proxy-userspace")?;
        Ok(Self {
            version: text(package, "version", "[workspace.package]")?,
            license: text(package, "license", "[workspace.package]")?,
            repository: text(package, "repository", "[workspace.package]")?,
            image: text(&read["metadata"]["shunt"], "image", "[workspace.metadata.shunt]")?,
        })
    }

    /// Returns the name of the image with the version as its tag.
    pub(crate) fn reference(&self) -> String {
        format!("{}:{}", self.image, self.version)
    }
}

fn text(table: &Value, field: &str, section: &str) -> Result<String> {
    let text = table[field].as_str().map(str::to_owned);
    text.with_context(|| format!("Cargo.toml has no {field} in {section}"))
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
