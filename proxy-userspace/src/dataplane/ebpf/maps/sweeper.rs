//! Removes expired flows, a part of the map at a time, in a thread of its own.
//!
//! The kernel evicts the least recently used flow when it needs room. Until then, a flow that ended
//! is in the way of another one between the same addresses and ports, and slows down readers of the
//! map. If a map is more than half full, it loses finished connections sooner. Then they do not
//! evict idle ones that continue.
//!
//! The same thread counts the entries of the maps, and finds the bits of the prefilter that they
//! need.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::{
    layout::{Flow, FlowKey, MapSizes},
    prefilter::PrefilterBit,
};

use super::{
    prefilter::PrefilterBits,
    usage::{MapUsage, SocketMapScanner},
};
use crate::kernel::{
    KernelError,
    bpf::{Object, Reader},
    clock, spawn,
};

/// The time between two sweeps.
const PAUSE: Duration = Duration::from_secs(10);
/// The maximal number of calls in a sweep, each of which reads some thousand entries. A full map of
/// the default size is read in a minute, and each sweep takes some milliseconds.
const READS: usize = 16;
/// How long a finished connection is kept in a map that is more than half full, in nanoseconds. Its
/// last segments may be retransmitted.
const FINISHED_NS: u64 = 10_000_000_000;
/// The minimal time between two scans of the other maps, in nanoseconds. A scan of the largest of
/// them, if it is full, takes some ten milliseconds.
const OTHERS_EVERY_NS: u64 = 30_000_000_000;

/// A thread that removes flows. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct FlowSweeper {
    _alive: SyncSender<()>,
    /// What the scans found in the maps that programs write. It may be some minutes old.
    pub(crate) usage: Arc<MapUsage>,
}

impl FlowSweeper {
    /// Starts the thread for maps of these sizes.
    pub(crate) fn start(object: &mut Object, sizes: &MapSizes) -> Result<Self, KernelError> {
        let usage = Arc::new(MapUsage::default());
        let mut flows = Flows {
            entries: object.reader("flows")?,
            map: object.take_map("flows")?,
            fill: Fill { seen: 0, capacity: sizes.flows, last: 0 },
            scan: Scan::new(SocketMapScanner::open(object, sizes)?, Arc::clone(&usage)),
        };
        let (alive, ended) = mpsc::sync_channel(1);
        spawn("flows", move || run(&mut flows, &ended))?;
        Ok(Self { _alive: alive, usage })
    }
}

fn run(flows: &mut Flows, ended: &Receiver<()>) {
    while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
        match flows.sweep() {
            Ok(0) => {}
            Ok(count) => tracing::debug!(count, "removed expired flows"),
            Err(error) => tracing::debug!(%error, "cannot remove expired flows"),
        }
    }
}

struct Flows {
    entries: Reader<FlowKey, Flow>,
    map: HashMap<MapData, FlowKey, Flow>,
    fill: Fill,
    scan: Scan,
}

/// A scan of all maps that programs write: first of the flows, as they are swept, then of the
/// others.
struct Scan {
    usage: Arc<MapUsage>,
    number: u64,
    needed: PrefilterBits,
    others: SocketMapScanner,
    /// When the others were scanned.
    others_at_ns: Option<u64>,
}

impl Scan {
    fn new(others: SocketMapScanner, usage: Arc<MapUsage>) -> Self {
        Self { usage, number: 0, needed: PrefilterBits::default(), others, others_at_ns: None }
    }

    fn begin(&mut self) {
        self.number = self.usage.begin();
        self.needed = PrefilterBits::default();
    }

    /// Scans the other maps after the flows. `flows` is the number of their entries.
    fn end(&mut self, flows: usize, now_ns: u64) -> Result<(), KernelError> {
        if self.others_at_ns.is_some_and(|last| now_ns.saturating_sub(last) < OTHERS_EVERY_NS) {
            return Ok(());
        }
        self.others_at_ns = Some(now_ns);
        let mut entries = self.others.scan(&mut self.needed)?;
        entries.push(("flows", flows));
        self.usage.end(self.number, std::mem::take(&mut self.needed), entries);
        Ok(())
    }
}

