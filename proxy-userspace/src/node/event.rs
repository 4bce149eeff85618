//! What is told of this node's proxy to whoever looks at the Node or at a Service: Kubernetes Events, without the Kubernetes in them.

use tokio::sync::mpsc;

use crate::model::NamespacedName;

/// Events that may wait; what comes beyond is lost, as Events may be.
const WAITING: usize = 16;
/// So many of these places are not for Services, which may be many at once.
const OF_NODE: usize = 8;

/// Something that happened to the proxy of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
    /// The Service that it is about; none for the Node.
    pub service: Option<NamespacedName>,
    /// Something is wrong.
    pub is_warning: bool,
    /// In one word, for machines.
    pub reason: &'static str,
    /// For people.
    pub note: String,
}

/// Takes events in; the one made by `default` has nobody to tell.
#[derive(Clone, Debug, Default)]
pub struct NodeEvents(Option<mpsc::Sender<NodeEvent>>);

impl NodeEvents {
    /// Events, and where they come out.
    pub fn channel() -> (Self, mpsc::Receiver<NodeEvent>) {
        let (to, from) = mpsc::channel(WAITING);
        (Self(Some(to)), from)
    }

    /// All is well.
    pub fn normal(&self, reason: &'static str, note: impl Into<String>) {
        self.tell(NodeEvent { service: None, is_warning: false, reason, note: note.into() });
    }

    /// Something is wrong.
    pub fn warning(&self, reason: &'static str, note: impl Into<String>) {
        self.tell(NodeEvent { service: None, is_warning: true, reason, note: note.into() });
    }

    /// Something is wrong with a Service here. False where too many wait: then it is to be told later.
    pub fn service_warning(&self, service: NamespacedName, reason: &'static str, note: String) -> bool {
        let has_room = self.0.as_ref().is_none_or(|to| to.capacity() > OF_NODE);
        has_room && self.tell(NodeEvent { service: Some(service), is_warning: true, reason, note })
    }

    /// Whether it waits to be written, or there is nobody to write it.
    fn tell(&self, event: NodeEvent) -> bool {
        let Some(to) = &self.0 else { return true };
        let queued = to.try_send(event);
        if let Err(lost) = &queued {
            tracing::debug!(%lost, "an Event is not told");
        }
        queued.is_ok()
    }
}
