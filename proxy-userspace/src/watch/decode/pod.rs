//! Decodes where a pod is.

use std::{borrow::Cow, net::IpAddr};

use super::raw::RawPod;
use crate::model::{NamespacedName, PodPlace};

/// Decodes the place of a pod. Its addresses are those in `status.podIPs`; what is no address is
/// left out.
pub(in crate::watch) fn pod_place(name: NamespacedName, raw: RawPod<'_>) -> PodPlace {
    let (spec, status) = (raw.spec.unwrap_or_default(), raw.status.unwrap_or_default());
    let listed = status.pod_ips.into_iter().filter_map(|address| address.ip);
    let mut addresses: Vec<IpAddr> = listed.filter_map(|text| text.parse().ok()).collect();
    if addresses.is_empty() {
        addresses.extend(status.pod_ip.and_then(|text| text.parse::<IpAddr>().ok()));
    }
    let host_network = spec.host_network.unwrap_or(false);
    PodPlace {
        name,
        addresses,
        node_name: spec.node_name.filter(|node| !node.is_empty()).map(Cow::into_owned),
        host_network,
    }
}
