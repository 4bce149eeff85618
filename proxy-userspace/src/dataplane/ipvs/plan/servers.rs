//! Which virtual and real servers come, change and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use super::super::{
    claims,
    refusals::{Refusals, Refused},
    state::{Owners, Running, State},
};
use crate::{
    kernel::ipvs::{Change, VirtualKey, VirtualServer},
    model::{Protocol, Snapshot},
};

/// The weight of a real server that gets new connections.
const SERVES: u32 = 1;

/// Changes of servers.
#[derive(Debug, Default)]
pub(super) struct ServerChanges {
    /// Virtual and real servers that come or change.
    pub(super) added: Vec<Change>,
    /// Real servers that go as soon as they have no connections.
    pub(super) retired: Vec<(VirtualKey, SocketAddr)>,
    /// Virtual and real servers that go now.
    pub(super) removed: Vec<Change>,
}

impl ServerChanges {
    /// What changes where these servers have other owners, or owners that changed; those that nobody wants go if all are looked
    /// at.
    pub(super) fn new(
        state: &State,
        snapshot: &Snapshot,
        owners: &BTreeMap<VirtualKey, Owners>,
        refused: &Refusals,
        is_full: bool,
    ) -> Self {
        let mut changes = Self::default();
        for (key, owners) in owners {
            let held = state.servers.get(key);
            let wanted = owners.first().and_then(|(reason, owner)| {
                let port = snapshot.ports.get(owner)?;
                let endpoints = claims::endpoints(*reason, port).iter().map(|endpoint| endpoint.address);
                let is_taken = |real: &SocketAddr| !refused.has(owner, Refused::Real(*key, *real));
                Some((claims::server(*key, port, &state.terms), endpoints.filter(is_taken).collect()))
            });
            match (held, wanted) {
                (held, Some((server, endpoints))) => changes.put(*key, held, server, &endpoints),
                (Some(_), None) => changes.removed.push(Change::RemoveServer(*key)),
                (None, None) => {}
            }
        }
        if is_full {
            let unknown = state.servers.keys().filter(|key| !owners.contains_key(key));
            let stray = unknown.filter(|key| !state.terms.excludes(key.address.ip()));
            changes.removed.extend(stray.map(|key| Change::RemoveServer(*key)));
        }
        changes
    }

    fn put(
        &mut self,
        key: VirtualKey,
        held: Option<&Running>,
        server: VirtualServer,
        endpoints: &BTreeSet<SocketAddr>,
    ) {
        match held {
            None => self.added.push(Change::AddServer(key, server)),
            Some(held) if held.server != server => self.added.push(Change::SetServer(key, server)),
            Some(_) => {}
        }
        let reals = held.map_or(&[][..], |held| &held.reals);
        for endpoint in endpoints {
            match reals.binary_search_by_key(endpoint, |real| real.address) {
                Err(_) => self.added.push(Change::AddReal(key, *endpoint, SERVES)),
                Ok(at) if reals[at].weight != SERVES => {
                    self.added.push(Change::SetReal(key, *endpoint, SERVES));
                }
                Ok(_) => {}
            }
        }
        for real in reals.iter().filter(|real| !endpoints.contains(&real.address)) {
            let gracefully = key.protocol == Protocol::Tcp;
            if !gracefully || (real.weight == 0 && real.is_idle) {
                self.removed.push(Change::RemoveReal(key, real.address));
            } else if real.weight != 0 {
                self.retired.push((key, real.address));
            }
        }
    }
}