/// How full the map is.
struct Fill {
    /// Entries since the beginning of the map.
    seen: usize,
    capacity: u32,
    /// Entries of the whole map, at the last time.
    last: usize,
}

impl Fill {
    fn is_over_half(&self) -> bool {
        self.seen.max(self.last) > self.capacity as usize / 2
    }

    fn end(&mut self) {
        self.last = std::mem::take(&mut self.seen);
    }
}

/// Returns true if an entry can be removed.
fn is_expired(key: &FlowKey, flow: &Flow, now_ns: u64, is_over_half: bool) -> bool {
    key.protocol().is_none_or(|protocol| flow.is_expired(protocol, now_ns))
        || is_over_half && flow.is_finished() && now_ns.saturating_sub(flow.used_ns) > FINISHED_NS
}

impl Flows {
    /// Sweeps a part of the map. Returns how many entries were removed.
    fn sweep(&mut self) -> Result<usize, KernelError> {
        let now_ns = clock::nanos(clock::monotonic()?);
        let mut removed = 0;
        if self.entries.is_at_beginning() {
            self.scan.begin();
        }
        for _ in 0..READS {
            let entries = self.entries.read().map_err(KernelError::call("read", "map flows"))?;
            self.fill.seen += entries.len();
            let is_over_half = self.fill.is_over_half();
            for (key, flow) in entries {
                if is_expired(&key, &flow, now_ns, is_over_half) && self.remove(&key, now_ns, is_over_half) {
                    self.fill.seen -= 1;
                    removed += 1;
                } else {
                    for bit in PrefilterBit::of_flow(&key, &flow) {
                        self.scan.needed.insert(bit);
                    }
                }
            }
            if self.entries.is_at_beginning() {
                self.fill.end();
                self.scan.end(self.fill.last, now_ns)?;
                break;
            }
        }
        Ok(removed)
    }

    /// Removes an entry unless its flow was used again since it was read. If that happens between
    /// this check and the removal, the entry of the other direction restores it.
    fn remove(&mut self, key: &FlowKey, now_ns: u64, is_over_half: bool) -> bool {
        let is_expired = self.map.get(key, 0).is_ok_and(|flow| is_expired(key, &flow, now_ns, is_over_half));
        is_expired && self.map.remove(key).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        Protocol,
        layout::{Direction, flow_state},
        packet::Tuple,
    };

    use super::*;

    const CLOSED: u32 = flow_state::REPLIED | flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED;

    /// Returns true if a connection in this state is removed after this time without packets.
    fn is_removed(state: u32, seconds: u64, is_over_half: bool) -> bool {
        let tuple = Tuple { source: Flow::NONE.source, destination: Flow::NONE.destination };
        let key = FlowKey::new(Direction::Original, Protocol::Tcp, tuple);
        let flow = Flow { state, used_ns: 1, ..Flow::NONE };
        is_expired(&key, &flow, 1 + seconds * 1_000_000_000, is_over_half)
    }

    #[test]
    fn map_over_half_full_loses_finished_connections_sooner() {
        assert!(is_removed(CLOSED, 11, true));
        assert!(!is_removed(CLOSED, 9, true), "its last segments may be retransmitted");
        assert!(!is_removed(CLOSED, 11, false));
        assert!(is_removed(CLOSED, 121, false));
        for open in [0, flow_state::REPLIED, flow_state::REPLIED | flow_state::CLIENT_CLOSED] {
            assert!(!is_removed(open, 11, true), "{open:#x}");
        }
    }

    #[test]
    fn fill_is_that_of_the_present_or_the_last_scan() {
        let mut fill = Fill { seen: 0, capacity: 10, last: 0 };
        assert!(!fill.is_over_half());
        fill.seen = 6;
        assert!(fill.is_over_half());
        fill.end();
        assert!(fill.is_over_half());
        fill.seen = 3;
        fill.end();
        assert!(!fill.is_over_half());
    }
}
