//! What probes and load balancers ask: `/healthz`, `/livez`, `/metrics`, `/proxyMode` and health check node ports.
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
pub use service_health::{HealthChecks, ListenOn, TellOf, answer_health_checks};

/// What keeps an endpoint from answering.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The address cannot be listened on: taken by another process, or not this node's.
    #[error("cannot listen on {address} for {server}")]
    Bind {
        /// What was to answer there.
        server: String,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}
