//! Exports what the kernel counts about packets, programs and Services. The counters are read at
//! each scrape.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use proxy_common::layout::ServiceCounts;

use crate::dataplane::{KernelCounts, PrefilterFill, ServiceCount};

/// Reads the counters of the current dataplane, if it has any.
#[derive(Clone, Default)]
pub(super) struct KernelCountsCollector(Arc<RwLock<Option<Box<dyn KernelCounts>>>>);

impl fmt::Debug for KernelCountsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KernelCountsCollector")
    }
}

impl KernelCountsCollector {
    pub(super) fn set(&self, counts: Option<Box<dyn KernelCounts>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    /// Returns the counts of service ports, and whether refusals and drops are among them.
    pub(super) fn services(&self) -> (Vec<ServiceCount>, bool) {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        counts.as_ref().map_or((Vec::new(), false), |counts| (counts.services(), counts.counts_failures()))
    }
}

impl Collector for KernelCountsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(counts) = &*counts else { return Ok(()) };
        let packets = counts.packets().into_iter().map(|(fate, count)| ([("fate", fate)], count));
        encode(&mut encoder, "link_packets", PACKETS, packets)?;
        let errors = counts.errors().into_iter();
        let errors =
            errors.map(|error| ([("program", error.program), ("reason", error.reason)], error.count));
        encode(&mut encoder, "program_errors", ERRORS, errors)?;
        if let Some(fill) = counts.prefilter() {
            encode_prefilter(&mut encoder, fill)?;
        }
        encode_services(&mut encoder, &counts.services(), counts.counts_failures())
    }
}

const PACKETS: &str = "Packets to Services that arrived on a link, by fate";
const ERRORS: &str = "Errors in eBPF programs: map entries that could not be written, packets that could not be read or changed";

const PREFILTER_BYTES: &str = "The size of the part of the prefilter that is in use";
const FALSE_POSITIVES: &str = "The share of addresses and ports of no Service that pass the prefilter, so that maps are searched for them";

fn encode_prefilter(encoder: &mut DescriptorEncoder<'_>, fill: PrefilterFill) -> fmt::Result {
    let (gauge, name) = (MetricType::Gauge, "prefilter_false_positive_ratio");
    let ratio = encoder.encode_descriptor(name, FALSE_POSITIVES, None, gauge)?;
    ConstGauge::new(fill.false_positive_ratio).encode(ratio)?;
    let bytes = encoder.encode_descriptor("prefilter_bytes", PREFILTER_BYTES, None, gauge)?;
    ConstGauge::new(fill.bytes).encode(bytes)
}

type Read = fn(&ServiceCounts) -> u64;

/// The metrics of a service port that need no additional label.
const CONNECTIONS: [(&str, &str, Read); 1] = [(
    "service_connections",
    "Connections and UDP flows to a service port. The name other sums up all service ports beyond maxServices",
    |counts| counts.connections,
)];
/// The metrics that only the ebpf mode counts.
const FAILURES: [(&str, &str, Read); 2] = [
    (
        "service_refusals",
        "Connections and datagrams to a service port that were refused. Each attempt counts",
        |counts| counts.refusals,
    ),
    (
        "service_drops",
        "Connections and datagrams to a service port that were dropped. Each attempt counts",
        |counts| counts.drops,
    ),
];
const BYTES: &str = "Bytes of IP packets that were translated for a service port. In the ebpf mode, packets of sockets on this node need no translation and are not counted";
const DIRECTIONS: [(&str, Read); 2] =
    [("to_endpoint", |counts| counts.bytes_to_endpoints), ("to_client", |counts| counts.bytes_to_clients)];

fn encode_services(
    encoder: &mut DescriptorEncoder<'_>,
    services: &[ServiceCount],
    counts_failures: bool,
) -> fmt::Result {
    let failures = if counts_failures { &FAILURES[..] } else { &[] };
    for (name, help, read) in CONNECTIONS.iter().chain(failures) {
        encode(encoder, name, help, services.iter().map(|service| (labels(service), read(&service.counts))))?;
    }
    let bytes = DIRECTIONS.into_iter().flat_map(|(direction, read)| {
        services.iter().map(move |service| {
            let [namespace, name, port, protocol, family] = labels(service);
            ([namespace, name, port, protocol, family, ("direction", direction)], read(&service.counts))
        })
    });
    encode(encoder, "service_bytes", BYTES, bytes)
}

/// Encodes counters of one name. Without a counter, the name does not appear either.
fn encode<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    counts: impl Iterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut counts = counts.peekable();
    if counts.peek().is_none() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    counts.try_for_each(|(labels, count)| ConstCounter::new(count).encode(metric.encode_family(&labels)?))
}

/// Returns the labels of a service port. To Prometheus, an empty label is the same as no label.
fn labels(service: &ServiceCount) -> [(&'static str, &str); 5] {
    let [namespace, name, port, protocol, family] = match &service.port {
        Some(key) => {
            let name = &key.name;
            let service = &name.service;
            [&*service.namespace, &*service.name, &*name.port, name.protocol.name(), key.family.name()]
        }
        None => ["", "other", "", "", ""],
    };
    [
        ("namespace", namespace),
        ("name", name),
        ("port_name", port),
        ("protocol", protocol),
        ("ip_family", family),
    ]
}
