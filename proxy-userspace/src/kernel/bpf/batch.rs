//! Reads and writes maps in batches of many entries.

use std::{io, marker::PhantomData, mem::MaybeUninit, os::fd::OwnedFd};

use aya::Pod;

use super::syscall;

/// The maximal number of entries of a call. It must be larger than any bucket of a hash map,
/// because the kernel returns the entries of a bucket together.
const MAX_ENTRIES: usize = 4096;

/// A position in a map. Entries that are inserted or removed meanwhile may or may not be returned.
/// A call that fails does not move the position.
#[derive(Debug)]
pub struct Reader<K, V> {
    map: OwnedFd,
    /// Where the kernel continues; `None` at the beginning.
    position: Option<u32>,
    entry: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> Reader<K, V> {
    /// Starts at the beginning. Keys and values of the map must have the sizes of these types.
    pub(super) const fn new(map: OwnedFd) -> Self {
        Self { map, position: None, entry: PhantomData }
    }

    /// Returns true if the next call starts at the beginning.
    pub const fn is_at_beginning(&self) -> bool {
        self.position.is_none()
    }

    /// Makes the next call start at the beginning.
    pub const fn rewind(&mut self) {
        self.position = None;
    }

    /// Returns more calls than are needed to read a map of this capacity. Each call except the last
    /// fills at least half of its buffer, and the same number is added for entries that are
    /// inserted meanwhile.
    pub const fn max_calls(capacity: u32) -> usize {
        16 + 4 * (capacity as usize / MAX_ENTRIES)
    }

    /// Returns the next entries, at most some thousand. After the end, the next call starts at the
    /// beginning. Kernel 5.6 (057996380a42).
    pub fn read(&mut self) -> io::Result<Vec<(K, V)>> {
        Ok(self.read_into(&mut Batch::new())?.collect())
    }

    /// Reads all entries.
    pub fn read_all(&mut self, mut visit: impl FnMut(K, V)) -> io::Result<()> {
        self.rewind();
        let mut batch = Batch::new();
        loop {
            self.read_into(&mut batch)?.for_each(|(key, value)| visit(key, value));
            if self.is_at_beginning() {
                return Ok(());
            }
        }
    }

    fn read_into<'a>(
        &mut self,
        Batch { keys, values }: &'a mut Batch<K, V>,
    ) -> io::Result<impl Iterator<Item = (K, V)> + use<'a, K, V>> {
        let read = syscall::lookup_batch(&self.map, self.position, keys, values)?;
        self.position = read.next;
        let entries = keys.iter().zip(values).take(read.count);
        // SAFETY: the kernel filled as many keys and values; every bit pattern of a `Pod` is a
        // value.
        Ok(entries.map(|(key, value)| unsafe { (key.assume_init_read(), value.assume_init_read()) }))
    }
}

/// The memory for the entries of one call. If each call had its own, the kernel would map its pages
/// again and again, which takes longer than to copy the entries.
struct Batch<K, V> {
    keys: Vec<MaybeUninit<K>>,
    values: Vec<MaybeUninit<V>>,
}

impl<K: Pod, V: Pod> Batch<K, V> {
    fn new() -> Self {
        Self {
            keys: vec![MaybeUninit::uninit(); MAX_ENTRIES],
            values: vec![MaybeUninit::uninit(); MAX_ENTRIES],
        }
    }
}

/// Writes a hash map.
#[derive(Debug)]
pub struct Writer<K, V> {
    map: OwnedFd,
    entry: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> Writer<K, V> {
    /// Keys and values of the map must have the sizes of these types.
    pub(super) const fn new(map: OwnedFd) -> Self {
        Self { map, entry: PhantomData }
    }

    /// Inserts or replaces entries in this order. Returns how many: it stops at the first that
    /// fails, for a cause that a single write of that entry shows. Kernel 5.6 (aa2e93b8e58e).
    pub fn put(&self, entries: impl Iterator<Item = (K, V)>) -> usize {
        let (keys, values): (Vec<K>, Vec<V>) = entries.unzip();
        syscall::update_batch(&self.map, &keys, &values)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn position_stays_after_a_failed_call_until_it_is_rewound() {
        let no_map = OwnedFd::from(File::open("/dev/null").unwrap());
        let mut reader = Reader::<u32, u32> { position: Some(7), ..Reader::new(no_map) };
        assert!(reader.read().is_err());
        assert!(!reader.is_at_beginning());
        reader.rewind();
        assert!(reader.is_at_beginning());
    }

    #[test]
    fn largest_map_can_be_read_to_its_end() {
        assert!(Reader::<u64, u64>::max_calls(1 << 26) * MAX_ENTRIES >= 1 << 26);
        assert!(Reader::<u64, u64>::max_calls(16) >= 1);
    }
}
