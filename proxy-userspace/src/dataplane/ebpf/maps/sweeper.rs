//! Removes expired flows, a part of the maps at a time, in a thread of its own.
//!
//! The kernel evicts the least recently used flow when it needs room. Until then, a flow that ended
//! is in the way of another one between the same addresses and ports, and slows down readers of the
//! map. If the map of assured flows fills up, it loses finished connections sooner, as fast as they
//! finish. Then they do not evict idle ones that continue.
//!
//! The same thread counts the entries of the maps, and finds the bits of the prefilter that they
//! need.

use std::{
    path::Path,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::Duration,
};

use aya::maps::{HashMap, MapData, PerCpuArray};
use proxy_common::{
    layout::{Counter, Flow, FlowKey, MapSizes},
    prefilter::{PrefilterItem, PrefilterTable, sized::words_in_use},
};

use super::{
    fill::Fill,
    open_pinned,
    prefilter::PrefilterBits,
    usage::{MapUsage, SocketMapScanner},
};
use crate::kernel::{
    KernelError,
    bpf::{MappedWords, Object, Reader},
    clock, spawn,
};

/// The time between two looks at the number of new flows.
const PAUSE: Duration = Duration::from_millis(500);
/// Every so many looks, a part of the maps is swept.
const LOOKS_PER_SWEEP: u32 = 20;
/// The number of sweeps that read maps of any size, which take a minute.
const SWEEPS_PER_SCAN: usize = 6;
/// The minimal number of calls in a sweep, each of which reads some thousand entries. Maps of the
/// default sizes are read in a minute, and each sweep takes some milliseconds.
const MIN_READS: usize = 16;
/// The limit of reads for a map is about this many times the number of reads that it needs.
const READS_PER_NEEDED: usize = 4;
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
    /// Starts the thread for maps of these sizes that are pinned in a directory.
    pub(crate) fn start(object: &Object, sizes: &MapSizes, directory: &Path) -> Result<Self, KernelError> {
        let usage = Arc::new(MapUsage::default());
        let mut flows = Flows::open(object, sizes, directory, Arc::clone(&usage))?;
        let (alive, ended) = mpsc::sync_channel(1);
        spawn("flows", move || run(&mut flows, &ended))?;
        Ok(Self { _alive: alive, usage })
    }
}

fn run(flows: &mut Flows, ended: &Receiver<()>) {
    let mut looks = 0;
    while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
        looks += 1;
        let begun = flows.begun();
        let removed = if flows.fill.needs_sweep(begun) {
            flows.sweep_assured(begun)
        } else if looks >= LOOKS_PER_SWEEP {
            looks = 0;
            flows.sweep(begun)
        } else {
            continue;
        };
        match removed {
            Ok(0) => {}
            Ok(count) => tracing::debug!(count, "removed expired flows"),
            Err(error) => tracing::debug!(%error, "cannot remove expired flows"),
        }
    }
}

/// A map of flows.
struct FlowMap {
    name: &'static str,
    entries: Reader<FlowKey, Flow>,
    map: HashMap<MapData, FlowKey, Flow>,
    /// Entries since the beginning of the map.
    seen: usize,
}

/// Which entries are removed.
#[derive(Clone, Copy)]
struct Expiry {
    now_ns: u64,
    /// How long a finished connection is kept, if it is removed before it expires.
    keeps_finished: Option<Duration>,
}

impl Expiry {
    fn is_expired(&self, key: &FlowKey, flow: &Flow) -> bool {
        let silence = Duration::from_nanos(self.now_ns.saturating_sub(flow.used_ns));
        key.protocol().is_none_or(|protocol| flow.is_expired(protocol, self.now_ns))
            || flow.is_finished() && self.keeps_finished.is_some_and(|kept| silence > kept)
    }
}

