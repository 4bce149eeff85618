//! Destroys connected UDP sockets whose endpoint is gone, away from the thread that programs Services.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::Duration,
};

use aya::maps::{HashMap as BpfHashMap, Map, MapData};
use proxy_common::layout::{Endpoint, UdpSocket};

use crate::kernel::{
    KernelError,
    netns::{self, NetnsCookie},
    sock_diag::{self, SocketCookie},
};

/// A hook that read the old endpoint list a moment before it changed may note its socket a moment after the first search.
const SECOND_LOOK: Duration = Duration::from_millis(50);

/// An endpoint of a Service that no longer serves.
type Departure = (u32, Endpoint);

/// A thread that destroys sockets. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct SocketReleaser {
    departures: Sender<Vec<Departure>>,
}

impl SocketReleaser {
    /// Starts the thread, with the map of connected UDP sockets that is pinned in `directory`.
    pub(super) fn start(directory: &Path) -> Result<Self, KernelError> {
        let failed = |e| KernelError::bpf("open map", "udp_sockets")(e);
        let data = MapData::from_pin(directory.join("udp_sockets")).map_err(failed)?;
        let sockets = Map::from_map_data(data).and_then(BpfHashMap::try_from).map_err(failed)?;
        let (departures, received) = mpsc::channel();
        thread::Builder::new()
            .name("udp-sockets".into())
            .spawn(move || run(sockets, &received))
            .map_err(KernelError::call("start", "thread udp-sockets"))?;
        Ok(Self { departures })
    }

    /// Destroys the sockets connected to these endpoints of a Service, soon.
    pub(super) fn release(&self, service: u32, endpoints: Vec<Endpoint>) {
        let departures = endpoints.into_iter().map(|endpoint| (service, endpoint)).collect();
        // The thread lives as long as this does.
        let _ = self.departures.send(departures);
    }
}

type Sockets = BpfHashMap<MapData, u64, UdpSocket>;

fn run(mut sockets: Sockets, received: &Receiver<Vec<Departure>>) {
    while let Ok(first) = received.recv() {
        let departures: HashSet<Departure> = first.into_iter().chain(received.try_iter().flatten()).collect();
        release(&mut sockets, &departures);
        thread::sleep(SECOND_LOOK);
        release(&mut sockets, &departures);
    }
}

fn release(sockets: &mut Sockets, departures: &HashSet<Departure>) {
    let mut by_namespace: HashMap<NetnsCookie, HashSet<SocketCookie>> = HashMap::new();
    for (cookie, socket) in sockets.iter().flatten() {
        if departures.contains(&(socket.service, socket.endpoint)) {
            by_namespace.entry(NetnsCookie(socket.netns)).or_default().insert(SocketCookie(cookie));
        }
    }
    if by_namespace.is_empty() {
        return;
    }
    for (path, namespace) in netns::handles() {
        let destroyed = netns::within(&path, &namespace, || destroy(&by_namespace));
        match destroyed {
            Ok(destroyed) => {
                for cookie in &destroyed {
                    // Closing the socket removes it too.
                    let _ = sockets.remove(&cookie.0);
                }
                if !destroyed.is_empty() {
                    let (count, namespace) = (destroyed.len(), path.display());
                    tracing::debug!(count, %namespace, "destroyed UDP sockets whose endpoint is gone");
                }
            }
            Err(error) => tracing::debug!(%error, "cannot destroy UDP sockets"),
        }
    }
}

/// Destroys those of the sockets that are in the calling thread's namespace. Where the kernel does not tell which that is, all
/// are looked for: socket cookies are unique over all namespaces.
fn destroy(sockets: &HashMap<NetnsCookie, HashSet<SocketCookie>>) -> Result<Vec<SocketCookie>, KernelError> {
    match netns::current_cookie()? {
        Some(here) => sockets.get(&here).map_or(Ok(Vec::new()), sock_diag::destroy_udp),
        None => sock_diag::destroy_udp(&sockets.values().flatten().copied().collect()),
    }
}
