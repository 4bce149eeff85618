//! Decodes Nodes: addresses, pod CIDRs, zone, whether the node is being deleted, and where it takes
//! packets of the tunnel for direct server return.

use std::net::{IpAddr, SocketAddr};

use super::{
    Problems, parse,
    raw::{RawNode, RawNodeAddress},
};
use crate::model::{IpFamily, NamespacedName, Node, NodeAddressType};

/// The annotation with which a node announces where it takes packets of the tunnel for direct server
/// return.
pub(in crate::watch) const DSR_ANNOTATION: &str = "shunt.dev/dsr";

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
        dsr_addresses: dsr_addresses(metadata.annotations.and_then(|of| of.dsr).as_deref(), problems),
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

/// Decodes the addresses of a tunnel's end, at most one of each family.
fn dsr_addresses(value: Option<&str>, problems: &mut Problems) -> Vec<SocketAddr> {
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let Some(value) = value.filter(|value| !value.is_empty()) else { return addresses };
    let field = format!("metadata.annotations[{DSR_ANNOTATION}]");
    for entry in value.split(',').map(str::trim) {
        let Some(address) = dsr_address(entry) else {
            let allowed =
                "an address and a port that other nodes reach, like 192.0.2.11:4790 or [2001:db8::11]:4790";
            problems.not(&field, entry, allowed);
            continue;
        };
        if addresses.iter().any(|other| IpFamily::of(other.ip()) == IpFamily::of(address.ip())) {
            problems.not(&field, entry, "of another IP family than the one before; one of each is allowed");
        } else {
            addresses.push(address);
        }
    }
    addresses
}

/// Decodes one address of a tunnel's end. Packets for another node must not stay on this one, go to a
/// group of nodes, or depend on a link.
fn dsr_address(entry: &str) -> Option<SocketAddr> {
    let written: SocketAddr = entry.parse().ok()?;
    // IPv4-mapped IPv6 becomes IPv4, as in other fields.
    let (ip, port) = (written.ip().to_canonical(), written.port());
    let is_only_on_link = match ip {
        IpAddr::V4(ip) => ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_of_one_node = !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast());
    (is_of_one_node && !is_only_on_link && port != 0).then(|| SocketAddr::new(ip, port))
}
