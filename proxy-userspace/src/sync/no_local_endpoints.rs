//! Counts service ports with traffic policy Local that have endpoints, but none on this node.

use std::collections::BTreeSet;

use crate::{
    metrics::{Metrics, PolicySide},
    model::{Dirty, FrontendKind, IpFamily, ResolvedPort, ServicePortKey, Snapshot, TrafficPolicy},
};

const SIDES: [PolicySide; 2] = [PolicySide::Internal, PolicySide::External];

/// The service ports that lack local endpoints, by [`SIDES`].
#[derive(Debug, Default)]
pub(super) struct NoLocalEndpoints {
    ports: [BTreeSet<ServicePortKey>; SIDES.len()],
}

impl NoLocalEndpoints {
    /// Checks the dirty service ports again.
    pub(super) fn update(&mut self, snapshot: &Snapshot, dirty: &Dirty) {
        if dirty.all {
            *self = Self::default();
            snapshot.ports.iter().for_each(|(key, port)| self.update_port(key, Some(port)));
        } else {
            for key in &dirty.ports {
                self.update_port(key, snapshot.ports.get(key).map(AsRef::as_ref));
            }
        }
    }

    fn update_port(&mut self, key: &ServicePortKey, port: Option<&ResolvedPort>) {
        for (side, ports) in SIDES.into_iter().zip(&mut self.ports) {
            if port.is_some_and(|port| lacks_local_endpoints(port, side)) {
                ports.insert(key.clone());
            } else {
                ports.remove(key);
            }
        }
    }

    pub(super) fn report(&self, metrics: &Metrics) {
        for (side, ports) in SIDES.into_iter().zip(&self.ports) {
            for family in IpFamily::ALL {
                let count = ports.iter().filter(|key| key.family == family).count();
                metrics.set_no_local_endpoints(side, family, count);
            }
        }
    }
}

/// Counts service ports, as upstream's modes iptables and nftables do. Upstream also counts the
/// external policy of a Service that has no external address yet, where nothing is dropped.
fn lacks_local_endpoints(port: &ResolvedPort, side: PolicySide) -> bool {
    let is_local = match side {
        PolicySide::Internal => port.internal_policy == TrafficPolicy::Local,
        PolicySide::External => {
            let external = port.frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp);
            external && port.external_policy == TrafficPolicy::Local
        }
    };
    is_local && port.has_endpoints && port.local_endpoints.is_empty()
}
