//! Ring buffers that the programs of an object write: typed records, and the messages of aya-log.
//!
//! Those for traces are not pinned, because each process loads its own programs that write them.
//! Nobody reads what the programs of the process before write until they are replaced. Minimum
//! kernel: 5.8 (457f44363a88).

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    sync::Arc,
};

use aya::{
    Pod,
    maps::{MapData, PerCpuArray, RingBuf},
};
use aya_log::EbpfLogger;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

use proxy_common::layout::LostRecord;

use super::{super::KernelError, Object};

/// What the programs write to the ring buffers. Each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Nothing. The verifier removes the code.
    #[default]
    Off,
    /// Errors of the programs.
    Error,
    /// Connections and packets that are refused or dropped.
    Info,
    /// Connections and packets that go to an endpoint.
    Debug,
}

impl LogLevel {
    /// Returns the number that aya-log uses.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Off => 0,
            Self::Error => aya_log::Level::Error as u8,
            Self::Info => aya_log::Level::Info as u8,
            Self::Debug => aya_log::Level::Debug as u8,
        }
    }
}

/// The smallest ring buffer: a page.
const SMALLEST_RING: u32 = 4096;
/// Room for some 1,300 trace events.
const LOG_RING: u32 = 128 * 1024;
/// Room for some 40,000 trace events.
const TRACE_RING: u32 = 4 * 1024 * 1024;
/// Room for some 7,000 packets.
const CAPTURE_RING: u32 = 16 * 1024 * 1024;

/// What the programs of an object record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// What the log shows.
    Log(LogLevel),
    /// All trace events, and with `packets` the packets on links.
    Trace {
        /// Captures packets.
        packets: bool,
    },
}

impl Recording {
    /// Returns the number of the level that aya-log uses.
    pub(super) fn level(self) -> u8 {
        match self {
            Self::Log(level) => level.number(),
            Self::Trace { .. } => LogLevel::Debug.number(),
        }
    }

    /// Returns the value of the constant that turns capturing on.
    pub(super) const fn captures(self) -> u32 {
        matches!(self, Self::Trace { packets: true }) as u32
    }

    /// Returns the ring buffer maps, and the bytes of each.
    pub(super) fn rings(self) -> [(&'static str, u32); 3] {
        let [events, messages, packets] = match self {
            Self::Log(LogLevel::Off) => [SMALLEST_RING; 3],
            Self::Log(_) => [LOG_RING, LOG_RING, SMALLEST_RING],
            Self::Trace { packets: false } => [TRACE_RING, LOG_RING, SMALLEST_RING],
            Self::Trace { packets: true } => [TRACE_RING, LOG_RING, CAPTURE_RING],
        };
        [("trace_events", events), ("AYA_LOGS", messages), ("captured_packets", packets)]
    }
}

pub(super) const LEVEL: &str = aya_log::LEVEL;
pub(super) const CAPTURES: &str = "CAPTURES_PACKETS";

/// Reads the number of records for which there was no room.
pub struct LostRecords(PerCpuArray<MapData, u64>);

impl LostRecords {
    /// Takes the counts out of an object.
    pub fn new(object: &mut Object) -> Result<Self, KernelError> {
        Ok(Self(object.take_map("lost_records")?))
    }

    /// Returns the number since the programs were loaded.
    pub fn read(&self, record: LostRecord) -> Result<u64, KernelError> {
        let counts = self.0.get(&(record as u32), 0);
        counts.map(|counts| counts.iter().sum()).map_err(KernelError::bpf("read map", "lost_records"))
    }
}

/// Wakes a thread up that waits.
#[derive(Clone, Debug)]
pub struct Wakeup(Arc<EventFd>);

impl Wakeup {
    /// Returns a new one.
    pub fn new() -> Result<Self, KernelError> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        event
            .map(|event| Self(Arc::new(event)))
            .map_err(|error| KernelError::call("create", "an eventfd")(error.into()))
    }

    /// Wakes the thread up.
    pub fn wake(&self) {
        // It fails only if the thread was woken up before.
        let _ = self.0.write(1);
    }

    /// Waits until something can be read from one of the descriptors, at most for `limit`. Returns
    /// true if the thread was woken up.
    pub fn wait_for(&self, sources: &[BorrowedFd<'_>], limit: PollTimeout) -> io::Result<bool> {
        let sources = sources.iter().copied().chain([self.0.as_fd()]);
        let mut polled: Vec<_> = sources.map(|source| PollFd::new(source, PollFlags::POLLIN)).collect();
        while let Err(error) = poll(&mut polled, limit) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
        Ok(polled.last().is_none_or(|end| end.any().unwrap_or(true)))
    }
}

/// Reads the records of a ring buffer whose programs write one type.
pub struct RingReader<T> {
    ring: RingBuf<MapData>,
    record: PhantomData<T>,
}

impl<T: Pod> RingReader<T> {
    /// Takes the ring buffer of this name out of an object.
    pub fn new(object: &mut Object, name: &'static str) -> Result<Self, KernelError> {
        Ok(Self { ring: object.take_map(name)?, record: PhantomData })
    }

    /// Waits until a program writes a record and wakes readers up. Returns false if `end` was woken
    /// up.
    pub fn wait(&self, end: &Wakeup) -> io::Result<bool> {
        // SAFETY: the ring buffer keeps its file descriptor open for as long as it lives.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        end.wait_for(&[ring], PollTimeout::NONE).map(|ended| !ended)
    }

    /// Reads until the ring buffer is empty, but at most `most` records.
    pub fn read_some(&mut self, most: usize) -> Vec<T> {
        let mut records = Vec::new();
        while records.len() < most
            && let Some(bytes) = self.ring.next()
        {
            records.extend(Self::record(&bytes));
        }
        records
    }

    /// Reads until the ring buffer is empty. If programs can write faster than `take` returns,
    /// `take` has to pause. The kernel then drops the records for which there is no room.
    pub fn read(&mut self, mut take: impl FnMut(T)) {
        while let Some(bytes) = self.ring.next() {
            let record = Self::record(&bytes);
            drop(bytes);
            record.into_iter().for_each(&mut take);
        }
    }

    fn record(bytes: &[u8]) -> Option<T> {
        // SAFETY: there are as many bytes as T has, and every bit pattern is a value of it.
        (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }
}

/// Reads the messages of aya-log and passes each of them to a logger.
pub struct MessageReader<L>(EbpfLogger<L>);

impl<L: log::Log> MessageReader<L> {
    /// Takes the ring buffer of aya-log out of an object.
    pub fn new(object: &mut Object, logger: L) -> Result<Self, KernelError> {
        EbpfLogger::init_with_logger(object.loaded()?, logger)
            .map(Self)
            .map_err(KernelError::bpf("open the logs of", "the BPF object"))
    }

    /// Reads until the ring buffer is empty. The logger has to pause, as in [`RingReader::read`].
    /// Only the programs of this object write the buffer, so aya-log understands every message.
    pub fn read(&mut self) {
        self.0.flush();
    }
}
