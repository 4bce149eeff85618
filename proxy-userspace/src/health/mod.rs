//! Serves what probes, load balancers and scrapers request: `/healthz`, `/livez`, `/metrics`,
//! `/proxyMode` and health check node ports.
#![forbid(unsafe_code)]

mod listen;
mod proxy_health;
mod routes;
mod service_health;

#[cfg(test)]
mod tests;

use std::{io, net::SocketAddr};

pub use listen::{bind, serve};
pub use proxy_health::{NodeObject, ProxyHealth};
pub use routes::{Introspection, healthz_routes, introspection_routes, metrics_routes};
pub use service_health::{HealthChecks, ListenOn, PortFailureEvents, serve_health_checks};

/// An error that prevents a server from answering.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The address is used by another process, or is not an address of this node.
    #[error("cannot listen on {address} for {server}")]
    Bind {
        /// The name of the server.
        server: String,
        /// The address.
        address: SocketAddr,
        /// The error of the kernel.
        source: io::Error,
    },
}
