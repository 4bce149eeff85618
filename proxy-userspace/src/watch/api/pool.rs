//! The open connections to the API server that can take requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    credentials::Identity,
    dial::{Connection, Sender, Target},
};

/// One connection with HTTP/2, or one with HTTP/1.1 for each request at a time.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Connection>>);

impl Pool {
    /// Returns a connection that can take a request. Breaks connections whose client certificate
    /// was replaced.
    pub(super) fn take(&self, identity: Option<&Arc<Identity>>) -> Option<Connection> {
        let mut open = self.open();
        open.retain(|connection| {
            let is_current = connection.identity.as_ref() == identity;
            if !is_current {
                connection.task.abort();
            }
            is_current && !connection.is_closed()
        });
        let ready = open.iter().position(Connection::is_ready)?;
        match open[ready].share() {
            Some(shared) => Some(shared),
            None => Some(open.swap_remove(ready)),
        }
    }

    /// Makes a new connection available to other requests too, if it carries several at once.
    pub(super) fn share(&self, connection: &Connection) {
        self.open().extend(connection.share());
    }

    /// Makes a connection with HTTP/1.1 available again, once its response was read.
    pub(super) fn give_back(&self, connection: Connection) {
        if matches!(connection.sender, Sender::Http1(_)) {
            self.open().push(connection);
        }
    }

    /// Keeps new requests away from the connections to `target`. Their responses go on, and each
    /// connection closes after its last one.
    pub(super) fn leave(&self, target: &Arc<Target>) {
        self.open().retain(|connection| !Arc::ptr_eq(&connection.target, target));
    }

    fn open(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
            task: self.task.clone(),
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
