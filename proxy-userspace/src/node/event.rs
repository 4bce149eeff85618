//! What is told of this node's proxy to whoever looks at the Node: Kubernetes Events, without the Kubernetes in them.

use tokio::sync::mpsc;

/// Events that may wait; what comes beyond is lost, as Events may be.
const WAITING: usize = 16;

/// Something that happened to the proxy of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvent {
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
        self.tell(NodeEvent { is_warning: false, reason, note: note.into() });
    }

    /// Something is wrong.
    pub fn warning(&self, reason: &'static str, note: impl Into<String>) {
        self.tell(NodeEvent { is_warning: true, reason, note: note.into() });
    }

    fn tell(&self, event: NodeEvent) {
        if let Some(to) = &self.0
            && let Err(lost) = to.try_send(event)
        {
            tracing::debug!(%lost, "an Event is not told");
        }
    }
}
