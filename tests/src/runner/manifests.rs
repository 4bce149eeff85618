//! The directory of manifests that the proxy watches: one object a file, changed by rename.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_yaml_ng::Mapping;

use crate::case::ObjectKey;

/// A directory of manifests, and one beside it where files are written before they appear.
pub struct Manifests {
    directory: PathBuf,
    staging: PathBuf,
}

impl Manifests {
    /// Makes the directory below `parent`, empty.
    pub fn create(parent: &Path) -> Result<Self> {
        let this = Self { directory: parent.join("manifests"), staging: parent.join("staging") };
        for path in [&this.directory, &this.staging] {
            match fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                // Not with its parents, which are gone when the world is removed.
                _ => fs::create_dir(path),
            }
            .with_context(|| format!("create {}", path.display()))?;
        }
        Ok(this)
    }

    /// What to give the proxy.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Adds or replaces an object: its file changes in one step.
    pub fn apply(&self, key: &ObjectKey, manifest: &Mapping) -> Result<()> {
        let text = serde_yaml_ng::to_string(manifest).with_context(|| format!("write {key}"))?;
        self.place(&file_name(key), &text)
    }

    /// Puts a file of this text in its place in one step.
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
