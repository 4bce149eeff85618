//! This program's own instructions in memory.

use std::{fs, io, ops::Range};

use super::KernelError;

const MAPS: &str = "/proc/self/maps";
const PROGRAM: &str = "/proc/self/exe";

/// Unmaps the pages of instructions that were run so far. Much of the program runs once, at start; what is needed again comes
/// back from the file, which the kernel still caches, page by page.
pub fn forget() -> Result<(), KernelError> {
    let program = fs::read_link(PROGRAM).map_err(KernelError::path("read", PROGRAM))?;
    let maps = fs::read_to_string(MAPS).map_err(KernelError::path("read", MAPS))?;
    for range in text_of(&maps, &program.to_string_lossy()) {
        let (start, length) = (range.start as *mut libc::c_void, range.end - range.start);
        // SAFETY: a private mapping of this program's file that cannot be written to, so that each page is as in the file, from where
        // the kernel reads it again when it is run.
        if unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) } != 0 {
            return Err(KernelError::call("madvise", "the program's instructions")(
                io::Error::last_os_error(),
            ));
        }
    }
    Ok(())
}

/// Where a file is mapped privately to be run, and never to be written to.
fn text_of(maps: &str, program: &str) -> Vec<Range<usize>> {
    let range = |line: &str| {
        let mut fields = line.split_whitespace();
        let (range, permissions) = (fields.next()?, fields.next()?);
        let path = fields.nth(3)?;
        let (start, end) = range.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        (permissions == "r-xp" && path == program).then_some(address(start)?..address(end)?)
    };
    maps.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_instructions_of_the_program_itself_are_found() {
        let maps = "\
55d0a0000000-55d0a0001000 r--p 00000000 08:01 42 /usr/bin/shunt
55d0a0001000-55d0a0003000 r-xp 00001000 08:01 42 /usr/bin/shunt
55d0a0003000-55d0a0004000 rw-p 00003000 08:01 42 /usr/bin/shunt
7f0000000000-7f0000001000 r-xp 00000000 08:01 43 /lib/libc.so.6
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0 [vdso]
";
        let found = text_of(maps, "/usr/bin/shunt");
        assert_eq!((found.len(), &found[0]), (1, &(0x55d0_a000_1000..0x55d0_a000_3000)));
    }

    #[test]
    fn a_program_that_forgets_its_instructions_goes_on() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").expect("readable");
            let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).expect("RssFile");
            line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
        };
        let before = resident();
        forget().expect("nothing is in its way");
        assert!(resident() < before, "{before} kB before, {} kB after", resident());
    }
}
