//! The memory of this process: settings of the C library's allocator, and the return of memory that
//! only the start needs.

/// Limits the freed memory that the allocator keeps. Call this before there are threads.
///
/// With glibc, all threads share three arenas, and large blocks go back to the kernel at once. At a
/// start, one thread decodes objects, another one keeps them, and a third one reads maps and then
/// resolves half of the Services: with one arena, they would wait for each other. With an arena for
/// each thread, the memory that a thread frees would be of no use to other threads. Other C
/// libraries are left as they are.
pub fn limit_free_memory() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [
        (libc::M_ARENA_MAX, 3),
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

/// Returns memory to the kernel that only the start needs: freed blocks, and instructions.
///
/// The allocator returns freed blocks by itself only at the end of the heap, not between blocks
/// that are in use. Instructions that run again are mapped again from the kernel's cache of the
/// file.
pub fn release_after_start() {
    // SAFETY: the function has no preconditions. The argument is the number of bytes to keep free
    // at the end of the heap.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
    release_instructions();
}

/// An error means that the pages stay, which only costs memory.
fn release_instructions() {
    unsafe extern "C" {
        /// The first byte of the program and the end of its instructions, from the linker.
        static __executable_start: u8;
        static etext: u8;
    }
    const PAGE: usize = 4096;
    let start = (&raw const __executable_start).addr();
    let end = (&raw const etext).addr() & !(PAGE - 1);
    // SAFETY: the range has headers, constants and instructions. It is a private mapping of the
    // program's file that nothing writes to, so that each page has the same content when it is read
    // from the file again. The start of a program is aligned to a page.
    unsafe {
        libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn resident_file_kilobytes() -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("readable");
        let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).expect("RssFile");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn a_process_goes_on_after_it_released_its_instructions() {
        let before = resident_file_kilobytes();
        release_after_start();
        let after = resident_file_kilobytes();
        assert!(after < before, "{before} kB before, {after} kB after");
    }
}
