//! A thread that deletes stale UDP entries. It has a Snapshot of its own with only UDP service
//! ports.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

use super::{Cleaner, PendingCheck, ServedTcp, StaleUdpDeletion, candidates::is_udp, concerns_udp};
use crate::{
    kernel::{KernelError, spawn},
    model::{Dirty, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

/// How long a caller waits for the result. A walk over a table of usual size is shorter, so that
/// entries and rules change together.
const MAX_WAIT: Duration = Duration::from_millis(250);

/// The changes for the thread.
#[derive(Debug, Default)]
struct Update {
    former_destinations: Vec<SocketAddr>,
    recheck: Option<ServedTcp>,
    dirty: Dirty,
    /// All UDP service ports.
    all: Option<BTreeMap<ServicePortKey, Arc<ResolvedPort>>>,
    /// The changed service ports. `None` for deleted ones.
    ports: Vec<(ServicePortKey, Option<Arc<ResolvedPort>>)>,
    node: Option<NodeView>,
}

type CleanerResult = Result<Vec<StaleUdpDeletion>, KernelError>;

/// The caller's side. The thread starts with the first call of [`Self::delete_stale`]. When this
/// value is dropped, the thread ends after the current walk.
#[derive(Debug)]
pub(super) struct CleanerThread {
    /// `None` after the thread started.
    cleaner: Option<Cleaner>,
    channels: Option<(Sender<Update>, Receiver<CleanerResult>)>,
    pub(super) former_destinations: Vec<SocketAddr>,
    /// All entries are to be checked, also attempts to connect to these destinations.
    pub(super) recheck: Option<ServedTcp>,
}

impl CleanerThread {
    pub(super) fn new(cleaner: Cleaner) -> Self {
        Self { cleaner: Some(cleaner), channels: None, former_destinations: Vec::new(), recheck: None }
    }

    /// Passes the changes on. Returns the results of earlier calls, and of this one if it ends
    /// soon.
    pub(super) fn delete_stale(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> CleanerResult {
        if let Some(cleaner) = self.cleaner.take() {
            self.channels = Some(start(cleaner)?);
        }
        let has_update =
            self.recheck.is_some() || !self.former_destinations.is_empty() || concerns_udp(dirty);
        let update = has_update.then(|| self.update(snapshot, dirty));
        let Some((updates, results)) = &self.channels else { return Ok(Vec::new()) };
        // The results of earlier calls must not be taken for the result of this one.
        let earlier: Vec<CleanerResult> = results.try_iter().collect();
        let mut current = None;
        if let Some(update) = update {
            // The thread lives as long as this value.
            let _ = updates.send(update);
            current = results.recv_timeout(MAX_WAIT).ok();
        }
        let lists: Vec<_> = earlier.into_iter().chain(current).collect::<Result<_, _>>()?;
        Ok(lists.concat())
    }

    fn update(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Update {
        let mut pending = PendingCheck::default();
        pending.add(dirty);
        let all = || {
            let ports = snapshot.ports.iter().filter(|(key, _)| is_udp(key));
            ports.map(|(key, port)| (key.clone(), Arc::clone(port))).collect()
        };
        let changed = pending.dirty.ports.iter().map(|key| (key.clone(), snapshot.ports.get(key).cloned()));
        Update {
            former_destinations: std::mem::take(&mut self.former_destinations),
            recheck: self.recheck.take(),
            all: dirty.all.then(all),
            ports: changed.collect(),
            node: (dirty.all || dirty.node).then(|| snapshot.node.clone()),
            dirty: pending.dirty,
        }
    }
}

fn start(mut cleaner: Cleaner) -> Result<(Sender<Update>, Receiver<CleanerResult>), KernelError> {
    let (update_sender, updates) = mpsc::channel::<Update>();
    let (result_sender, results) = mpsc::channel();
    let run = move || {
        let mut snapshot = Snapshot::default();
        while let Ok(first) = updates.recv() {
            // All updates that arrived during the last walk need only one walk.
            let mut dirty = Dirty::default();
            for update in std::iter::once(first).chain(updates.try_iter()) {
                update.apply(&mut snapshot, &mut dirty, &mut cleaner);
            }
            if result_sender.send(cleaner.delete_stale(&snapshot, &dirty)).is_err() {
                return;
            }
        }
    };
    spawn("stale-udp", run)?;
    Ok((update_sender, results))
}

impl Update {
    fn apply(self, snapshot: &mut Snapshot, dirty: &mut Dirty, cleaner: &mut Cleaner) {
        for destination in self.former_destinations {
            cleaner.add_former_destination(destination);
        }
        if let Some(served) = self.recheck {
            cleaner.recheck_all(served);
        }
        if let Some(all) = self.all {
            snapshot.ports = all;
        }
        for (key, port) in self.ports {
            match port {
                Some(port) => drop(snapshot.ports.insert(key, port)),
                None => drop(snapshot.ports.remove(&key)),
            }
        }
        if let Some(node) = self.node {
            snapshot.node = node;
        }
        dirty.all |= self.dirty.all;
        dirty.node |= self.dirty.node;
        dirty.ports.extend(self.dirty.ports);
    }
}
