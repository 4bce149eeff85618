//! What the pages of the daemon show. Everything is read in small parts, so that a change of the
//! kernel waits for a page for about a millisecond at most, whatever the number of Services.

use std::{cell::Cell, net::IpAddr, num::NonZeroU16, ops::Bound, sync::Arc};

use tokio::task;

use super::{
    Filter, NodeInspector,
    gather::{self, Part, ServiceCounts},
    load,
    rows::{EndpointRow, LeftOutRow, LinkRow, ServiceRow},
};
use crate::{
    health::{NodeReport, ReportedMap},
    model::{FrontendKind, IpFamily, ResolvedPort, ServicePortKey},
    sync::{Inspected, NoAnswer},
};

/// How many service ports are compared with a search in one reading of the loop.
const KEYS_AT_ONCE: usize = 4096;
/// How many service ports a page shows.
pub const ROWS_A_PAGE: usize = 100;
/// How many endpoints of a Service are shown.
pub const MOST_ENDPOINTS: usize = 1000;
/// The number of service ports that are left out on a page.
const MOST_LEFT_OUT: usize = 100;

/// Which service ports are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Search {
    /// Those whose namespace, name or port name contains this.
    Text(String),
    /// Those whose namespace ends with the first and whose name begins with the second.
    Name(String, String),
    /// Those with this address.
    Address(IpAddr),
}

impl Search {
    /// Reads what somebody looks for: a part of a name, `namespace/name`, or an address.
    pub fn of(text: &str) -> Self {
        let text = text.trim();
        if let Ok(address) = text.parse() {
            return Self::Address(address);
        }
        let text = text.to_lowercase();
        match text.split_once('/') {
            Some((namespace, name)) => Self::Name(namespace.to_owned(), name.to_owned()),
            None => Self::Text(text),
        }
    }

    fn finds(&self, key: &ServicePortKey, port: &ResolvedPort) -> bool {
        let service = &key.name.service;
        match self {
            Self::Text(text) => {
                [&*service.namespace, &*service.name, &*key.name.port].iter().any(|part| part.contains(text))
            }
            Self::Name(namespace, name) => {
                service.namespace.ends_with(&**namespace) && service.name.starts_with(&**name)
            }
            Self::Address(address) => {
                port.frontends.iter().any(|frontend| frontend.address == Some(*address))
            }
        }
    }
}

/// A page of the service ports that were found.
#[derive(Clone, Debug, Default)]
pub struct FoundServices {
    /// Those on the page.
    pub rows: Vec<ServiceRow>,
    /// How many were found.
    pub found: usize,
}

/// A Service.
#[derive(Clone, Debug, Default)]
pub struct ServiceDetails {
    /// Its service ports.
    pub ports: Vec<ServiceRow>,
    /// Its endpoints, at most [`MOST_ENDPOINTS`].
    pub endpoints: Vec<EndpointRow>,
    /// Where clients reach it, as `address:port/protocol`. A node port has an address of this node.
    pub destinations: Vec<String>,
}

/// What only the sync loop knows about the node.
#[derive(Clone, Debug, Default)]
pub struct NodeDetails {
    /// The links on which packets are translated.
    pub links: Vec<LinkRow>,
    /// Service ports that are left out, at most a hundred.
    pub left_out: Vec<LeftOutRow>,
    /// The number of all that are left out.
    pub left_out_count: usize,
    /// The number of service ports.
    pub service_ports: usize,
}

impl NodeInspector {
    /// Returns what the process reports about itself. Does not ask the sync loop, so it also works
    /// while that is busy or not there.
    pub fn report(&self) -> NodeReport {
        NodeReport::new(&self.status, &self.health, self.pin_directory.display().to_string())
    }

