//! Records which functions of this process use CPU time, as a profile in pprof's format.

#[cfg(feature = "cpu-profiles")]
mod format;
#[cfg(feature = "cpu-profiles")]
mod recording;
#[cfg(not(feature = "cpu-profiles"))]
mod unavailable;

use std::ptr;

#[cfg(feature = "cpu-profiles")]
pub use self::recording::Recording;
#[cfg(not(feature = "cpu-profiles"))]
pub use self::unavailable::Recording;

/// Stops the timer of a recording. It outlives execve(2), and without a handler SIGPROF ends the
/// process.
pub(super) fn stop_timer() {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let never = libc::itimerval { it_interval: zero, it_value: zero };
    // SAFETY: the kernel reads `never`, and a null pointer asks for no old value.
    #[expect(unsafe_code, reason = "setitimer(2)")]
    unsafe {
        libc::setitimer(libc::ITIMER_PROF, &raw const never, ptr::null_mut());
    }
}
