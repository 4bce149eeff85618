//! Makes a question of the names of a client and a destination.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use super::{
    Client, ClientName, DestinationName, HostName, KnownClient, Location, PodOf, PortName, Question, client,
    unresolved,
};
use crate::model::{
    Frontend, FrontendKind, IpFamily, Model, NamespacedName, PodPlace, Protocol, ServicePortKey,
};

/// Where a client is, as the question says.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum ClientKind {
    /// shunt finds out.
    #[default]
    Auto,
    /// A pod of this node.
    Pod,
    /// Not on this node.
    Outside,
}

/// A question in the words of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedQuestion {
    /// Who connects.
    pub from: ClientName,
    /// Where that is.
    pub client: ClientKind,
    /// Where to.
    pub to: DestinationName,
    /// The client is a process outside the cgroup whose sockets are served.
    pub outside_cgroup: bool,
}

/// A name that stands for nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// The pod is no endpoint of a Service. Others may know it.
    #[error("no endpoint of a Service is the pod {0}")]
    Pod(NamespacedName),
    /// This node does not serve the Service. Others may know why; the text is what is known here.
    #[error("{1}")]
    Service(NamespacedName, String),
    /// The text says which name, and what there is.
    #[error("{0}")]
    Name(String),
}

impl NamedQuestion {
    /// Finds what the names stand for. `pod` is the pod of the client, if somebody else knows it.
    ///
    /// # Errors
    /// Returns an error if a name stands for nothing, or for several things.
    pub fn resolve(&self, model: &Model, pod: Option<&PodPlace>) -> Result<Question, Unresolved> {
        let place = match (&self.from, pod) {
            (ClientName::Pod(_), Some(pod)) => Some(pod.clone()),
            (ClientName::Pod(name), None) => {
                let name =
                    name.full().ok_or_else(|| Unresolved::Name(format!("{name} is no name of a pod")))?;
                Some(endpoint_pod(model, &name).ok_or(Unresolved::Pod(name))?)
            }
            (ClientName::Node | ClientName::Address(_), _) => None,
        };
        let families: BTreeSet<IpFamily> = match (&self.from, &place) {
            (_, Some(place)) => place.addresses.iter().copied().map(IpFamily::of).collect(),
            (ClientName::Address(address), _) => [IpFamily::of(address.to_canonical())].into(),
            _ => IpFamily::ALL.into(),
        };
        let (destination, protocol) = destination(model, &self.to, &families)?;
        if let ClientName::Address(client) = &self.from {
            check_family(*client, destination.ip())?;
        }
        let client = match (&self.from, place, self.client) {
            (_, Some(place), kind) => pod_client(model, &place, kind, destination.ip())?,
            (ClientName::Address(address), _, ClientKind::Auto) => Client::Address(*address),
            (ClientName::Address(address), _, ClientKind::Pod) => Client::Pod(*address),
            (ClientName::Address(address), _, ClientKind::Outside) => Client::Outside(*address),
            (ClientName::Node | ClientName::Pod(_), ..) => Client::Node,
        };
        Ok(Question { client, destination, protocol, outside_cgroup: self.outside_cgroup })
    }
}

fn check_family(client: IpAddr, destination: IpAddr) -> Result<(), Unresolved> {
    let [of_client, of_destination] =
        [client, destination].map(|address| IpFamily::of(address.to_canonical()));
    if of_client == of_destination {
        return Ok(());
    }
    let (own, other) = (of_client.name(), of_destination.name());
    Err(Unresolved::Name(format!("{client} is {own}, {destination} is {other}: no packet has both")))
}

/// Returns the pod that is an endpoint of a Service.
fn endpoint_pod(model: &Model, name: &NamespacedName) -> Option<PodPlace> {
    let pods = model.pods_named(Some(&name.namespace), &name.name);
    let node_name = pods.first()?.node_name.as_deref().map(ToOwned::to_owned);
    let addresses: Vec<_> = pods.iter().map(|pod| pod.address).collect();
    let local = &model.snapshot().node.local_addresses;
    let host_network = addresses.iter().any(|address| local.contains(address));
    Some(PodPlace { name: name.clone(), addresses, node_name, host_network })
}

fn pod_client(
    model: &Model,
    pod: &PodPlace,
    kind: ClientKind,
    destination: IpAddr,
) -> Result<Client, Unresolved> {
    let family = IpFamily::of(destination.to_canonical());
    let address = pod.addresses.iter().copied().find(|address| IpFamily::of(*address) == family);
    let address = address.ok_or_else(|| {
        Unresolved::Name(format!("the pod {} has no {} address for {destination}", pod.name, family.name()))
    })?;
    let is_here = pod.node_name.as_deref() == Some(model.node_name());
    let (location, reason) = match (kind, &pod.node_name) {
        (ClientKind::Pod, _) => (Location::Pod, "the question says so".to_owned()),
        (ClientKind::Outside, _) => (Location::Outside, "the question says so".to_owned()),
        (ClientKind::Auto, _) if is_here && pod.host_network => {
            (Location::Node, "the pod has the network of this node".to_owned())
        }
        (ClientKind::Auto, _) if is_here => (Location::Pod, "the pod runs on this node".to_owned()),
        (ClientKind::Auto, Some(node)) => (Location::Outside, client::on_another_node(node)),
        (ClientKind::Auto, None) => return Ok(Client::Address(address)),
    };
    let address = (location != Location::Node).then_some(address);
    let pod = Some(PodOf::from(pod.name.clone()));
    Ok(Client::Known(KnownClient { location, address, pod, reason }))
}

