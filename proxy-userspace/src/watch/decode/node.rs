//! Decodes Nodes: addresses, pod CIDRs, zone, whether the node is being deleted, and what it
//! announces for direct server return.

use std::net::{IpAddr, SocketAddr};

use super::{
    Problems,
    metadata::{DSR, ZONE},
    parse,
    raw::{RawNode, RawNodeAddress},
};
use crate::model::{
    DsrAnnouncement, IpFamily, NamespacedName, Node, NodeAddressType, SharedValues, is_address_of_node,
    is_tunnel_address,
};

/// The cluster autoscaler's taint on nodes that it will delete (upstream `node.go`, KEP-3836).
const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub(super) fn node(
    name: NamespacedName,
    raw: RawNode<'_>,
    _: &mut SharedValues,
    problems: &mut Problems,
) -> Node {
    let metadata = raw.metadata.unwrap_or_default();
    let spec = raw.spec.unwrap_or_default();
    let addresses = raw.status.map(|status| status.addresses).unwrap_or_default();
    let tainted = spec.taints.iter().any(|taint| taint.key.as_deref() == Some(TO_BE_DELETED_TAINT));
    let pod_cidrs = if spec.pod_cidrs.is_empty() {
        let range = spec.pod_cidr.filter(|range| !range.is_empty());
        range.and_then(|range| parse::cidr("spec.podCIDR", &range, problems)).into_iter().collect()
    } else {
        parse::list("spec.podCIDRs", &spec.pod_cidrs, problems, parse::cidr)
    };
    let zone = metadata.label(ZONE).filter(|zone| !zone.is_empty());
    Node {
        name: name.name,
        zone: zone.map(Into::into),
        pod_cidrs,
        addresses: addresses.iter().enumerate().filter_map(|(i, raw)| address(i, raw, problems)).collect(),
        being_deleted: tainted || metadata.is_being_deleted(),
        dsr: dsr_announcement(metadata.annotation(DSR), problems),
    }
}

/// Decodes an address. None for names (`Hostname`, `InternalDNS`, `ExternalDNS`).
fn address(i: usize, raw: &RawNodeAddress<'_>, problems: &mut Problems) -> Option<(NodeAddressType, IpAddr)> {
    let address_type = match raw.address_type.as_deref() {
        Some("InternalIP") => NodeAddressType::InternalIp,
        Some("ExternalIP") => NodeAddressType::ExternalIp,
        _ => return None,
    };
    let value = raw.address.as_deref().unwrap_or_default();
    Some((address_type, parse::ip(format_args!("status.addresses[{i}].address"), value, problems)?))
}

/// Decodes what a node announces: addresses with a port, at most one of each family, are where it
/// takes packets of the tunnel. Those without a port are its other addresses; versions before them
/// leave them out.
fn dsr_announcement(value: Option<&str>, problems: &mut Problems) -> DsrAnnouncement {
    let mut announced = DsrAnnouncement::default();
    let Some(value) = value.filter(|value| !value.is_empty()) else { return announced };
    let field = format!("metadata.annotations[{DSR}]");
    for entry in value.split(',').map(str::trim) {
        if let Some(address) = dsr_address(entry) {
            let is_of_same_family =
                |other: &SocketAddr| IpFamily::of(other.ip()) == IpFamily::of(address.ip());
            if announced.addresses.iter().any(is_of_same_family) {
                let allowed = "of another IP family than the one before; one of each is allowed";
                problems.not(&field, entry, allowed);
            } else {
                announced.addresses.push(address);
            }
        } else if let Some(address) = other_address(entry) {
            if announced.others.len() < DsrAnnouncement::MAX_OTHERS {
                announced.others.insert(address);
            } else {
                problems.not(&field, entry, "among the first 32 addresses without a port");
            }
        } else {
            let allowed = "an address that other nodes reach, with or without a port, like 192.0.2.11:4790, \
                           [2001:db8::11]:4790 or 192.0.2.12";
            problems.not(&field, entry, allowed);
        }
    }
    announced
}

/// Decodes another address of a node.
fn other_address(entry: &str) -> Option<IpAddr> {
    let address = entry.parse::<IpAddr>().ok()?.to_canonical();
    is_address_of_node(address).then_some(address)
}

/// Decodes one address of a tunnel's end.
fn dsr_address(entry: &str) -> Option<SocketAddr> {
    let written: SocketAddr = entry.parse().ok()?;
    // IPv4-mapped IPv6 becomes IPv4, as in other fields.
    let (ip, port) = (written.ip().to_canonical(), written.port());
    (is_tunnel_address(ip) && port != 0).then(|| SocketAddr::new(ip, port))
}