impl FlowMap {
    fn open(object: &Object, directory: &Path, name: &'static str) -> Result<Self, KernelError> {
        Ok(Self { name, entries: object.reader(name)?, map: open_pinned(directory, name)?, seen: 0 })
    }

    /// Reads the next entries and removes those that expired. Returns how many were removed, and
    /// passes on the others.
    fn sweep(&mut self, expiry: Expiry, mut keep: impl FnMut(&FlowKey, &Flow)) -> Result<usize, KernelError> {
        let entries = self.entries.read().map_err(KernelError::call("read map", self.name))?;
        let mut removed = 0;
        for (key, flow) in &entries {
            if expiry.is_expired(key, flow) && self.remove(key, expiry) {
                removed += 1;
            } else {
                keep(key, flow);
            }
        }
        self.seen += entries.len() - removed;
        Ok(removed)
    }

    /// Makes the next sweep start at the beginning.
    const fn rewind(&mut self) {
        self.entries.rewind();
        self.seen = 0;
    }

    /// Removes an entry unless its flow was used again since it was read. If that happens between
    /// this check and the removal, the entry of the other direction restores it.
    fn remove(&mut self, key: &FlowKey, expiry: Expiry) -> bool {
        let is_expired = self.map.get(key, 0).is_ok_and(|flow| expiry.is_expired(key, &flow));
        is_expired && self.map.remove(key).is_ok()
    }
}

/// Both maps of flows.
struct Flows {
    assured: FlowMap,
    unassured: FlowMap,
    /// The scan has read the unassured flows.
    is_at_assured: bool,
    reads_per_sweep: usize,
    /// Another reader of the assured flows, for sweeps of the whole map.
    whole: FlowMap,
    max_reads: usize,
    fill: Fill,
    counters: PerCpuArray<MapData, u64>,
    scan: Scan,
}

/// A scan of all maps that programs write: first of the flows, as they are swept, then of the
/// others.
struct Scan {
    usage: Arc<MapUsage>,
    /// To read the size.
    prefilter: MappedWords,
    number: u64,
    needed: PrefilterBits,
    others: SocketMapScanner,
    /// When the others were scanned.
    others_at_ns: Option<u64>,
}

impl Scan {
    fn new(others: SocketMapScanner, prefilter: MappedWords, usage: Arc<MapUsage>) -> Self {
        Self { usage, prefilter, number: 0, needed: PrefilterBits::new(1), others, others_at_ns: None }
    }

    fn begin(&mut self) {
        self.number = self.usage.begin();
        self.needed = PrefilterBits::new(words_in_use(&self.prefilter));
    }

