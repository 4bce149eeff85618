//! Serves what probes, load balancers, scrapers and people request: `/healthz`, `/livez`,
//! `/metrics`, `/proxyMode`, `/statusz`, `/flagz` and health check node ports.
#![forbid(unsafe_code)]

mod flagz;
mod introspection;
mod listen;
mod local;
mod node_report;
mod proxy_health;
mod routes;
mod second_shunt;
mod server;
mod service_health;
mod status;
mod statusz;
mod zpages;

#[cfg(test)]
mod tests;

use std::{io, net::SocketAddr};

pub use introspection::{Debugging, Introspection, introspection_routes};
pub use listen::{HttpServer, bind, serve};
pub(crate) use local::is_trusted;
pub use local::{AlreadyRunning, LocalListener, check_alone, listen_local, serve_local};
pub use node_report::{NodeReport, ReportedMap};
pub use proxy_health::{NodeObject, ProxyHealth};
pub use routes::{healthz_routes, metrics_routes, scrape_routes};
pub use second_shunt::second_shunt_routes;
#[cfg(feature = "fuzzing")]
pub use server::answer_bytes;
pub use service_health::{HealthChecks, ListenOn, PortFailureEvents, serve_health_checks};
pub use status::{Status, SyncTask, WatchReport, Watches};

/// A server cannot listen: its address is used by another process, or is not an address of this
/// node.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for {server}")]
pub struct BindError {
    /// The name of the server.
    pub server: String,
    /// The address.
    pub address: SocketAddr,
    /// The error of the kernel.
    pub source: io::Error,
}
