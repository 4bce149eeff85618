//! Removes flows that are over, a part of the map at a time, away from the thread that programs Services.
//!
//! The map drops what was not used for longest when it needs room; but until then a flow that ended stands in the way of
//! another between the same addresses and ports, and in the way of who reads the map. A map that is more than half full loses its
//! finished connections sooner, so that they do not push out idle ones that go on.
//!
//! While it is at it, it counts what the maps hold, and sees what of the bitmap they need.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread,
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::{
    layout::{Flow, FlowKey, MapSizes},
    prefilter::PrefilterBit,
};

use super::{
    prefilter::Bits,
    usage::{Noted, OfSockets},
};
use crate::kernel::{
    KernelError,
    bpf::{Object, Reader},
    clock,
};

/// Between two looks.
const PAUSE: Duration = Duration::from_secs(10);
/// Calls that read some thousand entries each, at most, a look: a full map of the default size is seen in a minute, at some
/// milliseconds each look.
const READS: usize = 16;
/// How long a finished connection is kept in a map that is more than half full: for the last segments, should they be sent again.
const FINISHED_NS: u64 = 10_000_000_000;
/// The least time from one look at the other maps to the next: the largest of them costs some ten milliseconds while it is full.
const OTHERS_EVERY_NS: u64 = 30_000_000_000;

/// A thread that removes flows. Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct FlowSweeper {
    _alive: SyncSender<()>,
    noted: Arc<Noted>,
}

impl FlowSweeper {
    /// Starts the thread for maps of these sizes.
    pub(crate) fn start(object: &mut Object, sizes: &MapSizes) -> Result<Self, KernelError> {
        let noted = Arc::new(Noted::default());
        let mut flows = Flows {
            entries: object.reader("flows")?,
            map: object.take_map("flows")?,
            fill: Fill { seen: 0, capacity: sizes.flows, last: 0 },
            look: Look::new(OfSockets::open(object, sizes)?, Arc::clone(&noted)),
        };
        let (alive, ended) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("flows".into())
            .spawn(move || run(&mut flows, &ended))
            .map_err(KernelError::call("start", "thread flows"))?;
        Ok(Self { _alive: alive, noted })
    }

    /// What it has seen of the maps that programs write, up to some minutes ago.
    pub(crate) fn noted(&self) -> &Noted {
        &self.noted
    }
}

fn run(flows: &mut Flows, ended: &Receiver<()>) {
    while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
        match flows.sweep() {
            Ok(0) => {}
            Ok(count) => tracing::debug!(count, "removed flows that were over"),
            Err(error) => tracing::debug!(%error, "cannot look for flows that are over"),
        }
    }
}

struct Flows {
    entries: Reader<FlowKey, Flow>,
    map: HashMap<MapData, FlowKey, Flow>,
    fill: Fill,
    look: Look,
}

/// A look through all maps that programs write: through the flows as they are swept, and at their end through the others.
struct Look {
    noted: Arc<Noted>,
    number: u64,
    needed: Bits,
    others: OfSockets,
    /// When the others were looked through.
    others_at_ns: Option<u64>,
}

impl Look {
    fn new(others: OfSockets, noted: Arc<Noted>) -> Self {
        Self { noted, number: 0, needed: Bits::default(), others, others_at_ns: None }
    }

    fn begin(&mut self) {
        self.number = self.noted.begin();
        self.needed = Bits::default();
    }

    /// All flows have been seen, so many entries.
    fn end(&mut self, flows: usize, now_ns: u64) -> Result<(), KernelError> {
        if self.others_at_ns.is_some_and(|last| now_ns.saturating_sub(last) < OTHERS_EVERY_NS) {
            return Ok(());
        }
        self.others_at_ns = Some(now_ns);
        let mut entries = self.others.look(&mut self.needed)?;
        entries.push(("flows", flows));
        self.noted.end(self.number, std::mem::take(&mut self.needed), entries);
        Ok(())
    }
}

/// How full the map is.
struct Fill {
    /// Entries seen since the beginning of the map.
    seen: usize,
    capacity: u32,
    /// Entries of the whole map, the last time.
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

/// Whether an entry is of no more use.
fn is_over(key: &FlowKey, flow: &Flow, now_ns: u64, is_over_half: bool) -> bool {
    key.protocol().is_none_or(|protocol| flow.is_over(protocol, now_ns))
        || is_over_half && flow.is_finished() && now_ns.saturating_sub(flow.used_ns) > FINISHED_NS
}

impl Flows {
    /// Looks at a part of the map; returns how many entries it removed.
    fn sweep(&mut self) -> Result<usize, KernelError> {
        let now_ns = u64::try_from(clock::monotonic()?.as_nanos()).unwrap_or(u64::MAX);
        let mut removed = 0;
        if self.entries.is_at_beginning() {
            self.look.begin();
        }
        for _ in 0..READS {
            let entries = self.entries.read().map_err(KernelError::call("read", "map flows"))?;
            self.fill.seen += entries.len();
            let is_over_half = self.fill.is_over_half();
            for (key, flow) in entries {
                if is_over(&key, &flow, now_ns, is_over_half) && self.remove(&key, now_ns, is_over_half) {
                    self.fill.seen -= 1;
                    removed += 1;
                } else {
                    for place in PrefilterBit::of_flow(&key, &flow) {
                        self.look.needed.insert(place);
                    }
                }
            }
            if self.entries.is_at_beginning() {
                self.fill.end();
                self.look.end(self.fill.last, now_ns)?;
                break;
            }
        }
        Ok(removed)
    }

    /// A flow may have begun anew since it was read. Should that happen after this look, its other direction brings it back.
    fn remove(&mut self, key: &FlowKey, now_ns: u64, is_over_half: bool) -> bool {
        let is_still_over = self.map.get(key, 0).is_ok_and(|flow| is_over(key, &flow, now_ns, is_over_half));
        is_still_over && self.map.remove(key).is_ok()
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

    /// Whether a connection in this state is removed that was silent for so many seconds.
    fn is_removed(state: u32, seconds: u64, is_over_half: bool) -> bool {
        let tuple = Tuple { source: Flow::NONE.source, destination: Flow::NONE.destination };
        let key = FlowKey::new(Direction::Original, Protocol::Tcp, tuple);
        let flow = Flow { state, used_ns: 1, ..Flow::NONE };
        is_over(&key, &flow, 1 + seconds * 1_000_000_000, is_over_half)
    }

    #[test]
    fn a_map_that_is_over_half_full_loses_finished_connections_sooner_and_no_others() {
        assert!(is_removed(CLOSED, 11, true));
        assert!(!is_removed(CLOSED, 9, true), "its last segments may be sent again");
        assert!(!is_removed(CLOSED, 11, false));
        assert!(is_removed(CLOSED, 121, false));
        for open in [0, flow_state::REPLIED, flow_state::REPLIED | flow_state::CLIENT_CLOSED] {
            assert!(!is_removed(open, 11, true), "{open:#x}");
        }
    }

    #[test]
    fn a_map_fills_as_its_entries_are_seen_and_stays_full_until_the_next_whole_look() {
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