    /// Scans the other maps after the flows.
    fn end(&mut self, flows: [(&'static str, usize); 2], now_ns: u64) -> Result<(), KernelError> {
        if self.others_at_ns.is_some_and(|last| now_ns.saturating_sub(last) < OTHERS_EVERY_NS) {
            return Ok(());
        }
        self.others_at_ns = Some(now_ns);
        let mut entries = self.others.scan(&mut self.needed)?;
        entries.extend(flows);
        self.usage.end(
            self.number,
            std::mem::replace(&mut self.needed, PrefilterBits::new(1)).shrunk(),
            entries,
        );
        Ok(())
    }
}

impl Flows {
    fn open(
        object: &Object,
        sizes: &MapSizes,
        directory: &Path,
        usage: Arc<MapUsage>,
    ) -> Result<Self, KernelError> {
        let open = |name| FlowMap::open(object, directory, name);
        let max_reads = Reader::<FlowKey, Flow>::max_calls;
        let reads = max_reads(sizes.flows) + max_reads(sizes.unassured_flows);
        Ok(Self {
            assured: open("flows")?,
            unassured: open("unassured_flows")?,
            is_at_assured: false,
            reads_per_sweep: reads.div_ceil(READS_PER_NEEDED * SWEEPS_PER_SCAN).max(MIN_READS),
            whole: open("flows")?,
            max_reads: max_reads(sizes.flows),
            fill: Fill::new(sizes.flows),
            counters: open_pinned(directory, "counters")?,
            scan: Scan::new(
                SocketMapScanner::open(object, sizes)?,
                object.mapped("prefilter", PrefilterTable::LENGTH)?,
                usage,
            ),
        })
    }

    /// Returns the number of flows that have begun. Without an answer of the kernel, none began.
    fn begun(&self) -> u64 {
        self.counters.get(&(Counter::FlowsBegun as u32), 0).map_or(0, |of_cpus| of_cpus.iter().sum())
    }

    /// `begun` is the number of flows that have begun.
    fn expiry(&self, begun: u64) -> Result<Expiry, KernelError> {
        let now_ns = clock::nanos(clock::monotonic()?);
        Ok(Expiry { now_ns, keeps_finished: self.fill.keeps_finished(begun) })
    }

    /// Sweeps all assured flows. Returns how many entries were removed.
    fn sweep_assured(&mut self, begun: u64) -> Result<usize, KernelError> {
        let expiry = self.expiry(begun)?;
        self.whole.rewind();
        let mut removed = 0;
        for _ in 0..self.max_reads {
            removed += self.whole.sweep(expiry, |_, _| {})?;
            if self.whole.entries.is_at_beginning() {
                break;
            }
        }
        self.fill.count(self.whole.seen, begun);
        Ok(removed)
    }

    /// Sweeps the next part of both maps, the unassured flows first: a flow that is assured
    /// meanwhile moves to the map that comes second, so that the scan finds it. Returns how many
    /// entries were removed.
    fn sweep(&mut self, begun: u64) -> Result<usize, KernelError> {
        let expiry = self.expiry(begun)?;
        let mut removed = 0;
        for _ in 0..self.reads_per_sweep {
            if !self.is_at_assured && self.unassured.entries.is_at_beginning() {
                self.scan.begin();
                self.assured.rewind();
                self.unassured.rewind();
            }
            let map = if self.is_at_assured { &mut self.assured } else { &mut self.unassured };
            let needed = &mut self.scan.needed;
            removed += map.sweep(expiry, |key, flow| {
                for item in PrefilterItem::of_flow(key, flow) {
                    needed.insert(item);
                }
            })?;
            if map.entries.is_at_beginning() {
                self.is_at_assured = !self.is_at_assured;
                if !self.is_at_assured {
                    let entries = [&self.assured, &self.unassured].map(|map| (map.name, map.seen));
                    self.scan.end(entries, expiry.now_ns)?;
                    break;
                }
            }
        }
        Ok(removed)
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

    const OPEN: u32 = flow_state::REPLIED | flow_state::ASSURED;
    const CLOSED: u32 = OPEN | flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED;

    /// Returns true if a connection in this state is removed after this time without packets.
    fn is_removed(state: u32, seconds: u64, keeps_finished: Option<u64>) -> bool {
        let tuple = Tuple { source: Flow::NONE.source, destination: Flow::NONE.destination };
        let key = FlowKey::new(Direction::Original, Protocol::Tcp, tuple);
        let flow = Flow { state, used_ns: 1, ..Flow::NONE };
        let now_ns = 1 + seconds * 1_000_000_000;
        Expiry { now_ns, keeps_finished: keeps_finished.map(Duration::from_secs) }.is_expired(&key, &flow)
    }

    #[test]
    fn map_that_fills_up_loses_finished_connections_sooner() {
        assert!(is_removed(CLOSED, 11, Some(10)));
        assert!(!is_removed(CLOSED, 9, Some(10)), "its last segments may be retransmitted");
        assert!(!is_removed(CLOSED, 11, None));
        assert!(is_removed(CLOSED, 121, None));
        for open in [0, OPEN, OPEN | flow_state::CLIENT_CLOSED] {
            assert!(!is_removed(open, 11, Some(10)), "{open:#x}");
        }
    }
}
