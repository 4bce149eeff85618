//! Reads the clients with affinity from the kernel.

use std::{collections::BTreeSet, net::IpAddr, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    gather::{Filter, port_name},
    kernel_rows::AffinityRow,
    namespaces::Namespaces,
};
use crate::{
    dataplane::{AffinityClient, AffinityKeeper, AffinityPort, KnownAffinity, Mode, known_affinity},
    kernel::KernelError,
    sync::Inspected,
};

/// Which clients to list.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AffinityFilter {
    /// Of service ports in this namespace.
    pub namespace: Option<String>,
    /// Of the Service with this name.
    pub name: Option<String>,
    /// With this address.
    pub client: Option<IpAddr>,
    /// Of this endpoint.
    pub endpoint: Option<IpAddr>,
}

/// What is needed to read the kernel.
pub(super) struct Wanted {
    keepers: Vec<AffinityKeeper>,
    ports: Vec<AffinityPort>,
}

/// Returns the service ports with affinity, and what keeps it. `None` while no mode runs.
pub(super) fn wanted(inspected: &Inspected<'_>, filter: &AffinityFilter, pins: &Path) -> Option<Wanted> {
    let modes = [inspected.mode?].into_iter().chain(inspected.backstop.as_ref().map(|status| status.mode));
    let of = Filter { namespace: filter.namespace.clone(), name: filter.name.clone(), drift: false };
    let ports = inspected.model.snapshot().ports.iter();
    let ports = ports.filter(|(key, port)| port.affinity_timeout.is_some() && of.matches(key));
    let port = |(key, port): (&_, &std::sync::Arc<_>)| AffinityPort {
        key: Clone::clone(key),
        port: std::sync::Arc::clone(port),
    };
    Some(Wanted { keepers: modes.map(|mode| keeper(mode, pins)).collect(), ports: ports.map(port).collect() })
}

fn keeper(mode: Mode, pins: &Path) -> AffinityKeeper {
    match mode {
        Mode::Ebpf => AffinityKeeper::Programs(pins.to_owned()),
        Mode::Nftables => AffinityKeeper::Nftables,
        Mode::Iptables => AffinityKeeper::Iptables,
        Mode::Ipvs => AffinityKeeper::Ipvs,
    }
}

impl Wanted {
    /// Wants the clients of one service port whose affinity the programs or rules of a mode keep.
    pub(super) fn of_port(port: AffinityPort, mode: Mode, pins: &Path) -> Self {
        Self { keepers: vec![keeper(mode, pins)], ports: vec![port] }
    }
}

/// Reads the kernel. Blocks meanwhile.
pub(super) fn read(wanted: &Wanted, filter: &AffinityFilter) -> Result<Vec<AffinityRow>, KernelError> {
    let mut found = Vec::new();
    for keeper in &wanted.keepers {
        found.extend(known_affinity(keeper, &wanted.ports)?);
    }
    found.retain(|known| filter.endpoint.is_none_or(|endpoint| endpoint == known.endpoint.ip()));
    found.sort_by(|a, b| (&a.port, a.client, a.endpoint).cmp(&(&b.port, b.client, b.endpoint)));
    let cookies: BTreeSet<_> = found.iter().filter_map(|known| cookie(known.client)).collect();
    let namespaces = Namespaces::read(&cookies);
    let rows = found.iter().map(|known| row(known, &namespaces));
    let is_wanted = |row: &AffinityRow| {
        filter.client.is_none_or(|client| row.client.split(',').any(|own| own == client.to_string()))
    };
    Ok(rows.filter(is_wanted).collect())
}

const fn cookie(client: AffinityClient) -> Option<crate::kernel::netns::NetnsCookie> {
    match client {
        AffinityClient::Namespace(cookie) => Some(cookie),
        AffinityClient::Address(_) => None,
    }
}

fn row(known: &KnownAffinity, namespaces: &Namespaces) -> AffinityRow {
    let (client, of) = match known.client {
        AffinityClient::Address(address) => (address.to_string(), "packets"),
        AffinityClient::Namespace(cookie) => (namespaces.name(cookie), "sockets"),
    };
    AffinityRow {
        port: port_name(&known.port),
        client,
        of: of.to_owned(),
        endpoint: known.endpoint,
        remaining_seconds: known.remaining.map(|remaining| remaining.as_secs()),
    }
}
