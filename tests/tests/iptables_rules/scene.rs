//! A conformance case played to the planning of the iptables mode alone: objects in, rules out, no kernel.

use std::fs;

use anyhow::{Context as _, Result};
use proxy_userspace::{
    config::{Config, Environment, Flags},
    dataplane::{
        Dataplane as _, PlanSize as _,
        iptables::{Iptables, Offer, State},
    },
    kernel::iptables::Backend,
    model::{Dirty, IpFamily, LinkAddress, Model, NodeFacts},
    watch::ManifestSource,
};
use shunt_tests::{
    case::{Case, Step},
    runner::{Manifests, compose},
};
use tokio::sync::mpsc;

use crate::tables::Tables;

/// Addresses of node1 in the world of the cases.
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
const KINDS: usize = 3;

/// A case in the middle of its steps.
pub(crate) struct Scene {
    _directory: tempfile::TempDir,
    manifests: Manifests,
    model: Model,
    state: State,
    /// IPv4's rules and IPv6's.
    pub(crate) tables: [Tables; 2],
    runtime: tokio::runtime::Runtime,
}

impl Scene {
    /// Before the first step.
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let manifests = Manifests::create(directory.path())?;
        let config = config(case, directory.path())?;
        let mut model = Model::new(config.model);
        model.set_node_facts(facts()?);
        let offer = Offer {
            masquerade_mark: config.iptables.masquerade_mark,
            localhost_node_ports: config.iptables.localhost_node_ports,
            random_fully: true,
            be_liberal: false,
            counters: true,
        };
        Ok(Self {
            _directory: directory,
            manifests,
            model,
            state: State::of_empty_tables(offer),
            tables: Default::default(),
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        })
    }

    /// Makes the changes of a step, plans what changed, and has the tables take it.
    pub(crate) fn play(&mut self, step: &Step) -> Result<()> {
        step.delete.iter().try_for_each(|key| self.manifests.delete(key))?;
        step.apply.iter().try_for_each(|object| self.manifests.apply(&object.key, &object.manifest))?;
        let (to, mut from) = mpsc::channel(KINDS);
        let source = ManifestSource::new(self.manifests.directory());
        let model = &mut self.model;
        self.runtime.block_on(async {
            let reading = tokio::spawn(source.run(to));
            for _ in 0..KINDS {
                model.apply(from.recv().await.context("the manifests end early")?);
            }
            drop(from);
            reading.await?.context("read the manifests")
        })?;
        let dirty = self.model.resolve();
        let plan = Iptables::plan(&self.state, self.model.snapshot(), &dirty);
        for (family, input) in plan.inputs(Backend::Nft) {
            self.tables[usize::from(family == IpFamily::V6)].restore(&input);
        }
        plan.record(&mut self.state);
        let rest = Iptables::plan(&self.state, self.model.snapshot(), &Dirty::everything());
        anyhow::ensure!(rest.is_empty(), "left out: {rest:#?}");
        Ok(())
    }
}

fn config(case: &Case, directory: &std::path::Path) -> Result<Config> {
    let file = directory.join("config.yaml");
    fs::write(&file, compose(&case.config, "iptables")?)?;
    let file = file.display().to_string();
    let manifests = directory.display().to_string();
    let words =
        ["shunt", "--mode", "iptables", "--cgroup-root", "/", "--config", &file, "--manifests", &manifests];
    Ok(Config::load(&Flags::parse(words)?, &Environment::of_this_process())?)
}

fn facts() -> Result<NodeFacts> {
    let address = |(link, address, prefix_len): (&str, &str, u8)| {
        anyhow::Ok(LinkAddress { link: link.into(), address: address.parse()?, prefix_len })
    };
    let mut addresses = ADDRESSES.into_iter().map(address).collect::<Result<Vec<_>>>()?;
    addresses.sort();
    Ok(NodeFacts { addresses, links: Vec::new() })
}
