//! Stands in for recordings where shunt was built without the feature `cpu-profiles`.

use std::{convert::Infallible, io};

use crate::kernel::KernelError;

/// A profile that is being recorded. There is none.
pub struct Recording(Infallible);

impl Recording {
    /// Fails: nothing can be recorded.
    pub fn start() -> Result<Self, KernelError> {
        let error = io::Error::new(
            io::ErrorKind::Unsupported,
            "this shunt was built without the feature cpu-profiles",
        );
        Err(KernelError::call("record", "a CPU profile")(error))
    }

    /// Never runs.
    pub fn finish(self) -> Result<Vec<u8>, KernelError> {
        match self.0 {}
    }
}
