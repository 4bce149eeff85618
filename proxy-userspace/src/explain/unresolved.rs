//! Says why a name stands for nothing, as far as that is known.

use std::net::{IpAddr, Ipv6Addr};

use super::{DestinationName, HostName, ObjectName, PortName, Unresolved};
use crate::model::{Model, ServicePortKey};

/// Says that an address needs a port. The port of an IPv6 address may have become a part of it.
pub(super) fn no_port(address: IpAddr) -> String {
    let text = address.to_string();
    let parts = text.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    let own = parts.and_then(|(own, port)| Some((own.parse::<Ipv6Addr>().ok()?, port)));
    match own {
        Some((own, port)) => {
            format!("no Service has the address {address}: name a port, or is this [{own}]:{port}?")
        }
        None => format!("no Service has the address {address}: name a port"),
    }
}

/// Says that this node serves no such Service.
pub(super) fn no_service(model: &Model, service: &ObjectName) -> Unresolved {
    let Some(name) = service.full() else {
        return Unresolved::Name(format!("{service} is no name of a Service"));
    };
    if let Some(reason) = model.unserved(&name) {
        return Unresolved::Name(reason.sentence(&name));
    }
    let namespace = &name.namespace;
    let is_known = model.snapshot().ports.keys().any(|key| key.name.service.namespace == *namespace);
    let why = if is_known {
        format!(
            "this node serves no Service {service} with a cluster IP: there is none, or it is headless or of another \
             proxy, which are not served; name the address of an endpoint instead"
        )
    } else {
        format!(
            "this node serves no Service {service} with a cluster IP, and none in the namespace {namespace}; DNS \
             names of others are not resolved: name the address"
        )
    };
    Unresolved::Service(name, why)
}

/// Says what the port of a Service is, if it is no port of its cluster IP: its node port, or the
/// port of its endpoints.
pub(super) fn other_port(model: &Model, name: &DestinationName) -> Option<String> {
    let (HostName::Service(service), Some(PortName::Number(port))) = (&name.host, &name.port) else {
        return None;
    };
    let service = service.full()?;
    let ports: Vec<_> = model.ports_of_service(&service).collect();
    let of = |key: &ServicePortKey| match &*key.name.port {
        "" => String::new(),
        name => format!(" of its port {name}"),
    };
    for (key, resolved) in &ports {
        if resolved.frontends.iter().any(|frontend| frontend.address.is_none() && frontend.port == *port) {
            let node = model.snapshot().node.primary_addresses.get(&key.family);
            let node = node.map_or("ADDRESS".to_owned(), ToString::to_string);
            let of = of(key);
            return Some(format!(
                "{port} is the node port{of}: name an address of a node, such as {node}:{port}"
            ));
        }
    }
    for (key, _) in &ports {
        if model.known_endpoints(key).iter().any(|endpoint| endpoint.address.port() == port.get()) {
            let of = of(key);
            return Some(format!("{port} is the port of the endpoints{of} (targetPort)"));
        }
    }
    None
}
