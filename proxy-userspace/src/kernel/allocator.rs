//! The allocator of the C library: its settings, and the return of freed memory.

/// Limits the freed memory that the allocator keeps. Call this before there are threads.
///
/// With glibc, all threads share one arena, and large blocks go back to the kernel at once. One
/// thread decodes objects and another one keeps them. With an arena for each thread, the memory
/// that decoding frees would be of no use to other threads. Other C libraries are left as they are.
pub fn limit_free_memory() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [
        (libc::M_ARENA_MAX, 1),
        // Setting these thresholds keeps glibc from raising them after a large block was freed.
        (libc::M_MMAP_THRESHOLD, LARGE),
        (libc::M_TRIM_THRESHOLD, LARGE),
    ] {
        // SAFETY: the arguments are two integers. An unknown setting is rejected, which only costs
        // memory.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// glibc's initial default.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;

/// Returns freed memory to the kernel. The allocator does so by itself only at the end of the heap,
/// not between blocks that are in use. Takes about a millisecond for ten MiB.
pub fn release_free_memory() {
    // SAFETY: the function has no preconditions. The argument is the number of bytes to keep free at
    // the end of the heap.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
