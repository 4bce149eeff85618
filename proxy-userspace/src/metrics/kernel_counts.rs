//! What the kernel counts of packets, programs and Services, read when it is asked for.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter},
};

use crate::dataplane::{KernelCounts, ProgramErrorCount, ServiceCount};

/// Where to read it, once there is a dataplane that counts.
#[derive(Clone, Default)]
pub(super) struct OfKernel(Arc<RwLock<Option<Box<dyn KernelCounts>>>>);

impl fmt::Debug for OfKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfKernel")
    }
}

impl OfKernel {
    pub(super) fn set(&self, counts: Option<Box<dyn KernelCounts>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = counts;
    }
}

impl Collector for OfKernel {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(counts) = &*counts else { return Ok(()) };
        encode_packets(&mut encoder, &counts.packets())?;
        encode_errors(&mut encoder, &counts.errors())?;
        encode_services(&mut encoder, &counts.services(), counts.tells_failures())
    }
}

const PACKETS: &str = "Packets to Services that came in on links, by what became of them";
const ERRORS: &str = "What went wrong in an eBPF program: entries of maps that could not be written, packets that could not be read or changed";

type Read = fn(&ServiceCount) -> u64;

/// The metrics of service ports that have no label of their own.
const CONNECTIONS: [(&str, &str, Read); 1] = [(
    "service_connections",
    "Connections to a service port, and UDP flows; those of name other are of all service ports beyond maxServices",
    |service| service.connections,
)];
/// The same, of what the ebpf mode alone counts.
const FAILURES: [(&str, &str, Read); 2] = [
    (
        "service_refusals",
        "Connections and datagrams to a service port that were refused, each try of them",
        |service| service.refusals,
    ),
    (
        "service_drops",
        "Connections and datagrams to a service port that were dropped, each try of them",
        |service| service.drops,
    ),
];
const BYTES: &str = "Bytes of IP packets that were translated for a service port. In the ebpf mode packets of sockets on this node pass untranslated, and are not among them";
const DIRECTIONS: [(&str, Read); 2] = [
    ("to_endpoint", |service| service.bytes_to_endpoints),
    ("to_client", |service| service.bytes_to_clients),
];

fn encode_packets(encoder: &mut DescriptorEncoder<'_>, packets: &[(&'static str, u64)]) -> fmt::Result {
    if packets.is_empty() {
        return Ok(());
    }
    let mut metric = family(encoder, "link_packets", PACKETS)?;
    for (fate, count) in packets {
        ConstCounter::new(*count).encode(metric.encode_family(&[("fate", *fate)])?)?;
    }
    Ok(())
}

fn encode_errors(encoder: &mut DescriptorEncoder<'_>, errors: &[ProgramErrorCount]) -> fmt::Result {
    if errors.is_empty() {
        return Ok(());
    }
    let mut metric = family(encoder, "program_errors", ERRORS)?;
    for error in errors {
        let labels = [("program", error.program), ("reason", error.reason)];
        ConstCounter::new(error.count).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_services(
    encoder: &mut DescriptorEncoder<'_>,
    services: &[ServiceCount],
    tells_failures: bool,
) -> fmt::Result {
    if services.is_empty() {
        return Ok(());
    }
    let failures = if tells_failures { &FAILURES[..] } else { &[] };
    for (name, help, read) in CONNECTIONS.iter().chain(failures) {
        let mut metric = family(encoder, name, help)?;
        for service in services {
            ConstCounter::new(read(service)).encode(metric.encode_family(&labels(service))?)?;
        }
    }
    let mut bytes = family(encoder, "service_bytes", BYTES)?;
    for (direction, read) in DIRECTIONS {
        for service in services {
            let [namespace, name, port, protocol, family] = labels(service);
            let labels = [namespace, name, port, protocol, family, ("direction", direction)];
            ConstCounter::new(read(service)).encode(bytes.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn family<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &str,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Counter)
}

/// Whose counts they are. A label that is empty is none to Prometheus.
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