    /// Returns what only the sync loop knows about the node.
    pub async fn details(&self) -> Result<NodeDetails, NoAnswer> {
        let read = |inspected: &Inspected<'_>| NodeDetails {
            links: gather::links(inspected),
            left_out: gather::left_out(inspected, &Filter::default()).take(MOST_LEFT_OUT).collect(),
            left_out_count: inspected.left_out().len(),
            service_ports: inspected.model.snapshot().ports.len(),
        };
        self.inspector.read(read).await
    }

    /// Returns how full maps are.
    pub async fn maps(&self) -> Result<Vec<ReportedMap>, NoAnswer> {
        self.inspector.read(load::maps).await
    }

    /// Returns a page of the service ports that a search finds. The first page has the number 0.
    pub async fn find(&self, search: &Search, page: usize) -> Result<FoundServices, NoAnswer> {
        let first = page.saturating_mul(ROWS_A_PAGE);
        let (counts, search) = (self.counts().await, Arc::new(search.clone()));
        let (mut all, mut after) = (FoundServices::default(), None);
        loop {
            let (counts, search, found_before) = (Arc::clone(&counts), Arc::clone(&search), all.found);
            let read = move |inspected: &Inspected<'_>| {
                find_some(inspected, &search, after.as_ref(), |inspected, key, index| {
                    let is_on_page =
                        (first..first.saturating_add(ROWS_A_PAGE)).contains(&(found_before + index));
                    if is_on_page { gather::service(inspected, key, &counts, None) } else { Vec::new() }
                })
            };
            let ((rows, last), found) = self.inspector.read(read).await?;
            all.rows.extend(rows);
            all.found += found;
            if last.is_none() {
                return Ok(all);
            }
            after = last;
        }
    }

    /// Returns a Service. `None` if no such Service has addresses on this node.
    pub async fn service(&self, namespace: &str, name: &str) -> Result<Option<ServiceDetails>, NoAnswer> {
        let (own, name) = (Some(namespace.to_owned()), Some(name.to_owned()));
        let filter = Filter { namespace: own, name, ..Filter::default() };
        let (mut details, mut after, counts) = (ServiceDetails::default(), None, self.counts().await);
        loop {
            let (filter, counts) = (filter.clone(), Arc::clone(&counts));
            let room = Cell::new(MOST_ENDPOINTS.saturating_sub(details.endpoints.len()));
            let read = move |inspected: &Inspected<'_>| {
                gather::part(inspected, &filter, after.as_ref(), |inspected, key| {
                    let endpoints = gather::some_endpoints(inspected, key, room.get());
                    room.set(room.get() - endpoints.len());
                    let ports = gather::service(inspected, key, &counts, None);
                    vec![(ports, endpoints, destinations(inspected, key))]
                })
            };
            let (parts, last) = self.inspector.read(read).await?;
            for (ports, endpoints, destinations) in parts {
                details.ports.extend(ports);
                details.endpoints.extend(endpoints);
                details.destinations.extend(destinations);
            }
            if last.is_none() {
                return Ok((!details.ports.is_empty()).then_some(details));
            }
            after = last;
        }
    }

    /// Reads the counts in a thread of its own, because that takes milliseconds.
    pub(super) async fn counts(&self) -> Arc<ServiceCounts> {
        let metrics = self.metrics.clone();
        let (counted, counts_failures) =
            task::spawn_blocking(move || metrics.service_counts()).await.unwrap_or_default();
        Arc::new(ServiceCounts::new(counted, counts_failures))
    }
}

/// Looks at some service ports behind a key. Returns the rows of those that were found, the last
/// key if there are more, and how many were found. `rows_of` also gets the number that were found
/// before it.
fn find_some<T>(
    inspected: &Inspected<'_>,
    search: &Search,
    after: Option<&ServicePortKey>,
    rows_of: impl Fn(&Inspected<'_>, &ServicePortKey, usize) -> Vec<T>,
) -> (Part<T>, usize) {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let ports = inspected.model.snapshot().ports.range::<ServicePortKey, _>((from, Bound::Unbounded));
    let (mut rows, mut found, mut last) = (Vec::new(), 0, None::<&ServicePortKey>);
    for (read, (key, port)) in ports.enumerate() {
        if read == KEYS_AT_ONCE {
            return ((rows, last.cloned()), found);
        }
        if search.finds(key, port) {
            rows.extend(rows_of(inspected, key, found));
            found += 1;
        }
        last = Some(key);
    }
    ((rows, None), found)
}

/// Returns where clients reach a service port.
fn destinations(inspected: &Inspected<'_>, key: &ServicePortKey) -> Vec<String> {
    let snapshot = inspected.model.snapshot();
    let own = |family: IpFamily| snapshot.node.primary_addresses.get(&family).copied();
    let Some(port) = snapshot.ports.get(key) else { return Vec::new() };
    let text = |address: Option<IpAddr>, number: NonZeroU16| {
        let address = address.or_else(|| own(key.family))?;
        let destination = std::net::SocketAddr::new(address, number.get());
        Some(format!("{destination}/{}", key.name.protocol.lowercase_name()))
    };
    let mut frontends: Vec<_> = port.frontends.iter().collect();
    frontends.sort_by_key(|frontend| frontend.kind != FrontendKind::ClusterIp);
    frontends.into_iter().filter_map(|frontend| text(frontend.address, frontend.port)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_is_a_text_a_name_or_an_address() {
        assert_eq!(Search::of(" Web "), Search::Text("web".to_owned()));
        assert_eq!(Search::of("shop/we"), Search::Name("shop".to_owned(), "we".to_owned()));
        assert_eq!(Search::of("10.96.0.1"), Search::Address([10, 96, 0, 1].into()));
        assert_eq!(Search::of("fd00::1"), Search::Address("fd00::1".parse().expect("an address")));
    }
}