/// A port where a destination may lead.
struct Candidate<'a> {
    key: &'a ServicePortKey,
    address: SocketAddr,
}

fn destination(
    model: &Model,
    name: &DestinationName,
    families: &BTreeSet<IpFamily>,
) -> Result<(SocketAddr, Protocol), Unresolved> {
    let protocol = name.protocol;
    let candidates = match (&name.host, &name.port) {
        (HostName::Address(address), Some(PortName::Number(port))) => {
            return Ok((SocketAddr::new(*address, port.get()), protocol.unwrap_or(Protocol::Tcp)));
        }
        (HostName::Address(address), _) => ports_at(model, *address),
        (HostName::Service(service), _) => cluster_ips(model, service.full()),
    };
    if candidates.is_empty() {
        return Err(match &name.host {
            HostName::Address(address) => Unresolved::Name(unresolved::no_port(*address)),
            HostName::Service(service) => unresolved::no_service(model, service),
        });
    }
    let is_wanted = |candidate: &&Candidate<'_>| {
        let of_port = match &name.port {
            None => true,
            Some(PortName::Number(port)) => candidate.address.port() == port.get(),
            Some(PortName::Name(port)) => *candidate.key.name.port == **port,
        };
        of_port && protocol.is_none_or(|wanted| candidate.key.name.protocol == wanted)
    };
    let wanted: Vec<_> = candidates.iter().filter(is_wanted).collect();
    let ports: BTreeSet<_> = wanted.iter().map(|candidate| &candidate.key.name).collect();
    let is_tcp = |candidate: &&&Candidate<'_>| candidate.key.name.protocol == Protocol::Tcp;
    let of_tcp: BTreeSet<_> = wanted.iter().filter(is_tcp).map(|candidate| &candidate.key.name).collect();
    let port = match (ports.len(), name.port.is_some(), of_tcp.len()) {
        (1, ..) => ports.first(),
        (_, true, 1) => of_tcp.first(),
        _ => None,
    };
    let port = port.ok_or_else(|| Unresolved::Name(choices(model, name, &candidates, ports.len())))?;
    let mut of_port: Vec<_> = wanted.iter().filter(|candidate| candidate.key.name == **port).collect();
    of_port.sort_by_key(|candidate| !families.contains(&candidate.key.family));
    let first = of_port.first().map(|candidate| (candidate.address, port.protocol));
    first.ok_or_else(|| Unresolved::Name(choices(model, name, &candidates, 0)))
}

/// Says which ports there are.
fn choices(model: &Model, name: &DestinationName, candidates: &[Candidate<'_>], matching: usize) -> String {
    let ports: BTreeSet<_> = candidates
        .iter()
        .map(|Candidate { key, address }| {
            let name = if key.name.port.is_empty() { String::new() } else { format!(" ({})", key.name.port) };
            format!("{}/{}{name}", address.port(), key.name.protocol.lowercase_name())
        })
        .collect();
    let ports = ports.into_iter().collect::<Vec<_>>().join(", ");
    if matching > 1 {
        format!("{name} stands for several ports: name one of {ports}")
    } else {
        let other = unresolved::other_port(model, name).map(|other| format!("; {other}"));
        format!("{name} has no such port: it has {ports}{}", other.unwrap_or_default())
    }
}

fn ports_at(model: &Model, address: IpAddr) -> Vec<Candidate<'_>> {
    let ports = model.ports_at(address.to_canonical()).into_iter();
    let candidate =
        |(port, key): (NonZeroU16, _)| Candidate { key, address: SocketAddr::new(address, port.get()) };
    ports.map(candidate).collect()
}

fn cluster_ips(model: &Model, service: Option<NamespacedName>) -> Vec<Candidate<'_>> {
    let Some(service) = service else { return Vec::new() };
    let is_cluster_ip = |frontend: &&Frontend| frontend.kind == FrontendKind::ClusterIp;
    let of_port = |(key, port): (_, &'_ std::sync::Arc<crate::model::ResolvedPort>)| {
        let frontend = port.frontends.iter().find(is_cluster_ip)?;
        Some(Candidate { key, address: SocketAddr::new(frontend.address?, frontend.port.get()) })
    };
    model.ports_of_service(&service).filter_map(of_port).collect()
}
