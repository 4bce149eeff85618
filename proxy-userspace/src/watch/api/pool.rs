//! The open connections to the API server that can take requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    breaker::Breaker,
    credentials::{Credential, Identity},
    dial::{Connection, Sender, Target},
};

/// One connection with HTTP/2, or one with HTTP/1.1 for each request at a time.
#[derive(Default)]
pub(super) struct Pool(Mutex<Connections>);

#[derive(Default)]
struct Connections {
    open: Vec<Connection>,
    /// All connections that carry responses, also those that take no more requests, with the client
    /// certificate of a credential plugin.
    live: Vec<(Option<Arc<Identity>>, Breaker)>,
    /// The number of the newest credential that was used.
    renewal: u64,
}

impl Pool {
    /// Returns a connection that can take a request. Breaks connections whose client certificate
    /// was replaced by that of `credential`.
    pub(super) fn take(&self, credential: &Credential) -> Option<Connection> {
        let mut connections = self.connections();
        connections.retire(credential);
        let open = &mut connections.open;
        let is_fit =
            |connection: &Connection| connection.identity == credential.identity && connection.is_ready();
        let ready = open.iter().position(is_fit)?;
        match open[ready].share() {
            Some(shared) => Some(shared),
            None => Some(open.swap_remove(ready)),
        }
    }

    /// Adds a new connection. If it is to be shared and carries several requests at once, it is
    /// available to others too.
    pub(super) fn add(&self, connection: &Connection, is_shared: bool) {
        let mut connections = self.connections();
        connections.live.push((connection.identity.clone(), connection.breaker.clone()));
        connections.open.extend(connection.share().filter(|_| is_shared));
    }

    /// Makes a connection with HTTP/1.1 available again, once its response was read.
    pub(super) fn give_back(&self, connection: Connection) {
        if matches!(connection.sender, Sender::Http1(_)) {
            self.connections().open.push(connection);
        }
    }

    /// Keeps new requests away from the connections to `target`. Their responses go on, and each
    /// connection closes after its last one.
    pub(super) fn leave(&self, target: &Arc<Target>) {
        self.connections().open.retain(|connection| !Arc::ptr_eq(&connection.target, target));
    }

    /// Keeps new requests away from one connection. Its responses go on.
    pub(super) fn leave_connection(&self, left: &Breaker) {
        self.connections().open.retain(|connection| !connection.breaker.is_same(left));
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connections {
    /// Removes connections that are closed, and breaks those with another client certificate,
    /// unless another request has used a newer credential.
    fn retire(&mut self, credential: &Credential) {
        self.live.retain(|(_, breaker)| !breaker.is_over());
        if credential.renewal >= self.renewal {
            self.renewal = credential.renewal;
            for (_, breaker) in self.live.iter().filter(|(identity, _)| *identity != credential.identity) {
                breaker.break_now();
            }
        }
        self.open.retain(|connection| !connection.breaker.has_broken() && !connection.is_closed());
    }
}

impl Connection {
    /// Returns another sender for the same connection, if it carries several requests at once.
    fn share(&self) -> Option<Self> {
        let Sender::Http2(sender) = &self.sender else { return None };
        Some(Self {
            sender: Sender::Http2(sender.clone()),
            target: Arc::clone(&self.target),
            identity: self.identity.clone(),
            breaker: self.breaker.clone(),
        })
    }

    fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::Http2(sender) => sender.is_closed(),
            Sender::Http1(sender) => sender.is_closed(),
        }
    }

    fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http2(sender) => sender.is_ready(),
            Sender::Http1(sender) => sender.is_ready(),
        }
    }
}
