//! Makes rows of what the sync loop knows. Pure.

use std::{collections::HashMap, net::SocketAddr, ops::Bound, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    drift::Drift,
    rows::{
        Conditions, Counts, EndpointRow, ExemptRow, LeftOutRow, LinkRow, NamedPort, ServedAddress, ServiceRow,
    },
};
use crate::{
    dataplane::{Mode, ServiceCount},
    explain::why_not_in_list,
    model::{
        self, Framing, Frontend, IpFamily, KnownEndpoint, LinkPath, Name, NamespacedName, Protocol,
        ServedLink, ServicePortKey, ServicePortName, TrafficPolicy, UnixNanos,
    },
    sync::Inspected,
};

/// How many service ports one reading of the loop covers. It takes less than a millisecond, so long
/// can a change wait for it.
const PORTS_AT_ONCE: usize = 256;

/// Which service ports to list.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Filter {
    /// Of this namespace.
    pub namespace: Option<String>,
    /// Of the Service with this name.
    pub name: Option<String>,
    /// Compare the kernel with what was written.
    #[serde(default)]
    pub drift: bool,
}

impl Filter {
    pub(super) fn matches(&self, key: &ServicePortKey) -> bool {
        let NamespacedName { namespace, name } = &key.name.service;
        self.namespace.as_deref().is_none_or(|wanted| wanted == &**namespace)
            && self.name.as_deref().is_none_or(|wanted| wanted == &**name)
    }

    /// Returns the first key that can match, because keys are sorted by namespace and name.
    fn first(&self) -> Option<ServicePortKey> {
        let namespace = Name::label(self.namespace.as_deref()?).ok()?;
        let name = self.name.as_deref().and_then(|name| Name::subdomain(name).ok()).unwrap_or_default();
        let service = NamespacedName { namespace, name };
        let name = ServicePortName { service, port: "".into(), protocol: Protocol::Tcp };
        Some(ServicePortKey { name, family: IpFamily::V4 })
    }

    /// Returns true if no key from this one on can match.
    fn is_behind(&self, key: &ServicePortKey) -> bool {
        let Some(namespace) = self.namespace.as_deref() else { return false };
        let NamespacedName { namespace: own, name } = &key.name.service;
        &**own > namespace || self.name.as_deref().is_some_and(|wanted| &**name > wanted)
    }
}

/// Some rows, and the key of the last service port that was read, if there are more.
pub(super) type Part<T> = (Vec<T>, Option<ServicePortKey>);

