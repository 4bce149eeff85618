//! Decodes EndpointSlices with the defaults of `discovery.k8s.io/v1`, also for absent conditions.

use std::{fmt, net::IpAddr, sync::Arc};

use super::{
    Problems,
    metadata::{LAST_CHANGE_TRIGGER_TIME, SERVICE_NAME},
    parse,
    raw::{RawEndpoint, RawEndpointPort, RawEndpointSlice, RawHint, RawTargetRef},
};
use crate::model::{AddressType, EndpointSlice, Hints, Name, NamespacedName, SliceEndpoint, SlicePort};

pub(super) fn endpoint_slice(
    name: NamespacedName,
    raw: RawEndpointSlice,
    problems: &mut Problems,
) -> EndpointSlice {
    let metadata = raw.metadata.unwrap_or_default();
    let address_type = address_type(raw.address_type.as_deref(), problems);
    let decoded = raw.endpoints.into_iter().enumerate().filter_map(|(i, mut endpoint)| {
        let target = endpoint.target_ref.take();
        let pod = target.and_then(|target| pod(&target, &name.namespace));
        Some((slice_endpoint(i, endpoint, address_type, problems)?, pod))
    });
    let (endpoints, pods): (Vec<_>, Vec<_>) = decoded.unzip();
    EndpointSlice {
        name,
        service: metadata.label(SERVICE_NAME).filter(|name| !name.is_empty()).and_then(|name| {
            parse::name(format_args!("metadata.labels[{SERVICE_NAME}]"), name, Name::label, problems)
        }),
        address_type,
        endpoints,
        pods: pods.into_iter().collect(),
        ports: raw.ports.iter().enumerate().filter_map(|(i, port)| slice_port(i, port, problems)).collect(),
        last_change_trigger_time: metadata.annotation(LAST_CHANGE_TRIGGER_TIME).and_then(|value| {
            parse::time(format_args!("metadata.annotations[{LAST_CHANGE_TRIGGER_TIME}]"), value, problems)
        }),
    }
}

/// Decodes `addressType`. An unknown type becomes FQDN, which proxies ignore.
fn address_type(value: Option<&str>, problems: &mut Problems) -> AddressType {
    let words = [("IPv4", AddressType::Ipv4), ("IPv6", AddressType::Ipv6), ("FQDN", AddressType::Fqdn)];
    if value.is_none_or(str::is_empty) {
        problems.add("addressType", "missing; one of IPv4, IPv6, FQDN is needed");
    }
    parse::word("addressType", value, AddressType::Fqdn, &words, problems).unwrap_or(AddressType::Fqdn)
}

/// Decodes an endpoint. None if its first address, the only one that is used, is invalid.
fn slice_endpoint(
    i: usize,
    raw: RawEndpoint,
    address_type: AddressType,
    problems: &mut Problems,
) -> Option<SliceEndpoint> {
    if raw.addresses.is_empty() {
        problems.add(format_args!("endpoints[{i}].addresses"), "missing; an endpoint needs an address");
        return None;
    }
    let mut first = None;
    for (j, value) in raw.addresses.iter().enumerate().filter(|_| address_type != AddressType::Fqdn) {
        let field = format_args!("endpoints[{i}].addresses[{j}]");
        let address = endpoint_address(field, value, address_type, problems);
        if j == 0 {
            first = address;
        }
    }
    if first.is_none() && address_type != AddressType::Fqdn {
        return None;
    }
    let conditions = raw.conditions.unwrap_or_default();
    let hints = raw.hints.unwrap_or_default();
    let hints = Hints { zones: hint_names(hints.for_zones), nodes: hint_names(hints.for_nodes) };
    Some(SliceEndpoint {
        address: first,
        // The defaults of discovery/v1 types.go and of upstream's endpointslicecache.go, 1.36.
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        node_name: non_empty(raw.node_name),
        hints: (hints != Hints::default()).then(|| Arc::new(hints)),
    })
}

/// Decodes `targetRef`. None unless it names a pod of the slice's namespace. The name is only
/// shown, so one that is not valid is no problem.
fn pod(target: &RawTargetRef, namespace: &str) -> Option<Name> {
    let is_pod = target.kind.as_deref() == Some("Pod");
    let is_near = target.namespace.as_deref().is_none_or(|of| of.is_empty() || of == namespace);
    target.name.as_deref().filter(|_| is_pod && is_near).and_then(|name| Name::subdomain(name).ok())
}

fn endpoint_address(
    field: fmt::Arguments<'_>,
    value: &str,
    address_type: AddressType,
    problems: &mut Problems,
) -> Option<IpAddr> {
    let address = parse::ip(field, value, problems)?;
    if address.is_ipv4() == (address_type == AddressType::Ipv4) {
        return Some(address);
    }
    let family = if address.is_ipv4() { "IPv6" } else { "IPv4" };
    problems.not(field, value, format_args!("an {family} address, as addressType says"));
    None
}

fn slice_port(i: usize, raw: &RawEndpointPort, problems: &mut Problems) -> Option<SlicePort> {
    let protocol = parse::protocol(format_args!("ports[{i}].protocol"), raw.protocol.as_deref(), problems)?;
    let port = match raw.port {
        // An absent port means all ports.
        None => None,
        Some(port) => Some(parse::port(format_args!("ports[{i}].port"), port, problems)?),
    };
    let name = parse::port_name(format_args!("ports[{i}].name"), raw.name.as_deref(), problems)?;
    Some(SlicePort { name, protocol, port })
}

fn hint_names(hints: Vec<RawHint>) -> Box<[Arc<str>]> {
    hints.into_iter().filter_map(|hint| non_empty(hint.name)).collect()
}

fn non_empty(value: Option<String>) -> Option<Arc<str>> {
    value.filter(|value| !value.is_empty()).map(Arc::from)
}
