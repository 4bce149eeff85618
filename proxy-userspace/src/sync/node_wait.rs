//! Waits for the Node object before the first sync, and ends the process when the pod CIDRs change:
//! upstream's `NodeManager` (`pkg/proxy/node.go`). Upstream always waits for the addresses of the
//! Node too. shunt does so if rules depend on them: with `nodePortAddresses: primary`, a Node
//! without addresses stands for all addresses of the node.

use std::time::Duration;

use ipnet::IpNet;
use tokio::time::Instant;

use crate::model::{DetectLocalMode, Model, ModelSettings, NodePortAddresses};

/// How long upstream waits for the Node and its addresses before it continues without them.
const MAX_NODE_WAIT: Duration = Duration::from_secs(30);
/// How long upstream waits for pod CIDRs that rules depend on, before it ends.
const MAX_POD_CIDRS_WAIT: Duration = Duration::from_mins(5);
/// How often the wait is logged.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// The pod CIDRs that the rules depend on are missing or have changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodCidrsError {
    /// The Node with this name has none.
    #[error(
        "detectLocalMode is NodeCIDR, but the Node {} has no pod CIDRs after {} s: let the cluster allocate \
         them (--allocate-node-cidrs of kube-controller-manager), or choose another detectLocalMode",
        .0, MAX_POD_CIDRS_WAIT.as_secs()
    )]
    Missing(String),
    /// The Node has other pod CIDRs now. Rules for the old ones are everywhere, so the process ends
    /// and a new one starts afresh, as with upstream.
    #[error("the pod CIDRs of the Node {node} changed from {before:?} to {now:?}: shunt has to start again")]
    Changed {
        /// The Node's name.
        node: String,
        /// The pod CIDRs that the rules were made for.
        before: Vec<IpNet>,
        /// The current pod CIDRs.
        now: Vec<IpNet>,
    },
}

/// Waits for the Node, and watches its pod CIDRs.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an independent fact")]
pub(super) struct NodeWait {
    node: String,
    /// A Node is expected and was never seen by this loop. If no earlier loop saw it either, the
    /// node must not get traffic, as with upstream (`NodeEligible`).
    pub(super) is_unknown: bool,
    /// The loop may program the kernel.
    pub(super) is_over: bool,
    needs_pod_cidrs: bool,
    needs_addresses: bool,
    since: Option<Instant>,
    logged_at: Option<Instant>,
    is_missing_logged: bool,
    pod_cidrs: Option<Vec<IpNet>>,
    /// The pod CIDRs outside `clusterCIDR`, as they were at the last check.
    outside_cluster: Vec<IpNet>,
}

impl NodeWait {
    pub(super) fn new(settings: &ModelSettings, waits: bool) -> Self {
        Self {
            node: settings.node_name.to_string(),
            is_unknown: waits,
            is_over: !waits,
            needs_pod_cidrs: settings.detect_local == DetectLocalMode::NodeCidr,
            needs_addresses: settings.bind_address.is_none()
                && matches!(settings.node_port_addresses, NodePortAddresses::Primary { .. }),
            ..Self::default()
        }
    }

    /// When to check again if nothing else happens.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.logged_at.filter(|_| !self.is_over).map(|at| at + LOG_EVERY)
    }

    /// Checks the Node. Returns true if this check ended the wait.
    pub(super) fn check(&mut self, model: &Model, now: Instant) -> Result<bool, PodCidrsError> {
        if !model.is_synced() {
            return Ok(false);
        }
        let is_missing = model.missing_node().is_some();
        self.is_unknown &= is_missing;
        let pod_cidrs = model.node().map_or(&[][..], |node| &node.pod_cidrs);
        self.watch_pod_cidrs(pod_cidrs)?;
        self.warn_of_cluster_cidr(model.pod_cidrs_outside_cluster_cidr());
        if self.is_over {
            self.log_missing(is_missing);
            return Ok(false);
        }
        let waited = now - *self.since.get_or_insert(now);
        let lacks_pod_cidrs = self.needs_pod_cidrs && pod_cidrs.is_empty();
        if lacks_pod_cidrs && waited >= MAX_POD_CIDRS_WAIT {
            return Err(PodCidrsError::Missing(self.node.clone()));
        }
        let lacks_addresses =
            self.needs_addresses && model.node().is_some_and(|node| node.addresses.is_empty());
        let is_late = waited >= MAX_NODE_WAIT;
        self.is_over = !lacks_pod_cidrs && (is_late || !is_missing && !lacks_addresses);
        if self.is_over {
            self.log_missing(is_missing);
            self.log_lack_of_addresses(lacks_addresses);
        } else if self.logged_at.is_none_or(|at| now - at >= LOG_EVERY) {
            self.logged_at = Some(now);
            let missing = match (is_missing, lacks_addresses && !is_late) {
                (true, _) => "Node object",
                (false, true) => "addresses",
                (false, false) => "pod CIDRs",
            };
            tracing::info!(node = self.node, missing, ?waited, "waiting for the Node before the first sync");
        }
        Ok(self.is_over)
    }

    fn log_lack_of_addresses(&self, lacks_addresses: bool) {
        if lacks_addresses {
            tracing::warn!(
                node = self.node,
                "the Node object has no address, so node ports are served on all addresses of the node until it \
                 has one: check the kubelet, and the cloud controller manager if there is one"
            );
        }
    }

    /// A wrong node name is a common mistake, and its consequences are silent.
    fn log_missing(&mut self, is_missing: bool) {
        if is_missing && !self.is_missing_logged {
            tracing::warn!(
                node = self.node,
                "no Node object has this name: shunt continues without the node's zone, addresses and pod \
                 CIDRs; check --hostname-override"
            );
        }
        self.is_missing_logged = is_missing;
    }

    /// With a wrong range, connections of pods are masqueraded, and policies treat them as traffic
    /// from outside.
    fn warn_of_cluster_cidr(&mut self, outside: &[IpNet]) {
        if outside == self.outside_cluster {
            return;
        }
        if !outside.is_empty() {
            tracing::warn!(
                node = self.node,
                pod_cidrs = ?outside,
                "clusterCIDR does not contain these pod CIDRs of the node, so connections of its pods count as \
                 traffic from outside: set clusterCIDR to the range of all pods, for each IP family"
            );
        }
        self.outside_cluster = outside.to_vec();
    }

    /// A deleted Node does not count as a change.
    fn watch_pod_cidrs(&mut self, now: &[IpNet]) -> Result<(), PodCidrsError> {
        if !self.needs_pod_cidrs || now.is_empty() {
            return Ok(());
        }
        let before = self.pod_cidrs.get_or_insert_with(|| now.to_vec());
        if before == now {
            return Ok(());
        }
        Err(PodCidrsError::Changed { node: self.node.clone(), before: before.clone(), now: now.to_vec() })
    }
}
