//! Bytes of a packet that programs read and write without a helper.

use core::array;

/// The largest offset at which bytes are read or written. The verifier wants a limit.
const MAX_OFFSET: u32 = 0x7fff;

/// Bytes for which loads and stores of whole words are allowed.
#[repr(C, align(8))]
pub(super) struct Aligned<const N: usize>(pub(super) [u8; N]);

/// A word of a packet, whose address is a multiple of 2: the Ethernet header has 14 bytes.
#[repr(C, packed(2))]
#[derive(Clone, Copy)]
struct Halves(u32);

/// The part of a packet that is in one piece: the addresses of its first byte, and of the byte
/// after its last one.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Linear {
    /// Returns the address of so many bytes at an offset, if they are in this part. Their number is
    /// a constant.
    #[inline(always)]
    fn at(self, offset: u32, bytes: usize) -> Option<*mut u8> {
        // The verifier learns nothing from a comparison for a single byte.
        if bytes < 2 || offset > MAX_OFFSET {
            return None;
        }
        let at = self.start as usize + offset as usize;
        if at + bytes > self.end as usize { None } else { Some(at as *mut u8) }
    }

    /// Reads words. Returns `None` if some are not in this part.
    ///
    /// # Safety
    ///
    /// `start` and `end` are those of the context.
    #[inline(always)]
    pub(super) unsafe fn load_words<const N: usize>(self, offset: u32) -> Option<[[u8; 4]; N]> {
        let from = self.at(offset, 4 * N)?.cast::<Halves>();
        // SAFETY: the words are between the start and the end of the packet. Headers are at even
        // offsets.
        Some(array::from_fn(|word| unsafe { from.add(word).read().0.to_ne_bytes() }))
    }

    /// Copies bytes out of the packet. Returns false if some are not in this part.
    ///
    /// # Safety
    ///
    /// `start` and `end` are those of the context, and `room` has `N` bytes at a multiple of 8.
    #[inline(always)]
    pub(super) unsafe fn load<const N: usize>(self, offset: u32, room: *mut u8) -> bool {
        let Some(from) = self.at(offset, N) else { return false };
        // SAFETY: N bytes are between the start and the end of the packet. Headers are at even
        // offsets.
        unsafe {
            for word in 0..N / 4 {
                room.add(4 * word).cast::<u32>().write((*from.add(4 * word).cast::<Halves>()).0);
            }
            if N % 4 >= 2 {
                let at = N / 4 * 4;
                room.add(at).cast::<u16>().write(from.add(at).cast::<u16>().read());
            }
            if N % 2 == 1 {
                room.add(N - 1).write(from.add(N - 1).read());
            }
        }
        true
    }

    /// Copies bytes into the packet. Returns false if there is no room for some in this part.
    ///
    /// # Safety
    ///
    /// `start` and `end` are those of the context, and the program may write the packet.
    #[inline(always)]
    pub(super) unsafe fn store<const N: usize>(self, offset: u32, bytes: &[u8; N]) -> bool {
        let Some(to) = self.at(offset, N) else { return false };
        let from = bytes.as_ptr();
        // SAFETY: N bytes are between the start and the end of the packet. The bytes may be at any
        // address.
        unsafe {
            for word in 0..N / 4 {
                let value = from.add(4 * word).cast::<u32>().read_unaligned();
                to.add(4 * word).cast::<Halves>().write(Halves(value));
            }
            if N % 4 >= 2 {
                let at = N / 4 * 4;
                to.add(at).cast::<u16>().write(from.add(at).cast::<u16>().read_unaligned());
            }
            if N % 2 == 1 {
                to.add(N - 1).write(from.add(N - 1).read());
            }
        }
        true
    }
}
