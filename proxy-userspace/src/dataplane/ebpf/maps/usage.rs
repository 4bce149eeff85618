//! What programs noted of flows and sockets, looked through now and then by the thread that sweeps flows: how many entries each
//! map holds, and which bits of the bitmap they need.

use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use aya::Pod;
use proxy_common::{
    layout::{
        AffinityKey, AffinityValue, Connection, Endpoint, FragmentKey, FragmentValue, MapSizes, SocketPeer,
        UdpSocket,
    },
    prefilter::PrefilterBit,
};

use super::prefilter::Bits;
use crate::kernel::{
    KernelError,
    bpf::{Object, Reader},
};

/// What looks found, for who asks.
#[derive(Debug, Default)]
pub(crate) struct Noted(Mutex<Looks>);

#[derive(Debug, Default)]
struct Looks {
    begun: u64,
    /// Of the last look at everything: which it was, and what it found.
    last: Option<(u64, Bits)>,
    entries: Vec<(&'static str, usize)>,
}

impl Noted {
    /// How many looks have begun.
    pub(crate) fn begun(&self) -> u64 {
        self.looks().begun
    }

    /// Gives what is needed as of a look that began when so many others had; false where none has come to its end yet.
    pub(crate) fn needed_after(&self, begun: u64, mut give: impl FnMut(&Bits)) -> bool {
        let looks = self.looks();
        let needed = looks.last.as_ref().filter(|(look, _)| *look > begun);
        needed.map(|(_, bits)| give(bits)).is_some()
    }

    /// How many entries a map held when it was last looked through; 0 before that.
    pub(crate) fn entries(&self, map: &str) -> usize {
        let looks = self.looks();
        looks.entries.iter().find_map(|(name, entries)| (*name == map).then_some(*entries)).unwrap_or(0)
    }

    /// A look begins; returns its number.
    pub(crate) fn begin(&self) -> u64 {
        let mut looks = self.looks();
        looks.begun += 1;
        looks.begun
    }

    /// A look has come to its end.
    pub(crate) fn end(&self, look: u64, needed: Bits, entries: Vec<(&'static str, usize)>) {
        let mut looks = self.looks();
        looks.last = Some((look, needed));
        looks.entries = entries;
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Look = Box<dyn FnMut(&mut Bits) -> io::Result<usize> + Send>;

/// The maps of sockets, affinity and fragments: all that programs write but flows.
pub(crate) struct OfSockets(Vec<(&'static str, Look)>);

impl OfSockets {
    pub(crate) fn open(object: &Object, sizes: &MapSizes) -> Result<Self, KernelError> {
        let place = |endpoint: &Endpoint| Some(PrefilterBit::of_endpoint(&endpoint.addr, endpoint.port));
        Ok(Self(vec![
            look::<u64, Connection>(object, ("tcp_connections", sizes.tcp_connections), move |_, value| {
                place(&value.endpoint)
            })?,
            look::<u64, UdpSocket>(object, ("udp_sockets", sizes.udp_sockets), move |_, value| {
                place(&value.endpoint)
            })?,
            look::<SocketPeer, Endpoint>(object, ("udp_replies", sizes.udp_flows), move |key, _| {
                place(&key.peer)
            })?,
            // These lead to Services and endpoints that are looked up anew.
            look::<SocketPeer, Endpoint>(object, ("udp_flows", sizes.udp_flows), |_, _| None)?,
            look::<AffinityKey, AffinityValue>(object, ("affinity", sizes.affinity), |_, _| None)?,
            look::<FragmentKey, FragmentValue>(object, ("fragments", sizes.fragments), |_, _| None)?,
        ]))
    }

    /// Looks through all of them.
    pub(crate) fn look(&mut self, needed: &mut Bits) -> Result<Vec<(&'static str, usize)>, KernelError> {
        let count = |(name, look): &mut (&'static str, Look)| {
            look(needed).map(|entries| (*name, entries)).map_err(KernelError::call("read map", *name))
        };
        self.0.iter_mut().map(count).collect()
    }
}

fn look<K: Pod + Send + 'static, V: Pod + Send + 'static>(
    object: &Object,
    (name, capacity): (&'static str, u32),
    needs: impl Fn(&K, &V) -> Option<PrefilterBit> + Send + 'static,
) -> Result<(&'static str, Look), KernelError> {
    let mut reader: Reader<K, V> = object.reader(name)?;
    let look = move |bits: &mut Bits| {
        // After an error it is where that look ended, and what came before would not be needed.
        reader.rewind();
        let mut count = 0;
        for _ in 0..Reader::<K, V>::most_calls(capacity) {
            let entries = reader.read()?;
            count += entries.len();
            entries.iter().filter_map(|(key, value)| needs(key, value)).for_each(|place| bits.insert(place));
            if reader.is_at_beginning() {
                return Ok(count);
            }
        }
        Err(io::Error::other("it has no end"))
    };
    Ok((name, Box::new(look)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_look_that_began_later_tells_what_is_needed() {
        let noted = Noted::default();
        let first = noted.begin();
        let begun = noted.begun();
        noted.end(first, Bits::default(), vec![("affinity", 3)]);
        assert!(
            !noted.needed_after(begun, |_| {}),
            "it may have missed what was noted after it passed there"
        );
        assert_eq!((noted.entries("affinity"), noted.entries("flows")), (3, 0));
        let second = noted.begin();
        assert!(!noted.needed_after(begun, |_| {}), "it has not ended");
        noted.end(second, Bits::default(), Vec::new());
        assert!(noted.needed_after(begun, |_| {}));
    }
}
