//! Recordings with the crate `pprof`: the feature `cpu-profiles`.

use std::{ffi::c_int, io, path::Path};

use pprof::{ProfilerGuard, ProfilerGuardBuilder};

use super::format;
use crate::kernel::KernelError;

/// Samples for each second of CPU time, as Go takes them.
const FREQUENCY: c_int = 100;
/// Shared libraries in which a stack is not walked: the unwinder may not be able to.
const NOT_SAMPLED: [&str; 4] = ["libc", "libgcc", "pthread", "vdso"];
/// Where samples go that do not fit into memory. The root of a container is often read-only.
const SPILL_DIRECTORY: &str = "/dev/shm";

/// A profile that is being recorded. Dropping it ends the recording.
///
/// A timer of the kernel (`ITIMER_PROF`) sends SIGPROF for each hundredth of a second of CPU time.
/// The handler walks the stack of the thread that runs. It allocates nothing.
pub struct Recording(ProfilerGuard<'static>);

impl Recording {
    /// Starts to record. There can be only one recording at a time.
    pub fn start() -> Result<Self, KernelError> {
        let directory = Path::new(SPILL_DIRECTORY);
        if directory.is_dir() {
            // It stays as it is if an earlier recording has set it.
            drop(tempfile::env::override_temp_dir(directory));
        }
        let builder = ProfilerGuardBuilder::default().frequency(FREQUENCY).blocklist(&NOT_SAMPLED);
        builder.build().map(Self).map_err(failed("record"))
    }

    /// Ends the recording, and returns the message `Profile` of pprof's `profile.proto`. It takes
    /// up to a second to find the names of the functions.
    pub fn finish(self) -> Result<Vec<u8>, KernelError> {
        let report = self.0.report().build().map_err(failed("read"))?;
        drop(self);
        Ok(format::encode(&report))
    }
}

fn failed(operation: &'static str) -> impl FnOnce(pprof::Error) -> KernelError {
    move |error| KernelError::call(operation, "a CPU profile")(io::Error::other(error))
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use prost::Message as _;

    use super::{super::format::messages::Profile, *};

    #[inline(never)]
    fn function_that_takes_the_time() -> u64 {
        (0..200_000_000_u64).fold(1, |sum, number| black_box(sum.wrapping_mul(31).wrapping_add(number)))
    }

    #[test]
    fn a_profile_names_the_function_that_took_the_time_and_only_one_is_recorded_at_a_time() {
        let recording = Recording::start().expect("recording starts");
        assert!(Recording::start().is_err(), "one at a time");
        black_box(function_that_takes_the_time());
        let bytes = recording.finish().expect("a profile");
        let profile = Profile::decode(&*bytes).expect("the message");
        let text = |number: i64| &*profile.string_table[usize::try_from(number).expect("an index")];
        assert_eq!((text(0), text(profile.sample_type[1].kind)), ("", "cpu"));
        assert_eq!(profile.period, 10_000_000);
        let is_slow = |location: u64| {
            let location = profile.location.iter().find(|other| other.id == location).expect("a location");
            location.line.iter().any(|line| {
                let function = profile.function.iter().find(|other| other.id == line.function_id);
                text(function.expect("a function").name).contains("function_that_takes_the_time")
            })
        };
        let slow = profile.sample.iter().filter(|sample| sample.location_id.iter().any(|id| is_slow(*id)));
        let nanoseconds: i64 = slow.map(|sample| sample.value[1]).sum();
        assert!(nanoseconds >= 50_000_000, "{nanoseconds} ns of {:?}", profile.sample.len());
        assert!(Recording::start().is_ok(), "the next recording starts");
    }
}
