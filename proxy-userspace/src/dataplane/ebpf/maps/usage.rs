//! The contents of the maps that programs write: how many entries each has, and which bits of the
//! prefilter the entries need. The thread that sweeps flows scans them from time to time.

use std::{io, sync::Mutex};

use aya::Pod;
use proxy_common::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Connection, Endpoint, FlowKey, FragmentKey, FragmentValue, MapSizes,
        SocketPeer, UdpSocket,
    },
    prefilter::PrefilterItem,
};

use super::prefilter::PrefilterBits;
use crate::{
    dataplane::lock,
    kernel::{
        KernelError,
        bpf::{Object, Reader},
    },
};

/// The results of scans, for other threads.
#[derive(Debug, Default)]
pub(crate) struct MapUsage(Mutex<ScanResults>);

#[derive(Debug, Default)]
struct ScanResults {
    /// The number of scans that have begun.
    begun: u64,
    /// The number of the last complete scan, and the bits that entries needed.
    last: Option<(u64, PrefilterBits)>,
    entries: Vec<(&'static str, usize)>,
}

impl MapUsage {
    /// Returns how many scans have begun.
    pub(crate) fn begun(&self) -> u64 {
        lock(&self.0).begun
    }

    /// Passes on the needed bits of a complete scan that began after this number of scans had
    /// begun. Returns false if there is none yet.
    pub(crate) fn needed_after(&self, begun: u64, mut pass: impl FnMut(&PrefilterBits)) -> bool {
        let results = lock(&self.0);
        let needed = results.last.as_ref().filter(|(scan, _)| *scan > begun);
        needed.map(|(_, bits)| pass(bits)).is_some()
    }

    /// Returns how many entries a map had at the last scan; 0 before the first one.
    pub(crate) fn entries(&self, map: &str) -> usize {
        let results = lock(&self.0);
        results.entries.iter().find_map(|(name, entries)| (*name == map).then_some(*entries)).unwrap_or(0)
    }

    /// Begins a scan. Returns its number.
    pub(crate) fn begin(&self) -> u64 {
        let mut results = lock(&self.0);
        results.begun += 1;
        results.begun
    }

    /// Records the results of a complete scan.
    pub(crate) fn end(&self, scan: u64, needed: PrefilterBits, entries: Vec<(&'static str, usize)>) {
        let mut results = lock(&self.0);
        results.last = Some((scan, needed));
        results.entries = entries;
    }
}

/// Adds the bits that the entries of a map need. Returns the number of entries.
type Scan = Box<dyn FnMut(&mut PrefilterBits) -> io::Result<usize> + Send>;

/// Scans the maps of sockets, affinity and fragments: all LRU maps except those of flows.
pub(crate) struct SocketMapScanner(Vec<(&'static str, Scan)>);

impl SocketMapScanner {
    pub(crate) fn open(object: &Object, sizes: &MapSizes) -> Result<Self, KernelError> {
        let item = |endpoint: &Endpoint| Some(PrefilterItem::of_endpoint(&endpoint.addr, endpoint.port));
        Ok(Self(vec![
            scan::<u64, Connection>(object, "tcp_connections", sizes, move |_, value| item(&value.endpoint))?,
            scan::<u64, UdpSocket>(object, "udp_sockets", sizes, move |_, value| item(&value.endpoint))?,
            scan::<SocketPeer, Endpoint>(object, "udp_replies", sizes, move |key, _| item(&key.peer))?,
            // These lead to Services and endpoints, which programs look up again.
            scan::<SocketPeer, Endpoint>(object, "udp_flows", sizes, |_, _| None)?,
            scan::<AffinityKey, AffinityValue>(object, "affinity", sizes, |_, _| None)?,
            scan::<FragmentKey, FragmentValue>(object, "fragments", sizes, |_, _| None)?,
            scan::<FlowKey, Addr>(object, "dsr_returns", sizes, |_, _| None)?,
            scan::<FlowKey, Addr>(object, "dsr_new_returns", sizes, |_, _| None)?,
        ]))
    }

    /// Scans all of them. Returns the number of entries of each.
    pub(crate) fn scan(
        &mut self,
        needed: &mut PrefilterBits,
    ) -> Result<Vec<(&'static str, usize)>, KernelError> {
        let count = |(name, scan): &mut (&'static str, Scan)| {
            scan(needed).map(|entries| (*name, entries)).map_err(KernelError::call("read map", *name))
        };
        self.0.iter_mut().map(count).collect()
    }
}

fn scan<K: Pod + Send + 'static, V: Pod + Send + 'static>(
    object: &Object,
    map: &'static str,
    sizes: &MapSizes,
    needs: impl Fn(&K, &V) -> Option<PrefilterItem> + Send + 'static,
) -> Result<(&'static str, Scan), KernelError> {
    let mut reader: Reader<K, V> = object.reader(map)?;
    let max_calls = Reader::<K, V>::max_calls(sizes.entries(map));
    let scan = move |bits: &mut PrefilterBits| {
        // A scan that failed left the reader where it was, and its bits were thrown away.
        reader.rewind();
        let mut count = 0;
        for _ in 0..max_calls {
            let entries = reader.read()?;
            count += entries.len();
            entries.iter().filter_map(|(key, value)| needs(key, value)).for_each(|item| bits.insert(item));
            if reader.is_at_beginning() {
                return Ok(count);
            }
        }
        Err(io::Error::other("the map has no end"))
    };
    Ok((map, Box::new(scan)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_scan_that_began_later_says_which_bits_are_needed() {
        let usage = MapUsage::default();
        let first = usage.begin();
        let begun = usage.begun();
        usage.end(first, PrefilterBits::new(1), vec![("affinity", 3)]);
        assert!(
            !usage.needed_after(begun, |_| {}),
            "entries may have been added behind the place that it had reached"
        );
        assert_eq!((usage.entries("affinity"), usage.entries("flows")), (3, 0));
        let second = usage.begin();
        assert!(!usage.needed_after(begun, |_| {}), "it has not ended");
        usage.end(second, PrefilterBits::new(1), Vec::new());
        assert!(usage.needed_after(begun, |_| {}));
    }
}
