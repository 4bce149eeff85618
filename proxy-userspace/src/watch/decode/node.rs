//! Decodes Nodes: addresses, pod CIDRs, zone, and whether the node is being deleted.

use std::net::IpAddr;

use super::{
    Problems, parse,
    raw::{RawNode, RawNodeAddress},
};
use crate::model::{NamespacedName, Node, NodeAddressType};

/// The cluster autoscaler's taint on nodes that it will delete (upstream `node.go`, KEP-3836).
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub(super) fn node(name: NamespacedName, raw: RawNode, problems: &mut Problems) -> Node {
    let metadata = raw.metadata.unwrap_or_default();
    let spec = raw.spec.unwrap_or_default();
    let addresses = raw.status.and_then(|status| status.addresses).unwrap_or_default();
    let tainted =
        spec.taints.unwrap_or_default().iter().any(|taint| taint.key.as_deref() == Some(TO_BE_DELETED_TAINT));
    let pod_cidrs = match spec.pod_cidrs {
        Some(ranges) if !ranges.is_empty() => {
            parse::list("spec.podCIDRs", Some(&ranges), problems, parse::cidr)
        }
        _ => {
            let range = spec.pod_cidr.filter(|range| !range.is_empty());
            range.and_then(|range| parse::cidr("spec.podCIDR", &range, problems)).into_iter().collect()
        }
    };
    let zone = metadata.labels.unwrap_or_default().zone.filter(|zone| !zone.is_empty());
    Node {
        name: name.name,
        zone: zone.map(Into::into),
        pod_cidrs,
        addresses: addresses.iter().enumerate().filter_map(|(i, raw)| address(i, raw, problems)).collect(),
        being_deleted: tainted || metadata.deletion_timestamp.is_some(),
        dsr_addresses: Vec::new(),
    }
}

/// Decodes an address. None for names (`Hostname`, `InternalDNS`, `ExternalDNS`).
fn address(i: usize, raw: &RawNodeAddress, problems: &mut Problems) -> Option<(NodeAddressType, IpAddr)> {
    let address_type = match raw.address_type.as_deref() {
        Some("InternalIP") => NodeAddressType::InternalIp,
        Some("ExternalIP") => NodeAddressType::ExternalIp,
        _ => return None,
    };
    let value = raw.address.as_deref().unwrap_or_default();
    Some((address_type, parse::ip(format_args!("status.addresses[{i}].address"), value, problems)?))
}