/// Lists some service ports behind a key.
pub(super) fn part<T>(
    inspected: &Inspected<'_>,
    filter: &Filter,
    after: Option<&ServicePortKey>,
    rows_of: impl Fn(&Inspected<'_>, &ServicePortKey) -> Vec<T>,
) -> Part<T> {
    let first = filter.first();
    let from = match (after, &first) {
        (Some(after), _) => Bound::Excluded(after),
        (None, Some(first)) => Bound::Included(first),
        (None, None) => Bound::Unbounded,
    };
    let ports = inspected.model.snapshot().ports.range::<ServicePortKey, _>((from, Bound::Unbounded));
    let (mut rows, mut last) = (Vec::new(), None);
    for (read, (key, _)) in ports.enumerate() {
        if filter.is_behind(key) {
            return (rows, None);
        }
        if read >= PORTS_AT_ONCE || rows.len() >= PORTS_AT_ONCE {
            return (rows, last);
        }
        if filter.matches(key) {
            rows.extend(rows_of(inspected, key));
        }
        last = Some(key.clone());
    }
    (rows, None)
}

/// The counts of service ports by key, read once for a list.
pub(super) struct ServiceCounts {
    by_port: HashMap<ServicePortKey, proxy_common::layout::ServiceCounts>,
    counts_failures: bool,
}

impl ServiceCounts {
    pub(super) fn new(counted: Vec<ServiceCount>, counts_failures: bool) -> Self {
        let by_port = counted.into_iter().filter_map(|count| Some((count.port?, count.counts)));
        Self { by_port: by_port.collect(), counts_failures }
    }

    fn of(&self, key: &ServicePortKey) -> Option<Counts> {
        self.by_port.get(key).map(|counted| counts(counted, self.counts_failures))
    }
}

/// Returns the counts of a service port, without refusals and drops if the mode does not count
/// them.
pub(super) fn counts(counted: &proxy_common::layout::ServiceCounts, counts_failures: bool) -> Counts {
    let failures = |count| counts_failures.then_some(count);
    Counts {
        connections: counted.connections,
        refusals: failures(counted.refusals),
        drops: failures(counted.drops),
        bytes_to_endpoints: counted.bytes_to_endpoints,
        bytes_to_clients: counted.bytes_to_clients,
    }
}

/// Returns the row of a service port.
pub(super) fn service(
    inspected: &Inspected<'_>,
    key: &ServicePortKey,
    counts: &ServiceCounts,
    drift: Option<&Drift>,
) -> Vec<ServiceRow> {
    let Some(port) = inspected.model.snapshot().ports.get(key) else { return Vec::new() };
    let endpoints = inspected.model.known_endpoints(key);
    let left_out = inspected.left_out().get(key).map(|(reason, _)| reason.to_string());
    let programmed = inspected.programmed(key).filter(|_| left_out.is_none());
    let row = ServiceRow {
        port: port_name(key),
        addresses: port.frontends.iter().map(ServedAddress::from).collect(),
        internal_traffic_policy: port.internal_policy.name().to_owned(),
        external_traffic_policy: port.external_policy.name().to_owned(),
        affinity_seconds: port.affinity_timeout.map(Into::into),
        balance: port.balance.name().to_owned(),
        source_ranges: port.source_ranges.iter().map(ToString::to_string).collect(),
        eligible_endpoints: endpoints.iter().filter(|endpoint| endpoint.is_eligible).count(),
        total_endpoints: endpoints.len(),
        counts: counts.of(key),
        programmed: programmed.map(rfc3339),
        left_out,
        drift: drift.and_then(|drift| drift.of(inspected, key)),
    };
    vec![row]
}

/// Returns the rows of the endpoints of a service port.
pub(super) fn endpoints(inspected: &Inspected<'_>, key: &ServicePortKey) -> Vec<EndpointRow> {
    inspected.model.known_endpoints(key).into_iter().map(|known| endpoint(key, &known)).collect()
}

fn endpoint(key: &ServicePortKey, known: &KnownEndpoint) -> EndpointRow {
    let (zones, nodes) = known.hints.as_deref().map_or((Vec::new(), Vec::new()), |hints| {
        let texts = |names: &[Arc<str>]| names.iter().map(|name| name.as_ref().to_owned()).collect();
        (texts(&hints.zones), texts(&hints.nodes))
    });
    let model::Conditions { ready, serving, terminating } = known.conditions;
    let why = |policy| known.exclusion(policy).map(|_| why_not_in_list(known, policy));
    EndpointRow {
        port: port_name(key),
        address: known.address,
        node: known.node_name.as_deref().map(ToOwned::to_owned),
        local: known.is_local,
        conditions: Conditions { ready, serving, terminating },
        zones,
        nodes,
        eligible: known.is_eligible,
        not_for_cluster: why(TrafficPolicy::Cluster),
        not_for_local: why(TrafficPolicy::Local),
    }
}

/// Returns the links on which packets are translated.
pub(super) fn links(inspected: &Inspected<'_>) -> Vec<LinkRow> {
    let (node, is_ebpf) = (&inspected.model.snapshot().node, inspected.mode == Some(Mode::Ebpf));
    let path = |index: &u32| match &node.link_path {
        _ if !is_ebpf => "netfilter",
        LinkPath::Direct { .. } if node.direct_links.contains(index) => "direct",
        LinkPath::Programs | LinkPath::Direct { .. } => "programs",
        LinkPath::Netfilter { .. } => "netfilter",
    };
    let row = |(index, link): (&u32, &ServedLink)| LinkRow {
        name: link.name.as_ref().to_owned(),
        index: *index,
        header: match link.framing {
            Framing::Ethernet => "ethernet",
            Framing::Ip => "ip",
            Framing::Tunnel => "tunnel",
        }
        .to_owned(),
        path: path(index).to_owned(),
        xdp: node.xdp_links.get(index).filter(|_| is_ebpf).map(|link| link.mode.name().to_owned()),
        local: node.local_links.contains(index),
        bridge: node.bridge_ports.get(index).map(ToString::to_string),
    };
    node.links.iter().map(row).collect()
}

/// Returns the addresses of pods whose sockets are left alone.
pub(super) fn exempt(inspected: &Inspected<'_>) -> Vec<ExemptRow> {
    let node = &inspected.model.snapshot().node;
    node.exempt_addresses.iter().map(|address| ExemptRow { address: address.to_string() }).collect()
}

/// Returns the service ports that are left out.
pub(super) fn left_out(inspected: &Inspected<'_>, filter: &Filter) -> Vec<LeftOutRow> {
    let left_out = inspected.left_out().iter().filter(|(key, _)| filter.matches(key));
    left_out
        .map(|(key, (reason, message))| LeftOutRow {
            port: port_name(key),
            reason: reason.to_string(),
            message: message.clone(),
        })
        .collect()
}

pub(super) fn port_name(key: &ServicePortKey) -> NamedPort {
    NamedPort {
        namespace: key.name.service.namespace.to_string(),
        name: key.name.service.name.to_string(),
        port_name: key.name.port.to_string(),
        protocol: key.name.protocol.name().to_owned(),
        family: key.family.name().to_owned(),
    }
}

impl From<&Frontend> for ServedAddress {
    fn from(frontend: &Frontend) -> Self {
        let port = frontend.port;
        let address = match frontend.address {
            Some(address) => SocketAddr::new(address, port.get()).to_string(),
            None => format!("*:{port}"),
        };
        Self { kind: frontend.kind.name().to_owned(), address }
    }
}

/// Formats a time to the millisecond.
fn rfc3339(UnixNanos(nanos): UnixNanos) -> String {
    Timestamp::from_nanosecond(i128::from(nanos)).map(|time| format!("{time:.3}")).unwrap_or_default()
}
