//! Decodes EndpointSlices with the defaults of `discovery.k8s.io/v1`, also for absent conditions.

use std::{fmt, net::IpAddr, sync::Arc};

use smallvec::SmallVec;

use super::{
    Problems,
    metadata::{LAST_CHANGE_TRIGGER_TIME, SERVICE_NAME},
    parse,
    raw::{RawEndpoint, RawEndpointConditions, RawEndpointPort, RawEndpointSlice, RawHint, RawTargetRef},
};
use crate::model::{
    AddressType, EndpointSlice, Hints, Interner, Name, NamespacedName, PodNames, SharedValues, SliceEndpoint,
    SlicePort,
};

/// The names of pods. Most Services have no more endpoints.
type PodList<'a> = SmallVec<[Option<&'a str>; 8]>;

/// The ports of a slice. Most Services have no more.
type PortList = SmallVec<[SlicePort; 4]>;

pub(super) fn endpoint_slice(
    name: NamespacedName,
    raw: RawEndpointSlice<'_>,
    shared: &mut SharedValues,
    problems: &mut Problems,
) -> EndpointSlice {
    let metadata = raw.metadata.unwrap_or_default();
    let address_type = address_type(raw.address_type.as_deref(), problems);
    let mut endpoints = Vec::with_capacity(raw.endpoints.len());
    let mut pods = PodList::with_capacity(raw.endpoints.len());
    for (i, endpoint) in raw.endpoints.iter().enumerate() {
        if let Some(decoded) = slice_endpoint(i, endpoint, address_type, shared, problems) {
            endpoints.push(decoded);
            pods.push(endpoint.target_ref.as_ref().and_then(|target| pod(target, &name.namespace)));
        }
    }
    EndpointSlice {
        name,
        service: non_empty(metadata.label(SERVICE_NAME)).and_then(|name| {
            parse::name(format_args!("metadata.labels[{SERVICE_NAME}]"), name, Name::label, problems)
        }),
        address_type,
        endpoints,
        pods: PodNames::pack(&mut pods),
        ports: slice_ports(&raw.ports, shared, problems),
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

/// Decodes an endpoint. None if its first address, the only one that is used, is invalid or a host
/// name.
fn slice_endpoint(
    i: usize,
    raw: &RawEndpoint<'_>,
    address_type: AddressType,
    shared: &mut SharedValues,
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
    let address = first?;
    let condition = |of: fn(&RawEndpointConditions) -> Option<bool>| raw.conditions.as_ref().and_then(of);
    let hints = raw.hints.as_ref().map(|hints| Hints {
        zones: hint_names(&hints.for_zones, &mut shared.strings),
        nodes: hint_names(&hints.for_nodes, &mut shared.strings),
    });
    let hints = hints.filter(|hints| *hints != Hints::default());
    Some(SliceEndpoint {
        address,
        // The defaults of discovery/v1 types.go and of upstream's endpointslicecache.go, 1.36.
        ready: condition(|of| of.ready).unwrap_or(true),
        serving: condition(|of| of.serving).unwrap_or(true),
        terminating: condition(|of| of.terminating).unwrap_or(false),
        placement: shared.placement(non_empty(raw.node_name.as_deref()), hints.as_ref()),
    })
}

/// Returns the name in a `targetRef`. None unless it names a pod of the slice's namespace.
fn pod<'a>(target: &'a RawTargetRef<'_>, namespace: &str) -> Option<&'a str> {
    let is_pod = target.kind.as_deref() == Some("Pod");
    let is_near = target.namespace.as_deref().is_none_or(|of| of.is_empty() || of == namespace);
    target.name.as_deref().filter(|_| is_pod && is_near)
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

fn slice_ports(
    raw: &[RawEndpointPort<'_>],
    shared: &mut SharedValues,
    problems: &mut Problems,
) -> Arc<[SlicePort]> {
    let ports = raw.iter().enumerate();
    let ports: PortList =
        ports.filter_map(|(i, port)| slice_port(i, port, &mut shared.strings, problems)).collect();
    shared.slice_ports(&ports)
}

fn slice_port(
    i: usize,
    raw: &RawEndpointPort<'_>,
    strings: &mut Interner<str>,
    problems: &mut Problems,
) -> Option<SlicePort> {
    let protocol = parse::protocol(format_args!("ports[{i}].protocol"), raw.protocol.as_deref(), problems)?;
    let port = match raw.port {
        // An absent port means all ports.
        None => None,
        Some(port) => Some(parse::port(format_args!("ports[{i}].port"), port, problems)?),
    };
    let name = parse::port_name(format_args!("ports[{i}].name"), raw.name.as_deref(), strings, problems)?;
    Some(SlicePort { name, protocol, port })
}

fn hint_names(hints: &[RawHint<'_>], strings: &mut Interner<str>) -> Box<[Arc<str>]> {
    let names = hints.iter().filter_map(|hint| non_empty(hint.name.as_deref()));
    names.map(|name| strings.intern_text(name)).collect()
}

fn non_empty(value: Option<&str>) -> Option<&str> {
    value.filter(|value| !value.is_empty())
}
