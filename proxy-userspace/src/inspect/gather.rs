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
    by_port: HashMap<ServicePortKey, Counts>,
    unused: Option<Counts>,
}

impl ServiceCounts {
    pub(super) fn new(counted: Vec<ServiceCount>, counts_failures: bool) -> Self {
        let (mut by_port, mut others) = (HashMap::new(), None);
        for count in counted {
            let counts = counts(&count.counts, counts_failures);
            match count.port {
                Some(port) => drop(by_port.insert(port, counts)),
                None => others = Some(counts),
            }
        }
        Self { unused: counts_of_unused(by_port.values().chain(&others), others.as_ref()), by_port }
    }

    fn of(&self, key: &ServicePortKey) -> Option<Counts> {
        let unused = self.unused.as_ref().filter(|unused| counts_protocol(key.name.protocol.name(), unused));
        self.by_port.get(key).or(unused).cloned()
    }
}

/// Returns the counts of the service ports that have none, because nobody used them. `None` if
/// nothing is counted, or if `others`, the sum of those without counts of their own, is not zero:
/// then it is not known who used them.
pub fn counts_of_unused<'a>(
    mut all: impl Iterator<Item = &'a Counts>,
    others: Option<&Counts>,
) -> Option<Counts> {
    let failures = all.next()?.refusals.map(|_| 0);
    let nothing = Counts {
        connections: 0,
        refusals: failures,
        drops: failures,
        bytes_to_endpoints: 0,
        bytes_to_clients: 0,
    };
    others.is_none_or(|others| *others == nothing).then_some(nothing)
}

/// Returns true if the mode with these counts also counts a protocol. The programs, which alone
/// count refusals, do not see SCTP.
pub fn counts_protocol(protocol: &str, counts: &Counts) -> bool {
    protocol != Protocol::Sctp.name() || counts.refusals.is_none()
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
    some_endpoints(inspected, key, usize::MAX)
}

/// Returns at most so many of these rows.
pub(super) fn some_endpoints(
    inspected: &Inspected<'_>,
    key: &ServicePortKey,
    most: usize,
) -> Vec<EndpointRow> {
    if most == 0 {
        return Vec::new();
    }
    let known = inspected.model.known_endpoints(key);
    known.into_iter().take(most).map(|known| endpoint(key, &known)).collect()
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
        LinkPath::Direct { .. } if !node.direct_links.contains(index) => LinkPath::Programs.name(),
        path => path.name(),
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
pub(super) fn left_out(inspected: &Inspected<'_>, filter: &Filter) -> impl Iterator<Item = LeftOutRow> {
    let left_out = inspected.left_out().iter().filter(|(key, _)| filter.matches(key));
    left_out.map(|(key, (reason, message))| LeftOutRow {
        port: port_name(key),
        reason: reason.to_string(),
        message: message.clone(),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::key;

    /// Returns the connections of a used, an unused and an SCTP service port.
    fn connections(others: Option<u64>, counts_failures: bool) -> [Option<u64>; 3] {
        let count = |port, connections| ServiceCount {
            port,
            counts: proxy_common::layout::ServiceCounts {
                connections,
                ..proxy_common::layout::ServiceCounts::NONE
            },
        };
        let others = others.map(|others| count(None, others));
        let counted = [count(Some(key("shop/web", "")), 4)].into_iter().chain(others);
        let counts = ServiceCounts::new(counted.collect(), counts_failures);
        let mut sctp = key("shop/sctp", "");
        sctp.name.protocol = Protocol::Sctp;
        [key("shop/web", ""), key("shop/quiet", ""), sctp]
            .map(|key| counts.of(&key).map(|counts| counts.connections))
    }

    #[test]
    fn a_service_that_nobody_used_has_the_count_zero() {
        assert_eq!(connections(Some(0), true), [Some(4), Some(0), None], "programs do not see SCTP");
        assert_eq!(connections(None, false), [Some(4), Some(0), Some(0)], "IPVS counts SCTP");
        assert_eq!(connections(Some(7), true), [Some(4), None, None], "it may be one of the others");
        let nothing = ServiceCounts::new(Vec::new(), false);
        assert_eq!(nothing.of(&key("shop/web", "")), None, "the mode does not count");
    }
}
