//! Tests of the whole [`Model`]: single rules, and laws for generated objects.

mod properties;
mod services;
mod slices;
mod topology;
mod tracking;

use super::{testing::*, *};

/// Returns a resolved model of these objects, on a node with two addresses.
fn model(services: Vec<Service>, slices: Vec<EndpointSlice>, nodes: Vec<Node>) -> Model {
    let mut world = World::default();
    world.apply(WatchEvent::Services(Delta::Replace(services)));
    world.apply(WatchEvent::EndpointSlices(Delta::Replace(slices)));
    world.apply(WatchEvent::Nodes(Delta::Replace(nodes)));
    world.model(&settings(), &facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24")]))
}

/// Resolves the unnamed IPv4 TCP port of one Service with these slices.
fn resolved(service: Service, slices: Vec<EndpointSlice>) -> ResolvedPort {
    let key = ServicePortKey {
        name: ServicePortName { service: service.name.clone(), port: "".into(), protocol: Protocol::Tcp },
        family: IpFamily::V4,
    };
    let model = model(vec![service], slices, vec![]);
    let port = model.snapshot().ports.get(&key);
    port.unwrap_or_else(|| panic!("{key} is not in the Snapshot")).as_ref().clone()
}

fn apply_service(model: &mut Model, service: Service) -> Dirty {
    model.apply(WatchEvent::Services(Delta::Apply(service)));
    model.resolve()
}

fn apply_slice(model: &mut Model, slice: EndpointSlice) -> Dirty {
    model.apply(WatchEvent::EndpointSlices(Delta::Apply(slice)));
    model.resolve()
}

fn addresses(endpoints: &[ResolvedEndpoint]) -> Vec<String> {
    endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
}

/// Formats frontends as `kind address:port`.
fn frontends_of(port: &ResolvedPort) -> Vec<String> {
    let show = |frontend: &Frontend| match frontend.address {
        Some(address) => {
            format!("{:?} {}", frontend.kind, std::net::SocketAddr::new(address, frontend.port.get()))
        }
        None => format!("{:?} *:{}", frontend.kind, frontend.port),
    };
    port.frontends.iter().map(show).collect()
}

fn dirty_ports(dirty: &Dirty) -> Vec<String> {
    assert!(!dirty.all, "everything is dirty");
    dirty.ports.iter().map(ToString::to_string).collect()
}
