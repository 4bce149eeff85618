//! Netlink attributes: written into one buffer, and read out of an answer.
//!
//! Numbers are in network order, as everywhere in `linux/netfilter/nf_tables.h`; what registers hold is in the order the packet
//! or the kernel has it. Subsystems with numbers in the kernel's order write them as bytes.

use netlink_packet_core::{NLA_F_NESTED, NLA_TYPE_MASK};

/// An attribute's head: its length and its type, 16 bits each.
const HEAD: usize = 4;

/// Attributes in the making.
#[derive(Debug, Default)]
pub(in crate::kernel) struct Attributes {
    bytes: Vec<u8>,
}

impl Attributes {
    pub(in crate::kernel) const fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(in crate::kernel) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(in crate::kernel) fn clear(&mut self) {
        self.bytes.clear();
    }

    pub(in crate::kernel) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.head(kind, HEAD + value.len());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// A text with the zero that ends it.
    pub(in crate::kernel) fn text(&mut self, kind: u16, value: &str) {
        self.head(kind, HEAD + value.len() + 1);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    pub(in crate::kernel) fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(in crate::kernel) fn number64(&mut self, kind: u16, value: u64) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// An attribute that holds others.
    pub(in crate::kernel) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.head(kind | NLA_F_NESTED, HEAD);
        fill(self);
        // One message's worth of elements is counted before it is written: nothing gets longer than 16 bits can say.
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Begins a message of nfnetlink and tells where; [`Self::end_message`] has to follow.
    pub(in crate::kernel) fn begin_message(
        &mut self,
        kind: u16,
        flags: u16,
        number: u32,
        family: u8,
        resource: u16,
    ) -> usize {
        let [high, low] = resource.to_ne_bytes();
        self.begin(kind, flags, number, [family, 0, high, low])
    }

    /// Begins a message of generic netlink and tells where; [`Self::end_message`] has to follow.
    pub(in crate::kernel) fn begin_generic(
        &mut self,
        family: u16,
        flags: u16,
        number: u32,
        command: u8,
        version: u8,
    ) -> usize {
        self.begin(family, flags, number, [command, version, 0, 0])
    }

    fn begin(&mut self, kind: u16, flags: u16, number: u32, head: [u8; 4]) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&number.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&head);
        start
    }

    /// Ends a message: now its length is known, and which flags it has.
    pub(in crate::kernel) fn end_message(&mut self, start: usize, flags: u16) {
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[start + 6..start + 8].copy_from_slice(&flags.to_ne_bytes());
    }

    fn head(&mut self, kind: u16, length: usize) {
        let length = u16::try_from(length).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The attributes of an answer: type and value of each, up to the first that is damaged.
pub(in crate::kernel) fn read(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let kind = rest.first_chunk::<2>()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = bytes.get(HEAD..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(*kind) & NLA_TYPE_MASK, value))
    })
}

/// The value of an attribute of this type.
pub(in crate::kernel) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    read(bytes).find_map(|(found, value)| (found == kind).then_some(value))
}

/// A number in network order.
pub(in crate::kernel) fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

/// A text without the zero that ends it.
pub(in crate::kernel) fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_padding_is_not_part_of_it() {
        let mut attributes = Attributes::default();
        attributes.text(1, "abc");
        attributes.nested(3, |inner| {
            inner.bytes(7, &[1, 2, 3, 4, 5]);
            inner.number(8, 0x0102_0304);
        });
        let read: Vec<_> = read(attributes.as_bytes()).collect();
        assert_eq!(read[0], (1, &b"abc\0"[..]));
        assert_eq!(find(read[1].1, 7), Some(&[1, 2, 3, 4, 5][..]));
        assert_eq!(find(read[1].1, 8).and_then(number), Some(0x0102_0304));
        assert_eq!(text(read[0].1), Some("abc"));
    }

    #[test]
    fn damaged_attributes_end_the_reading() {
        assert_eq!(read(&[9, 0, 1, 0, 1]).count(), 0);
        assert_eq!(read(&[2, 0, 1, 0]).count(), 0);
        assert_eq!(read(&[4, 0]).count(), 0);
    }
}
