//! How the C library's allocator keeps memory that was freed.

/// Keeps freed memory in one place, and gives large blocks back at once. Objects are decoded on one thread and kept on
/// another: with an arena a thread, what decoding frees is of no use to anybody else. Another C library than glibc has
/// its own ways. To be called before there are threads.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [
        (libc::M_ARENA_MAX, 1),
        // Naming them turns off that they grow with what was freed once.
        (libc::M_MMAP_THRESHOLD, LARGE),
        (libc::M_TRIM_THRESHOLD, LARGE),
    ] {
        // SAFETY: two integers; settings that are not known are refused, which costs memory only.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// glibc's own default, to begin with.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;
