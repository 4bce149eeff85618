//! The directory of manifests that the proxy watches: one object for each file, replaced by rename.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_yaml_ng::Mapping;

use crate::case::ObjectKey;

/// A directory of manifests, and a staging directory for new files.
pub struct Manifests {
    directory: PathBuf,
    staging: PathBuf,
}

impl Manifests {
    /// Creates the empty directories below `parent`.
    pub fn create(parent: &Path) -> Result<Self> {
        let this = Self { directory: parent.join("manifests"), staging: parent.join("staging") };
        for path in [&this.directory, &this.staging] {
            match fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                // Without the parents, which are gone when the world has been removed.
                _ => fs::create_dir(path),
            }
            .with_context(|| format!("create {}", path.display()))?;
        }
        Ok(this)
    }

    /// Returns the directory for the proxy.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Adds or replaces an object. Its file changes in one step.
    pub fn apply(&self, key: &ObjectKey, manifest: &Mapping) -> Result<()> {
        let text = serde_yaml_ng::to_string(manifest).with_context(|| format!("write {key}"))?;
        self.place(&file_name(key), &text)
    }

    /// Writes a file with this text in one step.
    pub fn place(&self, name: &str, text: &str) -> Result<()> {
        let (staged, path) = (self.staging.join(name), self.directory.join(name));
        fs::write(&staged, text).with_context(|| format!("write {}", staged.display()))?;
        fs::rename(&staged, &path).with_context(|| format!("rename to {}", path.display()))
    }

    /// Deletes an object.
    pub fn delete(&self, key: &ObjectKey) -> Result<()> {
        fs::remove_file(self.directory.join(file_name(key))).with_context(|| format!("delete {key}"))
    }
}

fn file_name(key: &ObjectKey) -> String {
    let namespace = key.namespace.as_deref().unwrap_or("cluster");
    format!("{}.{namespace}.{}.yaml", key.kind.to_lowercase(), key.name)
}
