//! Kubernetes Events about this node's proxy and its Services, in a form that is independent of
//! Kubernetes.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::model::NamespacedName;

/// How many different events are remembered.
const REMEMBERED: usize = 100;

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

/// An event that happened once or several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentEvent {
    /// The event.
    pub event: NodeEvent,
    /// The first time.
    pub first: Timestamp,
    /// The last time.
    pub last: Timestamp,
}

/// Sends events, and remembers the last ones. The default value does not send.
#[derive(Clone, Debug, Default)]
pub struct NodeEvents {
    to: Option<mpsc::Sender<NodeEvent>>,
    /// The one that happened last comes last.
    recent: Arc<Mutex<VecDeque<RecentEvent>>>,
}

/// The events that wait to be written.
#[derive(Debug)]
pub struct PendingEvents {
    from: mpsc::Receiver<NodeEvent>,
    /// The one that is being written, and its time.
    current: Option<(NodeEvent, Timestamp)>,
}

impl PendingEvents {
    /// Takes over a receiver of events.
    pub fn new(from: mpsc::Receiver<NodeEvent>) -> Self {
        Self { from, current: None }
    }

    /// Waits for the next event, and returns it until [`Self::is_written`] is called: if its
    /// writing is given up, it is the next one again. `None` if no more will come.
    pub async fn next(&mut self) -> Option<(&NodeEvent, Timestamp)> {
        if self.current.is_none() {
            self.current = self.from.recv().await.map(|event| (event, Timestamp::now()));
        }
        self.current.as_ref().map(|(event, time)| (event, *time))
    }

    /// Records that the event which [`Self::next`] returned was written or is lost.
    pub fn is_written(&mut self) {
        self.current = None;
    }

    /// Takes no more events. Returns true if some wait.
    pub fn close(&mut self) -> bool {
        self.from.close();
        self.current.is_some() || !self.from.is_empty()
    }
}

impl NodeEvents {
    /// Creates a sender and the receiver of its events.
    pub fn channel() -> (Self, mpsc::Receiver<NodeEvent>) {
        let (to, from) = mpsc::channel(CAPACITY);
        (Self { to: Some(to), ..Self::default() }, from)
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
        let event = NodeEvent { service: Some(service), is_warning: true, reason, action, note };
        if self.to.as_ref().is_none_or(|to| to.capacity() > RESERVED_FOR_NODE) {
            return self.send(event);
        }
        self.remember(&event, Timestamp::now());
        false
    }

    /// Returns the last events, the newest first.
    pub fn recent(&self) -> Vec<RecentEvent> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().rev().cloned().collect()
    }

    /// An event that was there already comes to the end again.
    fn remember(&self, event: &NodeEvent, now: Timestamp) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let known = recent.iter().position(|known| known.event == *event);
        let first = known.and_then(|index| recent.remove(index)).map_or(now, |known| known.first);
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(RecentEvent { event: event.clone(), first, last: now });
    }

    /// Returns true if the event was queued or discarded, and false if it is lost.
    fn send(&self, event: NodeEvent) -> bool {
        self.remember(&event, Timestamp::now());
        let Some(to) = &self.to else { return true };
        let queued = to.try_send(event);
        if let Err(lost) = &queued {
            tracing::debug!(%lost, "a Kubernetes Event is lost: too many wait to be written");
        }
        queued.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(events: &NodeEvents) -> Vec<String> {
        events.recent().into_iter().map(|recent| recent.event.note).collect()
    }

    #[test]
    fn the_last_events_are_remembered_also_if_nobody_sends_them() {
        let (events, mut received) = NodeEvents::channel();
        received.close();
        for number in 0..=REMEMBERED {
            events.normal("Counting", number.to_string());
        }
        let notes = notes(&events);
        assert_eq!(notes.len(), REMEMBERED);
        assert_eq!((notes[0].as_str(), notes[REMEMBERED - 1].as_str()), ("100", "1"));
    }

    #[test]
    fn an_event_that_happens_again_is_remembered_once() {
        let events = NodeEvents::default();
        let [one, two, three] = [1, 2, 3].map(|second| Timestamp::from_second(second).expect("in range"));
        let event = |note: &str| NodeEvent {
            service: None,
            is_warning: true,
            reason: "Broke",
            action: START,
            note: note.to_owned(),
        };
        events.remember(&event("a"), one);
        events.remember(&event("b"), two);
        events.remember(&event("a"), three);
        let recent = events.recent();
        assert_eq!(notes(&events), ["a", "b"]);
        assert_eq!((recent[0].first, recent[0].last), (one, three));
    }
}
