//! The source of the proxy's objects: a directory of manifests, or an API server.

use anyhow::Result;
use serde_yaml_ng::Mapping;

use super::{Cluster, Manifests};
use crate::{
    case::ObjectKey,
    world::{Host, World},
};

/// A source of objects for a proxy.
pub trait ObjectSource {
    /// Returns the flag of the proxy for this source, and its value.
    fn flag(&self) -> (&'static str, String);
}

/// The kinds of sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectSourceKind {
    /// A directory of manifests.
    #[default]
    Manifests,
    /// An API server on node1.
    Api,
}

impl std::str::FromStr for ObjectSourceKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "manifests" => Ok(Self::Manifests),
            "api" => Ok(Self::Api),
            _ => Err("must be manifests or api".to_owned()),
        }
    }
}

/// The objects of a case.
pub enum Objects {
    /// In a directory of manifests.
    Manifests(Manifests),
    /// In an API server.
    Api(Cluster),
}

impl Objects {
    /// Creates a source without objects.
    pub fn create(from: ObjectSourceKind, world: &World) -> Result<Self> {
        match from {
            ObjectSourceKind::Manifests => Manifests::create(world.directory()).map(Self::Manifests),
            ObjectSourceKind::Api => Cluster::start(world).map(Self::Api),
        }
    }

    /// Creates a source without objects that proxies on all nodes can reach.
    pub fn create_for_all(from: ObjectSourceKind, world: &World) -> Result<Self> {
        match from {
            ObjectSourceKind::Manifests => Self::create(from, world),
            ObjectSourceKind::Api => {
                let address = Host::Node1.addresses()[0].addr();
                Cluster::start_at(world, address).map(Self::Api)
            }
        }
    }

    /// Adds or replaces an object.
    pub fn apply(&self, key: &ObjectKey, manifest: &Mapping) -> Result<()> {
        match self {
            Self::Manifests(manifests) => manifests.apply(key, manifest),
            Self::Api(cluster) => cluster.apply(manifest),
        }
    }

    /// Adds or replaces the objects of a YAML text. In a directory, they are in a file with this
    /// name.
    pub fn place(&self, name: &str, text: &str) -> Result<()> {
        match self {
            Self::Manifests(manifests) => manifests.place(name, text),
            Self::Api(cluster) => cluster.apply_all(text),
        }
    }

    /// Deletes an object.
    pub fn delete(&self, key: &ObjectKey) -> Result<()> {
        match self {
            Self::Manifests(manifests) => manifests.delete(key),
            Self::Api(cluster) => cluster.delete(key),
        }
    }
}

impl ObjectSource for Objects {
    fn flag(&self) -> (&'static str, String) {
        match self {
            Self::Manifests(manifests) => manifests.flag(),
            Self::Api(cluster) => cluster.flag(),
        }
    }
}

impl ObjectSource for Manifests {
    fn flag(&self) -> (&'static str, String) {
        ("--manifests", self.directory().display().to_string())
    }
}

impl ObjectSource for Cluster {
    fn flag(&self) -> (&'static str, String) {
        ("--master", self.server().url())
    }
}
