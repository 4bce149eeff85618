//! Bounds the connections of one listener. A new connection gets the place of the one that waited
//! longest.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// The places of one listener.
#[derive(Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    connections: BTreeMap<u64, Connection>,
    /// The last number that was given to a connection or to a sign of life.
    last: u64,
}

#[derive(Debug)]
struct Connection {
    /// A request is being answered.
    is_serving: bool,
    /// Grows with each sign of life.
    last_active: u64,
    evicted: CancellationToken,
}

impl Places {
    pub(super) fn new(number: usize) -> Arc<Self> {
        Arc::new(Self { free: Arc::new(Semaphore::new(number)), taken: Mutex::default() })
    }

    /// Takes a place for a new connection. If all are taken, closes another connection and waits
    /// until it is closed.
    pub(super) async fn take(self: &Arc<Self>) -> Place {
        let permit = if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            permit
        } else {
            self.evict_one();
            Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed")
        };
        let mut taken = self.taken();
        taken.last += 1;
        let (id, evicted) = (taken.last, CancellationToken::new());
        let connection = Connection { is_serving: false, last_active: id, evicted: evicted.clone() };
        taken.connections.insert(id, connection);
        drop(taken);
        Place { id, evicted, places: Arc::clone(self), _permit: permit }
    }

    /// Closes the connection that has waited longest for its client. If all have a request that is
    /// being answered, closes the one with the oldest request.
    pub(super) fn evict_one(&self) {
        let mut taken = self.taken();
        let by_age = |(_, connection): &(&u64, &Connection)| (connection.is_serving, connection.last_active);
        let oldest = taken.connections.iter().min_by_key(by_age).map(|(id, _)| *id);
        if let Some(connection) = oldest.and_then(|id| taken.connections.remove(&id)) {
            connection.evicted.cancel();
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a connection. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    id: u64,
    evicted: CancellationToken,
    places: Arc<Places>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// Notes that a request arrived or was answered.
    pub(super) fn set_serving(&self, is_serving: bool) {
        let mut taken = self.places.taken();
        taken.last += 1;
        let last_active = taken.last;
        if let Some(connection) = taken.connections.get_mut(&self.id) {
            connection.is_serving = is_serving;
            connection.last_active = last_active;
        }
    }

    /// Waits until the connection must close at once.
    pub(super) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().connections.remove(&self.id);
    }
}
