//! Kubernetes Events about this node's proxy and its Services, in a form that is independent of
//! Kubernetes.

use tokio::sync::mpsc;

use crate::model::NamespacedName;

/// How many events may wait. Further ones are lost, as Kubernetes Events may be.
const CAPACITY: usize = 16;
/// How many of these places are reserved for the Node: there may be many events about Services.
const RESERVED_FOR_NODE: usize = 8;

/// The action of all Events about the Node, as upstream's `NewProxyServer` has it.
const START: &str = "StartKubeProxy";

/// Something that happened to the proxy of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// The Service that the event is about; `None` for the Node.
    pub service: Option<NamespacedName>,
    /// The event reports a problem.
    pub is_warning: bool,
    /// The reason in one word, for machines.
    pub reason: &'static str,
    /// What shunt did or tried, in one word, for machines.
    pub action: &'static str,
    /// The message for people.
    pub note: String,
}

/// Sends events. The default value discards them.
#[derive(Clone, Debug, Default)]
pub struct NodeEvents(Option<mpsc::Sender<NodeEvent>>);

impl NodeEvents {
    /// Creates a sender and the receiver of its events.
    pub fn channel() -> (Self, mpsc::Receiver<NodeEvent>) {
        let (to, from) = mpsc::channel(CAPACITY);
        (Self(Some(to)), from)
    }

    /// Sends an event about the Node that is no problem.
    pub fn normal(&self, reason: &'static str, note: impl Into<String>) {
        self.send(NodeEvent { service: None, is_warning: false, reason, action: START, note: note.into() });
    }

    /// Sends an event about a problem of the Node.
    pub fn warning(&self, reason: &'static str, note: impl Into<String>) {
        self.send(NodeEvent { service: None, is_warning: true, reason, action: START, note: note.into() });
    }

    /// Sends an event about a problem of a Service on this node. Returns false if too many events
    /// wait. The caller then sends it later.
    pub fn service_warning(
        &self,
        service: NamespacedName,
        reason: &'static str,
        action: &'static str,
        note: String,
    ) -> bool {
        let has_room = self.0.as_ref().is_none_or(|to| to.capacity() > RESERVED_FOR_NODE);
        has_room && self.send(NodeEvent { service: Some(service), is_warning: true, reason, action, note })
    }

    /// Returns true if the event was queued or discarded, and false if it is lost.
    fn send(&self, event: NodeEvent) -> bool {
        let Some(to) = &self.0 else { return true };
        let queued = to.try_send(event);
        if let Err(lost) = &queued {
            tracing::debug!(%lost, "a Kubernetes Event is lost: too many wait to be written");
        }
        queued.is_ok()
    }
}
