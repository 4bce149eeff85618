//! Explains what this node does with a connection: which hook sees it, which Service it is for,
//! which endpoints it may get, and which source they see. Pure: the model in, an [`Explanation`]
//! out.
//!
//! The conformance runner compares it with what happens to each connection.
#![forbid(unsafe_code)]

mod client;
mod destination;
mod endpoints;
mod hook;
mod kernel;
mod names;
mod resolve;
mod text;
mod unresolved;

pub use self::{
    endpoints::why_not_in_list,
    kernel::{AffinityState, Check, Decision},
    names::{ClientName, DEFAULT_NAMESPACE, DestinationName, HostName, ObjectName, PortName},
    resolve::{ClientKind, NamedQuestion, Unresolved},
};

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    mode::Mode,
    model::{IpFamily, Model, NamespacedName, Owner, Protocol},
};

/// A connection, or a datagram that begins a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Who sends it.
    pub client: Client,
    /// The destination, before translation.
    pub destination: SocketAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The client is a process of this node outside the cgroup whose sockets are served
    /// (`--cgroup-root`).
    pub outside_cgroup: bool,
}

/// Who sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Client {
    /// A process of this node, which is no pod with an address of its own.
    Node,
    /// Whoever has this address.
    Address(IpAddr),
    /// A pod of this node with this address.
    Pod(IpAddr),
    /// Somebody outside this node with this address.
    Outside(IpAddr),
    /// A client whose place is known.
    Known(KnownClient),
}

/// A client whose place is known, because somebody knows its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownClient {
    /// Where it is.
    pub location: Location,
    /// Its address. `None` for the node itself.
    pub address: Option<IpAddr>,
    /// The pod.
    pub pod: Option<PodOf>,
    /// How this is known.
    pub reason: String,
}

/// What the explanation is about: this node, as the daemon knows it.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The objects, and what was resolved from them.
    pub model: &'a Model,
    /// The running mode.
    pub mode: Mode,
    /// The mode of the backstop of the ebpf mode, if there is one.
    pub backstop: Option<Mode>,
}

/// Where the client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// In the network namespace of this node.
    Node,
    /// In a pod of this node.
    Pod,
    /// Outside this node.
    Outside,
}

/// What sees the first packet of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hook {
    /// The programs at the client's socket.
    Socket,
    /// The program on the link where the packet comes in.
    Link,
    /// The rules of a netfilter mode beneath the eBPF programs.
    Backstop,
    /// The rules of the running mode.
    Netfilter,
    /// Nothing of shunt.
    Nothing,
}

/// What happens to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// It goes to one of the chosen endpoints.
    Translate,
    /// It goes where it is sent, unchanged.
    Pass,
    /// It is refused: the client gets an error at once.
    Refuse,
    /// It is dropped. Packets get no answer. The socket programs let the system call fail at once,
    /// with EHOSTUNREACH.
    Drop,
}

/// The source that an endpoint sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The client's own address.
    Client,
    /// An address of this node.
    Node,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The address of the client. `None` for the node itself.
    pub client: Option<IpAddr>,
    /// The client's pod, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_pod: Option<PodOf>,
    /// Where the client is.
    pub location: Location,
    /// Why it counts as that.
    pub location_reason: String,
    /// The destination.
    pub destination: SocketAddr,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The mode that runs.
    #[serde(default)]
    pub mode: String,
    /// What sees it.
    pub hook: Hook,
    /// Why this hook.
    pub hook_reason: String,
    /// The Service of the destination.
    pub service: Option<ServiceOf>,
    /// Who may connect, if source ranges apply.
    pub source_ranges: Option<SourceRanges>,
    /// The traffic policy that applies, and why.
    pub policy: Option<Policy>,
    /// All endpoints of the service port.
    pub endpoints: Vec<EndpointChoice>,
    /// The timeout of `ClientIP` affinity in seconds.
    pub affinity_seconds: Option<NonZeroU32>,
    /// The affinity of the client. `None` without affinity, or if no kernel was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<AffinityState>,
    /// Whether the node gives its own address to the connection.
    pub masquerade: Option<Masquerade>,
    /// What happens.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
    /// The netfilter rules of others that may drop or translate it. `None` if they were not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<Vec<String>>,
    /// What the kernel says (`--check`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
}

