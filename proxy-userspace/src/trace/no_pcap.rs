//! Stands in for pcapng files where shunt was built without the feature `pcap-files`.

use std::{
    convert::Infallible,
    io::{BufWriter, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
};

use super::record::TracedPacket;

/// A file of packets could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: this shunt was built without the feature pcap-files")]
pub struct CaptureError {
    path: PathBuf,
}

/// Stands in for a pcapng file. [`Self::create`] always fails.
pub struct CaptureFile<W> {
    never: Infallible,
    writer: PhantomData<W>,
}

impl CaptureFile<BufWriter<Box<dyn Write>>> {
    /// Fails: no file can be written.
    pub fn create(path: &Path) -> Result<Self, CaptureError> {
        Err(CaptureError { path: path.into() })
    }

    /// Fails: no file can be written.
    pub fn check_new(path: &Path) -> Result<(), CaptureError> {
        Self::create(path).map(drop)
    }

    /// Never runs.
    pub fn write(&mut self, _: &TracedPacket) -> Result<(), CaptureError> {
        match self.never {}
    }

    /// Never runs.
    pub fn flush(&mut self) -> Result<(), CaptureError> {
        match self.never {}
    }
}
