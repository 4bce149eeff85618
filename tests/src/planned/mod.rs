//! Runs conformance cases on the model alone, without a kernel: objects in, Snapshots out.

mod tables;

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use proxy_userspace::{
    config::{Config, Environment, Flags},
    model::{Dirty, LinkAddress, Model, NodeFacts, Snapshot},
    watch::ManifestSource,
};
use tokio::{runtime, sync::mpsc};

pub use self::tables::{Tables, target};
use crate::{
    case::{Case, Step},
    runner::{Manifests, compose},
};

/// The addresses of node1 in the world of the cases.
const ADDRESSES: [(&str, &str, u8); 10] = [
    ("lo", "127.0.0.1", 8),
    ("lo", "::1", 128),
    ("eth0", "192.168.57.11", 24),
    ("eth0", "192.168.57.111", 24),
    ("eth0", "fd57::11", 64),
    ("eth0", "fd57::111", 64),
    ("vetha1", "10.244.1.1", 32),
    ("vetha1", "fd44:1::1", 128),
    ("vetha2", "10.244.1.1", 32),
    ("vetha3", "10.244.1.1", 32),
];
/// The number of object kinds. The source sends each kind completely once.
const KINDS: usize = 3;

/// A case between two of its steps.
pub struct PlannedCase {
    _directory: tempfile::TempDir,
    manifests: Manifests,
    model: Model,
    config: Config,
    runtime: runtime::Runtime,
}

impl PlannedCase {
    /// Creates the state before the first step, in a mode.
    pub fn new(case: &Case, mode: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let manifests = Manifests::create(directory.path())?;
        let config = config(case, mode, directory.path())?;
        let mut model = Model::new(config.model.clone());
        model.set_node_facts(facts()?);
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { _directory: directory, manifests, model, config, runtime })
    }

    /// Returns the configuration of the case.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the manifests, to which other objects can be added.
    pub fn manifests(&self) -> &Manifests {
        &self.manifests
    }

    /// Returns the current Snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        self.model.snapshot()
    }

    /// Makes the changes of a step, and returns what is dirty.
    pub fn apply_step(&mut self, step: &Step) -> Result<Dirty> {
        step.delete.iter().try_for_each(|key| self.manifests.delete(key))?;
        step.apply.iter().try_for_each(|object| self.manifests.apply(&object.key, &object.manifest))?;
        let (to, mut from) = mpsc::channel(KINDS);
        let source = ManifestSource::new(self.manifests.directory());
        let model = &mut self.model;
        self.runtime.block_on(async {
            let reading = tokio::spawn(source.run(to));
            for _ in 0..KINDS {
                model.apply(from.recv().await.context("the manifest source ended early")?);
            }
            drop(from);
            reading.await?.context("read the manifests")
        })?;
        Ok(self.model.resolve())
    }
}

fn config(case: &Case, mode: &str, directory: &Path) -> Result<Config> {
    let file = directory.join("config.yaml");
    fs::write(&file, compose(&case.config, mode)?)?;
    let file = file.display().to_string();
    let manifests = directory.display().to_string();
    let words = ["shunt", "--mode", mode, "--cgroup-root", "/", "--config", &file, "--manifests", &manifests];
    Ok(Config::load(&Flags::parse(words)?, &Environment::of_this_process())?)
}

fn facts() -> Result<NodeFacts> {
    let address = |(link, address, prefix_len): (&str, &str, u8)| {
        anyhow::Ok(LinkAddress { link: link.into(), address: address.parse()?, prefix_len })
    };
    let mut addresses = ADDRESSES.into_iter().map(address).collect::<Result<Vec<_>>>()?;
    addresses.sort();
    Ok(NodeFacts { addresses, ..NodeFacts::default() })
}
