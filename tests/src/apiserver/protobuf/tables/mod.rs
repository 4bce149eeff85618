//! The tables of the messages, after the schemas of Kubernetes 1.36 (`generated.proto`).

mod endpoint_slice;
mod meta;
mod namespace;
mod node;
mod service;
mod service_cidr;

pub(super) use self::meta::LIST_META;
use super::table::Table;

/// Returns the table of a kind of object.
pub(super) fn of_kind(kind: &str) -> Option<Table> {
    Some(match kind {
        "Service" => service::SERVICE,
        "EndpointSlice" => endpoint_slice::ENDPOINT_SLICE,
        "Node" => node::NODE,
        "ServiceCIDR" => service_cidr::SERVICE_CIDR,
        "Namespace" => namespace::NAMESPACE,
        "Pod" => namespace::POD,
        "Status" => meta::STATUS,
        _ => return None,
    })
}
