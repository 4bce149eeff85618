//! Approves TCP connections for the direct path, on a thread of its own.
//!
//! Conntrack does not see segments on the direct path. When a later segment goes through the stack,
//! its sequence number may be outside the window that conntrack knows. Rules may then drop the
//! segment as invalid. So this thread first makes conntrack accept any sequence number of the
//! connection. Conntrack does the same by itself if a connection is older than its tracking.

use std::{path::Path, thread::JoinHandle};

use aya::maps::{HashMap, MapData, MapError};
use proxy_common::{
    Protocol,
    layout::{
        DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4, DirectPath, Direction, Endpoint, Flow, FlowKey,
        direct_flags,
    },
    packet::Tuple,
};

use super::{maps::open_pinned, upgrade::handover::pair};
use crate::kernel::{
    KernelError,
    bpf::{Object, RingReader, Wakeup},
    conntrack::{AddressPair, LiberalConnections},
    spawn,
};

/// `BPF_EXIST`: an entry that the programs removed stays removed.
const ONLY_EXISTING: u64 = 2;

/// The most requests between two looks at whether the thread is to end.
const MAX_REQUESTS: usize = 16;

/// The thread that approves connections. It ends before this is dropped.
#[derive(Debug)]
pub(super) struct DirectApprover {
    end: Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl DirectApprover {
    /// Starts the thread, with the maps that are pinned in `directory`.
    pub(super) fn start(object: &mut Object, directory: &Path) -> Result<Self, KernelError> {
        let mut requests = RingReader::new(object, "direct_requests")?;
        let mut approval = Approval {
            flows: open_pinned(directory, "flows")?,
            direct_flows: DirectFlows::open(directory)?,
            conntrack: None,
            is_failing: false,
        };
        let end = Wakeup::new()?;
        let ended = end.clone();
        let thread = spawn("direct-path", move || {
            while let Ok(true) = requests.wait(&ended) {
                requests.read_some(MAX_REQUESTS).iter().for_each(|key| approval.decide(key));
            }
        })?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for DirectApprover {
    fn drop(&mut self) {
        self.end.wake();
        // A thread that panicked reads no more either.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The maps `direct_flows_v4` and `direct_flows_v6`.
struct DirectFlows {
    v4: HashMap<MapData, DirectKeyV4, DirectFlowV4>,
    v6: HashMap<MapData, DirectKey, DirectFlow>,
}

impl DirectFlows {
    /// Opens the maps that are pinned in `directory`.
    fn open(directory: &Path) -> Result<Self, KernelError> {
        let v4 = open_pinned(directory, "direct_flows_v4")?;
        Ok(Self { v4, v6: open_pinned(directory, "direct_flows_v6")? })
    }

    fn get(&self, key: &DirectKey) -> Result<DirectFlow, MapError> {
        match key.v4() {
            Some(key) => self.v4.get(&key, 0).map(DirectFlow::from),
            None => self.v6.get(key, 0),
        }
    }

    /// Writes an entry, unless there is none.
    fn replace(&mut self, key: &DirectKey, flow: &DirectFlow) -> Result<(), MapError> {
        match key.v4() {
            Some(key) => self.v4.insert(key, flow.v4(), ONLY_EXISTING),
            None => self.v6.insert(key, flow, ONLY_EXISTING),
        }
    }
}

/// Approves connections.
struct Approval {
    flows: HashMap<MapData, FlowKey, Flow>,
    direct_flows: DirectFlows,
    /// Opened for the first request.
    conntrack: Option<LiberalConnections>,
    /// The last request failed, and that was logged.
    is_failing: bool,
}

impl Approval {
    /// Approves a connection, unless it ended meanwhile. After an error, the programs ask again.
    fn decide(&mut self, key: &DirectKey) {
        let Ok(flow) = self.direct_flows.get(key) else { return };
        let Some(original) = self.seen_by_conntrack(key, &flow) else { return };
        match self.accept_any_sequence(original) {
            Ok(()) => {
                self.is_failing = false;
                let flags = flow.path.flags | direct_flags::APPROVED;
                let path = DirectPath { flags, until_ns: 1, ..flow.path };
                // The programs may have removed it.
                let _ = self.direct_flows.replace(key, &DirectFlow { path, ..flow });
            }
            Err(error) => {
                self.conntrack = None;
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(%error, "cannot prepare a connection for the direct path: its packets go through the stack");
                }
            }
        }
    }

    /// Returns the original direction of a connection as conntrack sees it: after the programs
    /// translated the destination, and before they translate the source.
    fn seen_by_conntrack(&self, key: &DirectKey, flow: &DirectFlow) -> Option<AddressPair> {
        let DirectPath { source_port, destination_port, flags, .. } = flow.path;
        let (source, destination) = if flags & direct_flags::TO_ENDPOINT != 0 {
            (key.source, key.destination)
        } else {
            (Endpoint::new(flow.destination, destination_port), Endpoint::new(flow.source, source_port))
        };
        let protocol = Protocol::from_number(key.proto)?;
        let original = FlowKey::new(Direction::Original, protocol, Tuple { source, destination });
        Some(pair(self.flows.get(&original, 0).ok()?.tuple()))
    }

    /// A connection that conntrack does not have is not tracked. If that begins, conntrack accepts
    /// any sequence number by itself.
    fn accept_any_sequence(&mut self, original: AddressPair) -> Result<(), KernelError> {
        let conntrack = match &mut self.conntrack {
            Some(conntrack) => conntrack,
            none => none.insert(LiberalConnections::open()?),
        };
        conntrack.accept(original).map(drop)
    }
}
