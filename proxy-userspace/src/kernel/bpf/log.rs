//! Ring buffers that the programs of an object write: typed records, and the messages of aya-log.
//!
//! The ring buffers are not pinned, because each process loads its own programs. Nobody reads what
//! the programs of the process before write until they are replaced. Minimum kernel: 5.8
//! (457f44363a88).

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    sync::Arc,
};

use aya::{
    Pod,
    maps::{MapData, RingBuf},
};
use aya_log::EbpfLogger;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

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

    /// Returns the size of each ring buffer: room for some 1,600 trace events, or the minimum of
    /// one page.
    pub(super) fn ring_bytes(self) -> u32 {
        if self == Self::Off { 4096 } else { 128 * 1024 }
    }
}

/// The ring buffer maps: that of trace events, and that of aya-log.
pub(super) const RINGS: [&str; 2] = ["trace_events", "AYA_LOGS"];
pub(super) const LEVEL: &str = aya_log::LEVEL;

/// Wakes a thread up that waits for records ([`RingReader::wait`]).
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
        let mut sources = [ring, end.0.as_fd()].map(|source| PollFd::new(source, PollFlags::POLLIN));
        while let Err(error) = poll(&mut sources, PollTimeout::NONE) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
        Ok(!sources[1].any().unwrap_or(true))
    }

    /// Reads until the ring buffer is empty. If programs can write faster than `take` returns,
    /// `take` has to pause. The kernel then drops the records for which there is no room.
    pub fn read(&mut self, mut take: impl FnMut(T)) {
        while let Some(bytes) = self.ring.next() {
            if bytes.len() != size_of::<T>() {
                continue;
            }
            // SAFETY: there are as many bytes as T has, and every bit pattern is a value of it.
            let record = unsafe { bytes.as_ptr().cast::<T>().read_unaligned() };
            drop(bytes);
            take(record);
        }
    }
}

/// Reads the messages of aya-log and passes each of them to a logger.
pub struct MessageReader<L>(EbpfLogger<L>);

impl<L: log::Log> MessageReader<L> {
    /// Takes the ring buffer of aya-log out of an object.
    pub fn new(object: &mut Object, logger: L) -> Result<Self, KernelError> {
        EbpfLogger::init_with_logger(&mut object.ebpf, logger)
            .map(Self)
            .map_err(KernelError::bpf("open the logs of", "the BPF object"))
    }

    /// Reads until the ring buffer is empty. The logger has to pause, as in [`RingReader::read`].
    /// Only the programs of this object write the buffer, so aya-log understands every message.
    pub fn read(&mut self) {
        self.0.flush();
    }
}
