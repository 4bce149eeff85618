//! Removes flows that are over, a part of the map at a time, away from the thread that programs Services.
//!
//! The map drops what was not used for longest when it needs room; but until then a flow that ended stands in the way of
//! another between the same addresses and ports, and in the way of who reads the map.

use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{Flow, FlowKey};

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

/// A thread that removes flows. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct FlowSweeper {
    _alive: SyncSender<()>,
}

impl FlowSweeper {
    /// Starts the thread.
    pub(super) fn start(object: &mut Object) -> Result<Self, KernelError> {
        let mut flows = Flows { entries: object.reader("flows")?, map: object.take_map("flows")? };
        let (alive, ended) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("flows".into())
            .spawn(move || run(&mut flows, &ended))
            .map_err(KernelError::call("start", "thread flows"))?;
        Ok(Self { _alive: alive })
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
}

impl Flows {
    /// Looks at a part of the map; returns how many entries it removed.
    fn sweep(&mut self) -> Result<usize, KernelError> {
        let now_ns = u64::try_from(clock::monotonic()?.as_nanos()).unwrap_or(u64::MAX);
        let mut removed = 0;
        for _ in 0..READS {
            let entries = self.entries.read().map_err(KernelError::call("read", "map flows"))?;
            for (key, flow) in entries {
                if flow.is_over(key.proto, now_ns) && self.remove(&key, now_ns) {
                    removed += 1;
                }
            }
            if self.entries.is_at_beginning() {
                break;
            }
        }
        Ok(removed)
    }

    /// A flow may have begun anew since it was read. Should that happen after this look, its other direction brings it back.
    fn remove(&mut self, key: &FlowKey, now_ns: u64) -> bool {
        let is_still_over = self.map.get(key, 0).is_ok_and(|flow| flow.is_over(key.proto, now_ns));
        is_still_over && self.map.remove(key).is_ok()
    }
}
