//! Destroys connected UDP sockets whose endpoint no longer serves, away from the thread that programs Services.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::Path,
    sync::mpsc::{self, Receiver, SyncSender},
    thread,
    time::Duration,
};

use aya::maps::{HashMap as BpfHashMap, Map, MapData, MapError};
use proxy_common::layout::{List, MemberKey, UdpSocket};

use crate::kernel::{
    KernelError,
    netns::{self, NetnsCookie},
    sock_diag::{self, SocketCookie},
};

/// A hook that chose an endpoint a moment before that left may note its socket a moment after the first look.
const SECOND_LOOK: Duration = Duration::from_millis(50);

/// A thread that destroys sockets. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct SocketReleaser {
    wake: SyncSender<()>,
}

impl SocketReleaser {
    /// Starts the thread, with the maps that are pinned in `directory`.
    pub(super) fn start(directory: &Path) -> Result<Self, KernelError> {
        let mut sockets = Sockets::open(directory)?;
        let (wake, woken) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("udp-sockets".into())
            .spawn(move || run(&mut sockets, &woken))
            .map_err(KernelError::call("start", "thread udp-sockets"))?;
        Ok(Self { wake })
    }

    /// Soon destroys the sockets that are connected to what no longer serves: also those of endpoints that left when an
    /// earlier process had no time for it.
    pub(super) fn look(&self) {
        // Full means that a look is due already; the thread lives as long as this does.
        let _ = self.wake.try_send(());
    }
}

fn run(sockets: &mut Sockets, woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        sockets.release();
        thread::sleep(SECOND_LOOK);
        sockets.release();
    }
}

/// Sockets by their cookies, each with the peer it must still have.
type Peers = HashMap<SocketCookie, SocketAddr>;

struct Sockets {
    connected: BpfHashMap<MapData, u64, UdpSocket>,
    members: BpfHashMap<MapData, MemberKey, u8>,
    /// The kernel's refusal was reported.
    warned: bool,
}

impl Sockets {
    fn open(directory: &Path) -> Result<Self, KernelError> {
        let map = |name| {
            MapData::from_pin(directory.join(name))
                .and_then(Map::from_map_data)
                .map_err(KernelError::bpf("open map", name))
        };
        let failed = |name| KernelError::bpf::<MapError>("open map", name);
        Ok(Self {
            connected: map("udp_sockets")?.try_into().map_err(failed("udp_sockets"))?,
            members: map("members")?.try_into().map_err(failed("members"))?,
            warned: false,
        })
    }

    fn release(&mut self) {
        let departed = self.departed();
        if departed.is_empty() {
            return;
        }
        for (path, namespace) in netns::handles() {
            let destroyed = netns::within(&path, &namespace, || {
                sock_diag::destroy_udp(&peers_in(netns::current_cookie()?, &departed))
            });
            match destroyed {
                Ok(destroyed) => self.forget(&destroyed, &path),
                Err(error) if self.warned => tracing::debug!(%error, "cannot destroy UDP sockets"),
                Err(error) => {
                    self.warned = true;
                    tracing::warn!(%error, "cannot destroy UDP sockets whose endpoint is gone; they stay until closed");
                }
            }
        }
    }

    /// The sockets whose endpoint serves no longer, by network namespace.
    fn departed(&self) -> HashMap<NetnsCookie, Peers> {
        let mut departed: HashMap<NetnsCookie, Peers> = HashMap::new();
        for (cookie, socket) in self.connected.iter().flatten() {
            let UdpSocket { netns, service, endpoint } = socket;
            let member = MemberKey { service, list: List::Serving.number(), endpoint };
            if matches!(self.members.get(&member, 0), Err(MapError::KeyNotFound)) {
                let peer = SocketAddr::new(endpoint.addr.into(), endpoint.port);
                departed.entry(NetnsCookie(netns)).or_default().insert(SocketCookie(cookie), peer);
            }
        }
        departed
    }

    fn forget(&mut self, destroyed: &[SocketCookie], namespace: &Path) {
        for cookie in destroyed {
            // Closing the socket removes it too.
            let _ = self.connected.remove(&cookie.0);
        }
        if !destroyed.is_empty() {
            let (count, namespace) = (destroyed.len(), namespace.display());
            tracing::debug!(count, %namespace, "destroyed UDP sockets whose endpoint is gone");
        }
    }
}

/// The sockets to look for in a namespace: all of them where the kernel does not tell which one it is, since no two sockets
/// have the same cookie.
fn peers_in(namespace: Option<NetnsCookie>, departed: &HashMap<NetnsCookie, Peers>) -> Peers {
    match namespace {
        Some(cookie) => departed.get(&cookie).cloned().unwrap_or_default(),
        None => departed.values().flatten().map(|(cookie, peer)| (*cookie, *peer)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_asked_for_its_own_sockets_and_for_all_where_it_has_no_name() {
        let peer = SocketAddr::from(([10, 244, 1, 2], 53));
        let departed = HashMap::from([
            (NetnsCookie(1), Peers::from([(SocketCookie(10), peer)])),
            (NetnsCookie(2), Peers::from([(SocketCookie(20), peer)])),
        ]);
        assert_eq!(peers_in(Some(NetnsCookie(2)), &departed), departed[&NetnsCookie(2)]);
        assert_eq!(peers_in(Some(NetnsCookie(3)), &departed), Peers::new());
        assert_eq!(peers_in(None, &departed).len(), 2);
    }
}
