//! Plans the changes of virtual and real servers.

use std::{collections::BTreeSet, net::SocketAddr};

use super::{
    super::{
        desired::{self, KernelObject},
        state::{State, VirtualServerState},
    },
    Plan,
};
use crate::{
    kernel::ipvs::{Change, VirtualKey, VirtualServer},
    model::{Protocol, Snapshot},
};

/// The weight of a real server that gets new connections.
const SERVING_WEIGHT: u32 = 1;

/// Changes of virtual and real servers.
#[derive(Debug, Default)]
pub(super) struct ServerChanges {
    /// Virtual and real servers to add or change.
    pub(super) added: Vec<Change>,
    /// Real servers to remove when they have no connections.
    pub(super) drained: Vec<(VirtualKey, SocketAddr)>,
    /// Virtual and real servers to remove now.
    pub(super) removed: Vec<Change>,
}

impl ServerChanges {
    /// Returns the changes of the virtual servers whose users a plan changes. A full plan also
    /// removes virtual servers that no service port needs, of families that shunt serves. In
    /// excluded ranges, no plan removes one (`cleanLegacyService` of `pkg/proxy/ipvs/proxier.go`).
    pub(super) fn new(state: &State, snapshot: &Snapshot, plan: &Plan) -> Self {
        let mut changes = Self::default();
        let settings = &state.options.settings;
        for (key, users) in &plan.server_users {
            let held = state.servers.get(key);
            let wanted = users.first().and_then(|(reason, owner)| {
                let port = snapshot.ports.get(owner)?;
                let endpoints = desired::endpoints(*reason, port).iter().map(|endpoint| endpoint.address);
                let is_accepted = |real: &SocketAddr| {
                    !plan.rejections.contains(owner, KernelObject::RealServer(*key, *real))
                };
                let server = desired::virtual_server(*key, port, &settings.scheduler);
                Some((server, endpoints.filter(is_accepted).collect()))
            });
            match (held, wanted) {
                (held, Some((server, endpoints))) => changes.update(*key, held, server, &endpoints),
                (Some(_), None) if !settings.excludes(key.address.ip()) => {
                    changes.removed.push(Change::RemoveServer(*key));
                }
                (_, None) => {}
            }
        }
        if plan.is_full {
            let others = state.servers.keys().filter(|key| !plan.server_users.contains_key(key));
            let unneeded = others
                .filter(|key| state.options.serves(key.address.ip()) && !settings.excludes(key.address.ip()));
            changes.removed.extend(unneeded.map(|key| Change::RemoveServer(*key)));
        }
        changes
    }

    fn update(
        &mut self,
        key: VirtualKey,
        held: Option<&VirtualServerState>,
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
                Err(_) => self.added.push(Change::AddReal(key, *endpoint, SERVING_WEIGHT)),
                Ok(at) if reals[at].weight != SERVING_WEIGHT => {
                    self.added.push(Change::SetReal(key, *endpoint, SERVING_WEIGHT));
                }
                Ok(_) => {}
            }
        }
        for real in reals.iter().filter(|real| !endpoints.contains(&real.address)) {
            let is_graceful = key.protocol == Protocol::Tcp;
            if !is_graceful || (real.weight == 0 && real.is_idle) {
                self.removed.push(Change::RemoveReal(key, real.address));
            } else if real.weight != 0 {
                self.drained.push((key, real.address));
            }
        }
    }
}
