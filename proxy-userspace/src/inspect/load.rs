//! What `shunt top` asks again and again: counts of service ports, the fill of maps, and the open
//! flows of one Service's endpoints. Each answer is much smaller than a list of all service ports.

use std::{
    collections::{BTreeMap, HashSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::{
    gather::{counts, port_name},
    rows::{Counts, NamedPort},
};
use crate::{
    dataplane::{FlowStage, KnownFlow, Mode, ServiceCount, for_each_flow},
    health::ReportedMap,
    kernel::KernelError,
    model::{Frontend, Protocol},
    sync::Inspected,
};

/// The counts of a service port that is counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountedPort {
    /// The service port. `None` for the sum of those that have no counts of their own.
    pub port: Option<NamedPort>,
    /// Its counts.
    pub counts: Counts,
}

/// Returns the counts of all service ports that are counted.
pub(super) fn counted(counted: Vec<ServiceCount>, counts_failures: bool) -> Vec<CountedPort> {
    let row = |count: ServiceCount| CountedPort {
        port: count.port.as_ref().map(port_name),
        counts: counts(&count.counts, counts_failures),
    };
    counted.into_iter().map(row).collect()
}

/// Returns how full maps are.
pub(super) fn maps(inspected: &Inspected<'_>) -> Vec<ReportedMap> {
    inspected.map_fill().into_iter().map(ReportedMap::from).collect()
}

/// The Service whose flows are counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// The flows of a Service to one endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointFlows {
    /// The endpoint.
    pub address: SocketAddr,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The flows that neither side has closed.
    pub flows: u64,
}

/// Where clients reach a Service. The address is `None` for node ports.
#[derive(Debug, Default)]
pub(super) struct Destinations {
    of_service: HashSet<(Option<IpAddr>, NonZeroU16, Protocol)>,
    /// The flows of link programs count too.
    pub(super) has_programs: bool,
}

impl Destinations {
    pub(super) fn of(inspected: &Inspected<'_>, service: &ServiceName) -> Self {
        let ports = inspected.model.snapshot().ports.iter().filter(|(key, _)| {
            *key.name.service.namespace == *service.namespace && *key.name.service.name == *service.name
        });
        let of_service = ports.flat_map(|(key, port)| {
            let protocol = key.name.protocol;
            port.frontends.iter().map(move |Frontend { address, port, .. }| (*address, *port, protocol))
        });
        Self { of_service: of_service.collect(), has_programs: inspected.mode == Some(Mode::Ebpf) }
    }

    fn has(&self, flow: &KnownFlow) -> bool {
        let Some(port) = NonZeroU16::new(flow.destination.port()) else { return false };
        let is_at = |address| self.of_service.contains(&(address, port, flow.protocol));
        is_at(Some(flow.destination.ip())) || is_at(None)
    }

    /// Counts the open flows to each endpoint. Reads all flows of the node: takes some hundred
    /// milliseconds if the map of flows is full.
    pub(super) fn open_flows(&self, pins: &Path) -> Result<Vec<EndpointFlows>, KernelError> {
        let mut open = BTreeMap::<(SocketAddr, Protocol), u64>::new();
        for_each_flow(self.has_programs.then_some(pins), &mut |flow| {
            let is_open = matches!(flow.state, FlowStage::Unanswered | FlowStage::Established);
            if is_open && self.has(&flow) {
                *open.entry((flow.endpoint, flow.protocol)).or_default() += 1;
            }
        })?;
        let row = |((address, protocol), flows): ((SocketAddr, Protocol), u64)| EndpointFlows {
            address,
            protocol: protocol.name().to_owned(),
            flows,
        };
        Ok(open.into_iter().map(row).collect())
    }
}
