//! Destroys connected UDP sockets whose endpoint no longer serves, in a thread of its own.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::Path,
    sync::mpsc::{self, Receiver, SyncSender},
    thread,
    time::Duration,
};

use aya::maps::{HashMap as BpfHashMap, MapData, MapError};
use proxy_common::layout::{List, MemberKey, UdpSocket};

use super::maps::open_pinned;
use crate::kernel::{
    KernelError,
    netns::{self, NetnsCookie},
    sock_diag::{self, SocketCookie},
    spawn,
};

/// The time until the second pass. A program that chose an endpoint just before the endpoint was
/// removed may record its socket just after the first pass.
const SECOND_PASS_AFTER: Duration = Duration::from_millis(50);

/// A thread that destroys sockets. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct SocketReleaser {
    wake: SyncSender<()>,
}

impl SocketReleaser {
    /// Starts the thread, with the maps that are pinned in `directory`.
    pub(super) fn start(directory: &Path) -> Result<Self, KernelError> {
        let mut sockets = Sockets::open(directory)?;
        let (wake, woken) = mpsc::sync_channel(1);
        spawn("udp-sockets", move || run(&mut sockets, &woken))?;
        Ok(Self { wake })
    }

    /// Starts a pass soon. It also destroys sockets of endpoints that were removed before this
    /// process started.
    pub(super) fn wake(&self) {
        // If the channel is full, a pass is due already. The thread lives as long as this.
        let _ = self.wake.try_send(());
    }
}

fn run(sockets: &mut Sockets, woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        sockets.release();
        thread::sleep(SECOND_PASS_AFTER);
        sockets.release();
    }
}

/// Sockets by cookie, each with the peer that it must still have.
type Peers = HashMap<SocketCookie, SocketAddr>;

struct Sockets {
    connected: BpfHashMap<MapData, u64, UdpSocket>,
    members: BpfHashMap<MapData, MemberKey, u8>,
    /// An error was logged at level warn.
    warned: bool,
}

impl Sockets {
    fn open(directory: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            connected: open_pinned(directory, "udp_sockets")?,
            members: open_pinned(directory, "members")?,
            warned: false,
        })
    }

    fn release(&mut self) {
        let stale = self.stale_sockets();
        if stale.is_empty() {
            return;
        }
        for (path, namespace) in netns::handles() {
            let destroyed = netns::within(&path, &namespace, || {
                sock_diag::destroy_udp(&peers_in(netns::current_cookie()?, &stale))
            });
            match destroyed {
                Ok(destroyed) => self.forget(&destroyed, &path),
                Err(error) if self.warned => tracing::debug!(%error, "cannot destroy UDP sockets"),
                Err(error) => {
                    self.warned = true;
                    tracing::warn!(%error, "cannot destroy UDP sockets whose endpoint is gone: they stay until they are closed");
                }
            }
        }
    }

    /// Returns the sockets whose endpoint no longer serves, by network namespace.
    fn stale_sockets(&self) -> HashMap<NetnsCookie, Peers> {
        let mut stale: HashMap<NetnsCookie, Peers> = HashMap::new();
        for (cookie, socket) in self.connected.iter().flatten() {
            let UdpSocket { netns, service, endpoint } = socket;
            let member = MemberKey { service, list: List::Serving.number(), endpoint };
            if matches!(self.members.get(&member, 0), Err(MapError::KeyNotFound)) {
                let peer = SocketAddr::from(endpoint);
                stale.entry(NetnsCookie(netns)).or_default().insert(SocketCookie(cookie), peer);
            }
        }
        stale
    }

    fn forget(&mut self, destroyed: &[SocketCookie], namespace: &Path) {
        for cookie in destroyed {
            // The entry may be gone: closing the socket removes it too.
            let _ = self.connected.remove(&cookie.0);
        }
        if !destroyed.is_empty() {
            let (count, namespace) = (destroyed.len(), namespace.display());
            tracing::debug!(count, %namespace, "destroyed UDP sockets whose endpoint is gone");
        }
    }
}

/// Returns the sockets that may be in a namespace. If the kernel does not tell which namespace it
/// is, these are all sockets: no two sockets have the same cookie.
fn peers_in(namespace: Option<NetnsCookie>, stale: &HashMap<NetnsCookie, Peers>) -> Peers {
    match namespace {
        Some(cookie) => stale.get(&cookie).cloned().unwrap_or_default(),
        None => stale.values().flatten().map(|(cookie, peer)| (*cookie, *peer)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_without_a_cookie_is_searched_for_all_sockets() {
        let peer = SocketAddr::from(([10, 244, 1, 2], 53));
        let stale = HashMap::from([
            (NetnsCookie(1), Peers::from([(SocketCookie(10), peer)])),
            (NetnsCookie(2), Peers::from([(SocketCookie(20), peer)])),
        ]);
        assert_eq!(peers_in(Some(NetnsCookie(2)), &stale), stale[&NetnsCookie(2)]);
        assert_eq!(peers_in(Some(NetnsCookie(3)), &stale), Peers::new());
        assert_eq!(peers_in(None, &stale).len(), 2);
    }
}