/// A pod. Known are those that are endpoints of a Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodOf {
    /// The namespace.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
}

impl From<NamespacedName> for PodOf {
    fn from(NamespacedName { namespace, name }: NamespacedName) -> Self {
        Self { namespace: namespace.to_string(), name: name.to_string() }
    }
}

/// A service port, and the kind of address at which the client reaches it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceOf {
    /// The namespace.
    pub namespace: String,
    /// The name of the Service.
    pub name: String,
    /// The name of the port; may be empty.
    pub port_name: String,
    /// `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancerIP`.
    pub kind: String,
}

/// `loadBalancerSourceRanges`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceRanges {
    /// The ranges.
    pub ranges: Vec<IpNet>,
    /// They hold the client.
    pub allowed: bool,
}

/// A traffic policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Policy {
    /// `internalTrafficPolicy` or `externalTrafficPolicy`.
    pub field: String,
    /// `Cluster` or `Local`.
    pub value: String,
    /// Which endpoints the client gets.
    pub effect: String,
}

/// Whether the node gives its own address to a connection. A pod that reaches itself through rules
/// is masqueraded in any case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Masquerade {
    /// It does.
    pub applies: bool,
    /// Why, or why not.
    pub reason: String,
}

/// An endpoint, and whether the client may get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointChoice {
    /// Address and port.
    pub address: SocketAddr,
    /// The name of its pod, in the namespace of the Service.
    #[serde(default)]
    pub pod: Option<String>,
    /// The node.
    pub node: Option<String>,
    /// It is on this node.
    pub local: bool,
    /// The client may get it.
    pub chosen: bool,
    /// Why not.
    pub reason: Option<String>,
    /// The source that it sees.
    pub source: Option<Source>,
}

/// Explains a connection.
pub fn explain(situation: Situation<'_>, question: &Question) -> Explanation {
    let whereabouts = client::locate(situation.model, &question.client);
    let seen = hook::find(situation, &whereabouts, question);
    let family = IpFamily::of(question.destination.ip().to_canonical());
    let mut answer = Explanation {
        client: whereabouts.address,
        client_pod: pod_of(situation.model, &question.client, &whereabouts),
        location: whereabouts.location,
        location_reason: whereabouts.reason.clone(),
        destination: question.destination,
        protocol: question.protocol.name().to_owned(),
        mode: situation.mode.name().to_owned(),
        hook: seen.hook,
        hook_reason: seen.reason.clone(),
        service: None,
        source_ranges: None,
        policy: None,
        endpoints: Vec::new(),
        affinity_seconds: None,
        affinity: None,
        masquerade: None,
        verdict: Verdict::Pass,
        reason: String::new(),
        others: None,
        check: None,
    };
    match destination::find(situation, &whereabouts, &seen, question) {
        Err(miss) => {
            (answer.verdict, answer.reason) = (miss.verdict, miss.reason);
            if let Some(seen) = miss.seen {
                (answer.hook, answer.hook_reason) = (seen.hook, seen.reason);
            }
        }
        Ok(owner) => {
            answer.service = Some(service_of(owner));
            let seen = hook::of_service(situation, &whereabouts, seen, owner, family);
            (answer.hook, answer.hook_reason) = (seen.hook, seen.reason.clone());
            if seen.rules.is_none() {
                "nothing of shunt sees it".clone_into(&mut answer.reason);
                return answer;
            }
            answer.affinity_seconds = owner.port.affinity_timeout;
            let connection =
                endpoints::Connection { situation, whereabouts: &whereabouts, seen: &seen, owner, family };
            connection.decide(&mut answer);
        }
    }
    answer
}

fn pod_of(model: &Model, client: &Client, whereabouts: &client::Whereabouts) -> Option<PodOf> {
    match client {
        Client::Known(known) => known.pod.clone(),
        _ => model.pods_at(&[whereabouts.address?].into()).into_values().next().map(PodOf::from),
    }
}

fn service_of(Owner { key, kind, .. }: Owner<'_>) -> ServiceOf {
    ServiceOf {
        namespace: key.name.service.namespace.to_string(),
        name: key.name.service.name.to_string(),
        port_name: key.name.port.to_string(),
        kind: kind.name().to_owned(),
    }
}

#[cfg(test)]
mod tests;
