//! The Node object, as far as it decides when to begin and when to end: upstream's `NodeManager` (`pkg/proxy/node.go`).

use std::time::Duration;

use ipnet::IpNet;
use tokio::time::Instant;

use crate::model::{DetectLocalMode, Model, ModelSettings};

/// How long upstream waits for the Node, and then goes on without.
const FOR_NODE: Duration = Duration::from_secs(30);
/// How long it waits for pod CIDRs where rules depend on them, and then ends.
const FOR_POD_CIDRS: Duration = Duration::from_mins(5);
/// How often the wait is told.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Rules that go by the node's pod CIDRs cannot be made, or are not right any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodCidrsError {
    /// There are none.
    #[error(
        "detectLocalMode is NodeCIDR, and the Node {node} has no pod CIDRs after {} s: the cluster has to allocate them \
         (--allocate-node-cidrs of kube-controller-manager)",
        FOR_POD_CIDRS.as_secs()
    )]
    Missing {
        /// The name.
        node: String,
    },
    /// They changed. What was made for the old ones is everywhere: a new process begins anew, as upstream has it.
    #[error("the pod CIDRs of the Node {node} changed from {before:?} to {now:?}")]
    Changed {
        /// The name.
        node: String,
        /// Those that rules were made for.
        before: Vec<IpNet>,
        /// Those of now.
        now: Vec<IpNet>,
    },
}

/// Waits for the Node, and watches its pod CIDRs.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct NodeWait {
    node: String,
    is_unknown: bool,
    is_over: bool,
    needs_pod_cidrs: bool,
    since: Option<Instant>,
    told_at: Option<Instant>,
    told_missing: bool,
    pod_cidrs: Option<Vec<IpNet>>,
}

impl NodeWait {
    pub(super) fn new(settings: &ModelSettings, waits: bool) -> Self {
        Self {
            node: settings.node_name.to_string(),
            is_unknown: waits,
            is_over: !waits,
            needs_pod_cidrs: settings.detect_local == DetectLocalMode::NodeCidr,
            since: None,
            told_at: None,
            told_missing: false,
            pod_cidrs: None,
        }
    }

    /// Programming may begin.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The Node was not there since this loop began, where one ought to be: if it was not before either, the node is not to get traffic,
    /// as upstream has it (`NodeEligible`).
    pub(super) fn is_unknown(&self) -> bool {
        self.is_unknown
    }

    /// When to look again if nothing else happens.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.told_at.filter(|_| !self.is_over).map(|at| at + TELL_EVERY)
    }

    /// Looks at the Node; true when it was waited for and is not any more.
    pub(super) fn look(&mut self, model: &Model, now: Instant) -> Result<bool, PodCidrsError> {
        if !model.is_synced() {
            return Ok(false);
        }
        let is_missing = model.missing_node().is_some();
        self.is_unknown &= is_missing;
        let pod_cidrs = model.node().map_or(&[][..], |node| &node.pod_cidrs);
        self.watch_pod_cidrs(pod_cidrs)?;
        if self.is_over {
            self.tell_missing(is_missing);
            return Ok(false);
        }
        let waited = now - *self.since.get_or_insert(now);
        let lacks_pod_cidrs = self.needs_pod_cidrs && pod_cidrs.is_empty();
        if lacks_pod_cidrs && waited >= FOR_POD_CIDRS {
            return Err(PodCidrsError::Missing { node: self.node.clone() });
        }
        self.is_over = !lacks_pod_cidrs && (!is_missing || waited >= FOR_NODE);
        if self.is_over {
            self.tell_missing(is_missing);
        } else if self.told_at.is_none_or(|at| now - at >= TELL_EVERY) {
            self.told_at = Some(now);
            let waits_for = if is_missing { "the Node object" } else { "pod CIDRs of the Node" };
            tracing::info!(
                node = self.node,
                ?waited,
                "waiting for {waits_for}; nothing is programmed before"
            );
        }
        Ok(self.is_over)
    }

    /// A wrong name is easily given, and what depends on it then fails quietly.
    fn tell_missing(&mut self, is_missing: bool) {
        if is_missing && !self.told_missing {
            tracing::warn!(
                node = self.node,
                "there is no Node object of this name (--hostname-override): its zone, addresses and pod CIDRs are unknown"
            );
        }
        self.told_missing = is_missing;
    }

    /// A Node that goes keeps what it had.
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
