//! An API server on node1, for a proxy that watches it.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result};
use serde::Deserialize as _;
use serde_yaml_ng::Mapping;
use tokio::{net::TcpListener, runtime::Runtime};

use crate::{
    apiserver::ApiServer,
    case::ObjectKey,
    world::{Host, World},
};

/// A server on node1. It runs in this process and ends with it.
pub struct Cluster {
    server: ApiServer,
    runtime: Runtime,
}

impl Cluster {
    /// Starts a server without objects on node1's loopback address.
    pub fn start(world: &World) -> Result<Self> {
        Self::start_at(world, Ipv4Addr::LOCALHOST.into())
    }

    /// Starts a server without objects on an address of node1.
    pub fn start_at(world: &World, address: IpAddr) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = world.listen(Host::Node1, (address, 0).into())?;
        let server = {
            let _entered = runtime.enter();
            ApiServer::start_on(TcpListener::from_std(listener)?)?
        };
        Ok(Self { server, runtime })
    }

    /// Returns the server.
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// Adds or replaces an object.
    pub fn apply(&self, manifest: &Mapping) -> Result<()> {
        self.server.put(serde_json::to_value(manifest).context("an object as JSON")?).map(drop)
    }

    /// Adds or replaces all objects of a YAML text.
    pub fn apply_all(&self, text: &str) -> Result<()> {
        for document in serde_yaml_ng::Deserializer::from_str(text) {
            self.apply(&Mapping::deserialize(document)?)?;
        }
        Ok(())
    }

    /// Deletes an object.
    pub fn delete(&self, key: &ObjectKey) -> Result<()> {
        let namespace = key.namespace.as_deref().unwrap_or_default();
        self.server.delete(&key.kind, namespace, &key.name).map(drop)
    }

    /// Stops the server: connections break and new ones are refused. The objects stay.
    pub fn down(&mut self) {
        self.runtime.block_on(self.server.down());
    }

    /// Starts the server again at the same address.
    pub fn up(&mut self, world: &World) -> Result<()> {
        let listener = world.listen(Host::Node1, self.server.address())?;
        let _entered = self.runtime.enter();
        self.server.up_on(TcpListener::from_std(listener)?);
        Ok(())
    }
}
