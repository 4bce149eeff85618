//! What programs tell by aya-log: up to a level that the verifier takes for given, in a ring buffer that is read now and then.
//!
//! The buffer is not pinned, since each process loads programs of its own: what those of the last one tell until they are replaced,
//! nobody reads. Ring buffers came with kernel 5.8 (457f44363a88).

use std::fmt;

use aya_log::EbpfLogger;

use super::{super::KernelError, Object};

/// What programs tell, and with it all that is above it here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Nothing: the verifier drops what would tell it.
    #[default]
    Off,
    /// What goes wrong in programs.
    Error,
    /// What is turned away.
    Info,
    /// What goes to an endpoint.
    Debug,
}

impl LogLevel {
    /// As aya-log has it.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Off => 0,
            Self::Error => aya_log::Level::Error as u8,
            Self::Info => aya_log::Level::Info as u8,
            Self::Debug => aya_log::Level::Debug as u8,
        }
    }

    /// The size of the ring buffer: room for about a thousand records, or one page, the least there can be.
    pub(super) fn ring_bytes(self) -> u32 {
        if self == Self::Off { 4096 } else { 256 * 1024 }
    }
}

/// The names that aya-log gives to its ring buffer, and to the level.
pub(super) const RING: &str = "AYA_LOGS";
pub(super) const LEVEL: &str = aya_log::LEVEL;

/// Reads what programs tell. Records go to a logger, each as one line.
pub struct LogReader<L>(EbpfLogger<L>);

impl<L> fmt::Debug for LogReader<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogReader").finish_non_exhaustive()
    }
}

impl<L: log::Log> LogReader<L> {
    /// For an object that was loaded with a level.
    pub fn new(object: &mut Object, logger: L) -> Result<Self, KernelError> {
        EbpfLogger::init_with_logger(&mut object.ebpf, logger)
            .map(Self)
            .map_err(KernelError::bpf("open the logs of", "the BPF object"))
    }

    /// Reads all there is, and what comes meanwhile: a logger that can be flooded has to pause, so that the kernel drops what does
    /// not fit. The programs of this object alone write it, so that every record is one that aya-log understands.
    pub fn read(&mut self) {
        self.0.flush();
    }
}
