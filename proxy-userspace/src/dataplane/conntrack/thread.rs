//! A thread that looks for stale flows, fed with what changed; it has a Snapshot of its own, of UDP alone.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use super::{Looks, Owed, StaleUdpDeletion, concerns_udp, plan};
use crate::{
    kernel::KernelError,
    model::{Dirty, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

/// A look at a table of ordinary size has ended by then: flows and rules change together, as long as that holds up nobody.
const SHORT: Duration = Duration::from_millis(250);

/// What the thread is to know and look for.
#[derive(Debug, Default)]
struct Change {
    suspects: Vec<SocketAddr>,
    distrust: bool,
    dirty: Dirty,
    /// All UDP service ports there are.
    all: Option<BTreeMap<ServicePortKey, Arc<ResolvedPort>>>,
    /// Those that changed; without a port they are gone.
    ports: Vec<(ServicePortKey, Option<Arc<ResolvedPort>>)>,
    node: Option<NodeView>,
}

type Ended = Result<Vec<StaleUdpDeletion>, KernelError>;

/// The thread; it begins with the first change of UDP, and ends when this is dropped, after the look it is at.
#[derive(Debug)]
pub(super) struct LookThread {
    /// Until it begins.
    looks: Option<Looks>,
    running: Option<(Sender<Change>, Receiver<Ended>)>,
    suspects: Vec<SocketAddr>,
    distrust: bool,
}

impl LookThread {
    pub(super) fn new(looks: Looks) -> Self {
        Self { looks: Some(looks), running: None, suspects: Vec::new(), distrust: false }
    }

    pub(super) fn recheck_all(&mut self) {
        self.distrust = true;
    }

    pub(super) fn add_former_destination(&mut self, destination: SocketAddr) {
        self.suspects.push(destination);
    }

    /// Hands a change over, and returns what came of it, if that is known in a moment, and of those before.
    pub(super) fn delete_stale(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Ended {
        if let Some(looks) = self.looks.take() {
            self.running = Some(start(looks)?);
        }
        let owes = self.distrust || !self.suspects.is_empty() || concerns_udp(dirty);
        let change = owes.then(|| self.change(snapshot, dirty));
        let Some((to, from)) = &self.running else { return Ok(Vec::new()) };
        // What ended since the last time is no answer to this change.
        let earlier: Vec<Ended> = from.try_iter().collect();
        let mut soon = None;
        if let Some(change) = change {
            // The thread lives as long as this does.
            let _ = to.send(change);
            soon = from.recv_timeout(SHORT).ok();
        }
        earlier.into_iter().chain(soon).try_fold(Vec::new(), |mut all, ended| {
            all.extend(ended?);
            Ok(all)
        })
    }

    fn change(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Change {
        let mut owed = Owed::default();
        owed.add(dirty);
        let is_udp = |(key, _): &(&ServicePortKey, &Arc<ResolvedPort>)| plan::is_udp(key);
        let all = || {
            let ports = snapshot.ports.iter().filter(is_udp);
            ports.map(|(key, port)| (key.clone(), Arc::clone(port))).collect()
        };
        let changed = owed.dirty.ports.iter().map(|key| (key.clone(), snapshot.ports.get(key).cloned()));
        Change {
            suspects: std::mem::take(&mut self.suspects),
            distrust: std::mem::take(&mut self.distrust),
            all: dirty.all.then(all),
            ports: changed.collect(),
            node: (dirty.all || dirty.node).then(|| snapshot.node.clone()),
            dirty: owed.dirty,
        }
    }
}

fn start(mut looks: Looks) -> Result<(Sender<Change>, Receiver<Ended>), KernelError> {
    let (to, changes) = mpsc::channel::<Change>();
    let (ended, from) = mpsc::channel();
    let run = move || {
        let mut snapshot = Snapshot::default();
        while let Ok(first) = changes.recv() {
            // What has gathered during the last look is one more, and not many.
            let mut dirty = Dirty::default();
            for change in std::iter::once(first).chain(changes.try_iter()) {
                take(change, &mut snapshot, &mut dirty, &mut looks);
            }
            if ended.send(looks.delete_stale(&snapshot, &dirty)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("stale-udp".into())
        .spawn(run)
        .map_err(KernelError::call("start", "thread stale-udp"))?;
    Ok((to, from))
}

fn take(change: Change, snapshot: &mut Snapshot, dirty: &mut Dirty, looks: &mut Looks) {
    change.suspects.into_iter().for_each(|destination| looks.add_former_destination(destination));
    if change.distrust {
        looks.recheck_all();
    }
    if let Some(all) = change.all {
        snapshot.ports = all;
    }
    for (key, port) in change.ports {
        match port {
            Some(port) => drop(snapshot.ports.insert(key, port)),
            None => drop(snapshot.ports.remove(&key)),
        }
    }
    if let Some(node) = change.node {
        snapshot.node = node;
    }
    dirty.all |= change.dirty.all;
    dirty.node |= change.dirty.node;
    dirty.ports.extend(change.dirty.ports);
}
