//! Reading a hash map many entries a call, from where the last call ended.

use std::{io, marker::PhantomData, mem::MaybeUninit, os::fd::OwnedFd};

use aya::Pod;

use super::syscall;

/// Entries a call. More than any bucket of a hash map has, whose entries come together.
const ENTRIES: usize = 4096;

/// A place in a hash map, from which on it is read. Entries that come or go meanwhile may be met or not. A call that fails leaves it
/// where it was.
#[derive(Debug)]
pub struct Reader<K, V> {
    map: OwnedFd,
    /// Where the kernel goes on; none at the beginning.
    place: Option<u32>,
    entry: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> Reader<K, V> {
    /// Begins at the beginning. The map's keys and values are of these types' sizes.
    pub(super) const fn new(map: OwnedFd) -> Self {
        Self { map, place: None, entry: PhantomData }
    }

    /// Whether the next call starts from the beginning.
    pub const fn is_at_beginning(&self) -> bool {
        self.place.is_none()
    }

    /// Has the next call start from the beginning, wherever the last one ended.
    pub const fn rewind(&mut self) {
        self.place = None;
    }

    /// More calls than it takes to read a map of this capacity: each but the last fills at least half of its room, and as many
    /// again are for entries that come meanwhile.
    pub const fn max_calls(capacity: u32) -> usize {
        16 + 4 * (capacity as usize / ENTRIES)
    }

    /// The next entries, some thousands at most; at the end, the next call starts anew. Kernel 5.6 (057996380a42).
    pub fn read(&mut self) -> io::Result<Vec<(K, V)>> {
        let mut keys = vec![MaybeUninit::<K>::uninit(); ENTRIES];
        let mut values = vec![MaybeUninit::<V>::uninit(); ENTRIES];
        let batch = syscall::lookup_batch(&self.map, self.place, &mut keys, &mut values)?;
        self.place = batch.next;
        let entries = keys.into_iter().zip(values).take(batch.count);
        // SAFETY: the kernel filled as many keys and values; every bit pattern of a `Pod` is a value.
        Ok(entries.map(|(key, value)| unsafe { (key.assume_init(), value.assume_init()) }).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_place_outlives_a_call_that_fails_unless_it_is_rewound() {
        let no_map = OwnedFd::from(File::open("/dev/null").unwrap());
        let mut reader = Reader::<u32, u32> { place: Some(7), ..Reader::new(no_map) };
        assert!(reader.read().is_err());
        assert!(!reader.is_at_beginning());
        reader.rewind();
        assert!(reader.is_at_beginning());
    }

    #[test]
    fn the_largest_map_can_be_read_to_its_end() {
        assert!(Reader::<u64, u64>::max_calls(1 << 26) * ENTRIES >= 1 << 26);
        assert!(Reader::<u64, u64>::max_calls(16) >= 1);
    }
}
