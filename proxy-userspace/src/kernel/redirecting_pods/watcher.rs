//! The loop that watches all network namespaces. It blocks, and has a thread of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    os::fd::AsFd as _,
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use tokio::sync::watch;

use super::{
    NetnsInode, RedirectingPods,
    legacy::loaded_families,
    namespaces::{DIRECTORIES, Finder},
    watched::Watched,
};
use crate::kernel::{KernelError, clock, netlink::LARGEST_DATAGRAM};

/// How often namespaces are looked for, and legacy tables checked.
const PERIOD: Duration = Duration::from_millis(500);
/// The least time between two reactions to notifications. A pod that changes its rules all the time
/// costs no more than 20 listings a second.
const PAUSE: Duration = Duration::from_millis(50);

/// All network namespaces but that of this process.
#[derive(Debug)]
pub(super) struct Watcher {
    finder: Finder,
    /// `None` if the kernel's limit of instances is reached. Then namespaces are noticed later.
    names: Option<Inotify>,
    watched: BTreeMap<NetnsInode, Watched>,
    /// The namespaces whose last check failed.
    failing: BTreeSet<NetnsInode>,
    /// For receiving notifications.
    datagram: Vec<u8>,
}

/// What happened while the loop waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A namespace got a name or lost it.
    Name,
    /// Rules may have changed.
    Rules,
    /// Nothing, until the time was up.
    None,
}

impl Watcher {
    pub(super) fn new() -> Result<Self, KernelError> {
        let names = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC);
        let names = names.inspect_err(|error| {
            tracing::debug!(
                %error,
                "cannot watch the names of network namespaces: they are listed twice a second only"
            );
        });
        Ok(Self {
            finder: Finder::new()?,
            names: names.ok(),
            watched: BTreeMap::new(),
            failing: BTreeSet::new(),
            datagram: Vec::with_capacity(LARGEST_DATAGRAM),
        })
    }

    /// Sends the namespaces that redirect, after the first check and after every change, until
    /// `is_over` returns true.
    pub(super) fn run(
        &mut self,
        to: &watch::Sender<Option<RedirectingPods>>,
        is_over: impl Fn() -> bool,
    ) -> Result<(), KernelError> {
        while !is_over() {
            let end = clock::monotonic()? + PERIOD;
            self.check_all()?;
            self.send(to);
            while !is_over() {
                let rest = end.saturating_sub(clock::monotonic()?);
                let event = self.wait(rest)?;
                if event == Event::None {
                    break;
                }
                if event == Event::Rules {
                    self.check(|watched, datagram| {
                        watched.check_nftables(datagram)?;
                        watched.read_addresses()
                    });
                    self.send(to);
                }
                thread::sleep(PAUSE);
                if event == Event::Name {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Looks for namespaces and checks all of them.
    pub(super) fn check_all(&mut self) -> Result<(), KernelError> {
        self.watch_names();
        self.wait(Duration::ZERO)?;
        let found = self.finder.find();
        self.watched.retain(|inode, _| found.contains_key(inode));
        self.failing.retain(|inode| found.contains_key(inode));
        for (inode, path) in found {
            if let Some(watched) = self.watched.get_mut(&inode) {
                watched.path = path;
                continue;
            }
            match Watched::open(inode, &path) {
                Ok(watched) => self.watched.extend(watched.map(|watched| (inode, watched))),
                Err(KernelError::Call { source, operation, object })
                    if source.kind() == ErrorKind::PermissionDenied =>
                {
                    return Err(KernelError::Call { operation, object, source });
                }
                Err(error) => warn_once(&mut self.failing, inode, &error),
            }
        }
        let is_loaded = loaded_families();
        let succeeded = self.check(|watched, datagram| {
            watched.check_nftables(datagram)?;
            watched.check_legacy(is_loaded)?;
            watched.read_addresses()
        });
        self.failing.retain(|inode| !succeeded.contains(inode));
        Ok(())
    }

    /// Returns the pods that redirect, as they were at the last check.
    pub(super) fn redirecting(&self) -> RedirectingPods {
        let watched = || self.watched.iter();
        RedirectingPods {
            namespaces: watched().filter_map(|(inode, watched)| Some((*inode, watched.exempt()?))).collect(),
            addresses: watched().flat_map(|(_, watched)| watched.addresses()).copied().collect(),
        }
    }

    fn send(&mut self, to: &watch::Sender<Option<RedirectingPods>>) {
        for watched in self.watched.values_mut() {
            watched.find_host_name(&self.finder);
        }
        let redirecting = self.redirecting();
        to.send_if_modified(|current| {
            let differs = current.as_ref() != Some(&redirecting);
            if differs {
                *current = Some(redirecting);
            }
            differs
        });
    }

    /// Runs a check on each namespace. Returns those for which it succeeded.
    fn check(
        &mut self,
        check: impl Fn(&mut Watched, &mut Vec<u8>) -> Result<(), KernelError>,
    ) -> BTreeSet<NetnsInode> {
        let mut succeeded = BTreeSet::new();
        for (inode, watched) in &mut self.watched {
            match check(watched, &mut self.datagram) {
                Ok(()) => drop(succeeded.insert(*inode)),
                Err(error) => warn_once(&mut self.failing, *inode, &error),
            }
        }
        succeeded
    }

    /// Watches the directories of names that exist. To watch one again changes nothing.
    fn watch_names(&self) {
        let changes = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO;
        for directory in DIRECTORIES {
            // A directory that does not exist yet is tried again at the next check.
            let _ = self.names.as_ref().map(|names| names.add_watch(directory, changes));
        }
    }

    /// Waits for an event, up to this time. Notes which namespaces have notifications.
    fn wait(&mut self, limit: Duration) -> Result<Event, KernelError> {
        let names = self.names.as_ref().map(|names| names.as_fd());
        let rules = self.watched.values().map(Watched::notifications);
        let mut polled: Vec<_> =
            rules.chain(names).map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)).collect();
        match poll(&mut polled, PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO)) {
            Ok(0) | Err(Errno::EINTR) => return Ok(Event::None),
            Ok(_) => {}
            Err(error) => {
                return Err(KernelError::call("poll", "sockets in network namespaces")(error.into()));
            }
        }
        let is_ready: Vec<_> = polled.iter().map(|polled| polled.any() == Some(true)).collect();
        for (watched, is_ready) in self.watched.values_mut().zip(is_ready) {
            watched.is_notified |= is_ready;
        }
        // Read so that the descriptor is not readable any more. What changed does not matter.
        let is_name = self.names.as_ref().is_some_and(|names| names.read_events().is_ok());
        Ok(if is_name { Event::Name } else { Event::Rules })
    }
}

/// Logs the first of consecutive errors about a namespace.
fn warn_once(failing: &mut BTreeSet<NetnsInode>, NetnsInode(number): NetnsInode, error: &KernelError) {
    if failing.insert(NetnsInode(number)) {
        tracing::warn!(
            namespace = number,
            %error,
            "cannot check whether a network namespace redirects its own traffic: the last result stays, and \
             it is checked again twice a second"
        );
    }
}
