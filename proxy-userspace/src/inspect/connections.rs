//! Reads the connections of sockets from the kernel, and names their owners and Services.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use super::{
    flows::{FlowFilter, owner_of},
    kernel_rows::ConnectionRow,
    namespaces::Namespaces,
};
use crate::{
    dataplane::{KnownConnection, known_connections},
    kernel::KernelError,
    model::Model,
    sync::{Inspected, Inspector, NoAnswer},
};

/// How many connections one question to the sync loop names, so that no change waits long.
const CONNECTIONS_AT_ONCE: usize = 512;

/// The connections, and the names of the network namespaces of their sockets.
pub(super) struct Found {
    connections: Vec<KnownConnection>,
    namespaces: Namespaces,
}

/// Reads the kernel. Blocks meanwhile.
pub(super) fn read(pins: &Path) -> Result<Found, KernelError> {
    let connections = known_connections(pins)?;
    let cookies: BTreeSet<_> = connections.iter().filter_map(|known| known.namespace).collect();
    Ok(Found { connections, namespaces: Namespaces::read(&cookies) })
}

/// Names the Services, and leaves out what the filter does.
pub(super) async fn named(
    inspector: &Inspector,
    found: Found,
    filter: FlowFilter,
) -> Result<Vec<ConnectionRow>, NoAnswer> {
    let (found, filter, mut rows) = (Arc::new(found), Arc::new(filter), Vec::new());
    for first in (0..found.connections.len()).step_by(CONNECTIONS_AT_ONCE) {
        let (found, filter) = (Arc::clone(&found), Arc::clone(&filter));
        let reader = move |inspected: &Inspected<'_>| -> Vec<ConnectionRow> {
            let Found { connections, namespaces } = &*found;
            let part = connections.iter().skip(first).take(CONNECTIONS_AT_ONCE);
            part.filter_map(|known| row(Some(inspected.model), known, namespaces, &filter)).collect()
        };
        rows.extend(inspector.read(reader).await?);
    }
    Ok(rows)
}

/// Reads the connections that match, where no shunt runs that knows their Services. Blocks.
pub(super) fn without_daemon(pins: &Path, filter: &FlowFilter) -> Result<Vec<ConnectionRow>, KernelError> {
    let Found { connections, namespaces } = read(pins)?;
    Ok(connections.iter().filter_map(|known| row(None, known, &namespaces, filter)).collect())
}

/// Returns `None` if the filter leaves it out.
fn row(
    model: Option<&Model>,
    known: &KnownConnection,
    namespaces: &Namespaces,
    filter: &FlowFilter,
) -> Option<ConnectionRow> {
    let KnownConnection { protocol, namespace, client, vip, frontend, endpoint, state } = known;
    let key = frontend.zip(model).and_then(|(frontend, model)| owner_of(model, frontend, *protocol));
    let is_wanted = filter.client.is_none_or(|wanted| wanted == client.ip())
        && filter.vip.is_none_or(|wanted| vip.is_some_and(|vip| wanted == vip.ip()))
        && filter.endpoint.is_none_or(|wanted| wanted == endpoint.ip())
        && filter.state.as_deref().is_none_or(|wanted| wanted == *state)
        && filter.services().is_none_or(|wanted| key.is_some_and(|key| wanted.matches(key)));
    is_wanted.then(|| ConnectionRow {
        protocol: protocol.name().to_owned(),
        owner: namespace.map_or("unknown".to_owned(), |cookie| namespaces.name(cookie)),
        client: *client,
        vip: *vip,
        endpoint: *endpoint,
        service: key.map(|key| key.name.to_string()),
        state: (*state).to_owned(),
    })
}
