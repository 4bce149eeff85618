//! Maps an array map into memory, so that it is written without a system call.

use std::{
    io,
    num::NonZeroUsize,
    os::fd::AsFd,
    ptr::NonNull,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use proxy_common::prefilter::sized::PrefilterMemory;

/// An array of 64-bit words that programs read at the same time. Kernel 5.5 (fc9702273e2e).
#[derive(Debug)]
pub struct MappedWords {
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the memory belongs to the kernel, and it is only accessed through atomic operations.
unsafe impl Send for MappedWords {}

impl MappedWords {
    /// Maps an array that was created with `BPF_F_MMAPABLE` and has at least `count` words.
    pub fn new(map: impl AsFd, count: u32) -> io::Result<Self> {
        let count = count as usize;
        let length = NonZeroUsize::new(count * size_of::<u64>()).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses. The kernel refuses a
        // mapping that is longer than the map.
        let start = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, map, 0) }?;
        Ok(Self { start: start.cast(), count })
    }

    fn behind_mask(&self, index: u32) -> Option<&AtomicU64> {
        self.words().get(index as usize + 1)
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: this number of words was mapped, the mapping lives as long as `self`, and all
        // access is atomic.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

/// The words of a [`PrefilterTable`](proxy_common::prefilter::PrefilterTable). The first word is
/// the mask.
impl PrefilterMemory for MappedWords {
    fn mask(&self) -> u64 {
        self.words().first().map_or(0, |mask| mask.load(Ordering::Relaxed))
    }

    fn set_mask(&self, mask: u64) {
        if let Some(first) = self.words().first() {
            first.store(mask, Ordering::Release);
        }
    }

    fn word(&self, index: u32) -> u64 {
        self.behind_mask(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn set_word(&self, index: u32, word: u64) {
        if let Some(stored) = self.behind_mask(index) {
            stored.store(word, Ordering::Relaxed);
        }
    }

    fn set_bits(&self, index: u32, bits: u64) {
        if let Some(word) = self.behind_mask(index) {
            word.fetch_or(bits, Ordering::Relaxed);
        }
    }

    fn clear_bits(&self, index: u32, bits: u64) {
        if let Some(word) = self.behind_mask(index) {
            word.fetch_and(!bits, Ordering::Relaxed);
        }
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nothing borrows from it any more. It does
        // not fail for an existing mapping.
        let _ = unsafe { munmap(self.start.cast(), self.count * size_of::<u64>()) };
    }
}
