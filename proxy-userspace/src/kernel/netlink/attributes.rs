//! Writes netlink messages and attributes into a buffer, and reads attributes in place.
//!
//! Each number has the byte order in its name: `be` is network order, which nf_tables and conntrack
//! use, and `ne` is the kernel's own order.

use std::net::IpAddr;

use libc::c_int;
use netlink_packet_core::{NLA_F_NESTED, NLA_TYPE_MASK, NLM_F_REQUEST, NetlinkBuffer};

/// The length of `struct nlmsghdr`.
const MESSAGE_HEADER: usize = 16;
/// The length of `struct nlattr`: length and type, 16 bits each.
const ATTRIBUTE_HEADER: usize = 4;

/// A buffer of one or more messages.
#[derive(Debug, Default)]
pub(in crate::kernel) struct MessageBuffer {
    bytes: Vec<u8>,
}

impl MessageBuffer {
    pub(in crate::kernel) const fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(in crate::kernel) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Appends a message and returns its position. `header` is the subsystem's header, and `write`
    /// writes the attributes.
    pub(in crate::kernel) fn message(
        &mut self,
        message_type: u16,
        flags: u16,
        sequence: u32,
        header: impl AsRef<[u8]>,
        write: impl FnOnce(&mut Self),
    ) -> usize {
        let start = self.len();
        self.bytes.resize(start + MESSAGE_HEADER, 0);
        self.bytes.extend_from_slice(header.as_ref());
        write(self);
        let length = u32::try_from(self.len() - start).unwrap_or(u32::MAX);
        let mut message = NetlinkBuffer::new(&mut self.bytes[start..]);
        message.set_length(length);
        message.set_message_type(message_type);
        message.set_flags(NLM_F_REQUEST | flags);
        message.set_sequence_number(sequence);
        start
    }

    /// Adds flags to the message at this position.
    pub(in crate::kernel) fn add_flags(&mut self, start: usize, flags: u16) {
        let mut message = NetlinkBuffer::new(&mut self.bytes[start..]);
        message.set_flags(message.flags() | flags);
    }

    pub(in crate::kernel) fn bytes(&mut self, kind: c_int, value: &[u8]) {
        self.attribute(kind, 0, |to| to.bytes.extend_from_slice(value));
    }

    /// Appends a string and its terminating zero.
    pub(in crate::kernel) fn string(&mut self, kind: c_int, value: &str) {
        self.attribute(kind, 0, |to| {
            to.bytes.extend_from_slice(value.as_bytes());
            to.bytes.push(0);
        });
    }

    pub(in crate::kernel) fn be16(&mut self, kind: c_int, value: u16) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(in crate::kernel) fn be32(&mut self, kind: c_int, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Appends a constant of the kernel, in 32 bits.
    pub(in crate::kernel) fn be_int(&mut self, kind: c_int, value: c_int) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(in crate::kernel) fn be64(&mut self, kind: c_int, value: u64) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(in crate::kernel) fn ne16(&mut self, kind: c_int, value: u16) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    pub(in crate::kernel) fn ne32(&mut self, kind: c_int, value: u32) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    /// Appends an attribute that contains attributes. They are already encoded.
    pub(in crate::kernel) fn nested_bytes(&mut self, kind: c_int, attributes: &[u8]) {
        self.nested(kind, |to| to.bytes.extend_from_slice(attributes));
    }

    /// Appends an attribute that contains the attributes which `write` writes.
    pub(in crate::kernel) fn nested(&mut self, kind: c_int, write: impl FnOnce(&mut Self)) {
        self.attribute(kind, NLA_F_NESTED, write);
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the uapi type has 16 bits")]
    fn attribute(&mut self, kind: c_int, flags: u16, write: impl FnOnce(&mut Self)) {
        let start = self.len();
        self.bytes.resize(start + ATTRIBUTE_HEADER, 0);
        write(self);
        // Callers limit what they write: a message with many elements is split before 16 bits
        // overflow.
        let length = u16::try_from(self.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes[start + 2..start + 4].copy_from_slice(&(kind as u16 | flags).to_ne_bytes());
        self.bytes.resize(self.len().next_multiple_of(4), 0);
    }
}

/// A sequence of attributes, from a message or from another attribute.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct Attributes<'a>(pub(in crate::kernel) &'a [u8]);

impl<'a> Attributes<'a> {
    /// Returns the attributes in a message's payload, after the subsystem's header.
    pub(in crate::kernel) fn after_header(payload: &'a [u8]) -> Self {
        Self(payload.get(4..).unwrap_or_default())
    }

    /// Returns type and value of each attribute, up to the first damaged one.
    pub(in crate::kernel) fn iter(self) -> impl Iterator<Item = (c_int, &'a [u8])> {
        let mut bytes = self.0;
        std::iter::from_fn(move || {
            let [length @ .., kind_low, kind_high] = *bytes.first_chunk::<4>()?;
            let length = usize::from(u16::from_ne_bytes(length));
            let value = bytes.get(ATTRIBUTE_HEADER..length)?;
            bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
            Some((c_int::from(u16::from_ne_bytes([kind_low, kind_high]) & NLA_TYPE_MASK), value))
        })
    }

    /// Returns the value of the first attribute of this type.
    pub(in crate::kernel) fn get(self, kind: c_int) -> Option<&'a [u8]> {
        self.iter().find_map(|(found, value)| (found == kind).then_some(value))
    }

    pub(in crate::kernel) fn nested(self, kind: c_int) -> Option<Self> {
        self.get(kind).map(Self)
    }

    /// Returns a string without its terminating zero.
    pub(in crate::kernel) fn string(self, kind: c_int) -> Option<&'a str> {
        self.get(kind).and_then(string_of)
    }

    pub(in crate::kernel) fn be16(self, kind: c_int) -> Option<u16> {
        self.array(kind).map(u16::from_be_bytes)
    }

    pub(in crate::kernel) fn be32(self, kind: c_int) -> Option<u32> {
        self.array(kind).map(u32::from_be_bytes)
    }

    /// Returns a constant of the kernel, in 32 bits.
    pub(in crate::kernel) fn be_int(self, kind: c_int) -> Option<c_int> {
        self.array(kind).map(c_int::from_be_bytes)
    }

    pub(in crate::kernel) fn be64(self, kind: c_int) -> Option<u64> {
        self.array(kind).map(u64::from_be_bytes)
    }

    pub(in crate::kernel) fn ne16(self, kind: c_int) -> Option<u16> {
        self.array(kind).map(u16::from_ne_bytes)
    }

    pub(in crate::kernel) fn ne32(self, kind: c_int) -> Option<u32> {
        self.array(kind).map(u32::from_ne_bytes)
    }

    pub(in crate::kernel) fn ne64(self, kind: c_int) -> Option<u64> {
        self.array(kind).map(u64::from_ne_bytes)
    }

    /// Returns an address: 4 bytes of IPv4, or 16 bytes of IPv6.
    pub(in crate::kernel) fn address(self, kind: c_int) -> Option<IpAddr> {
        let v6 = || self.array::<16>(kind).map(IpAddr::from);
        v6().or_else(|| self.array::<4>(kind).map(IpAddr::from))
    }

    /// Returns the first bytes of a value.
    pub(in crate::kernel) fn array<const N: usize>(self, kind: c_int) -> Option<[u8; N]> {
        self.get(kind)?.first_chunk().copied()
    }
}

/// Returns a string without its terminating zero.
pub(in crate::kernel) fn string_of(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_back_without_their_padding() {
        let mut buffer = MessageBuffer::default();
        buffer.string(1, "abc");
        buffer.nested(3, |to| {
            to.bytes(7, &[1, 2, 3, 4, 5]);
            to.be32(8, 0x0102_0304);
        });
        let attributes = Attributes(buffer.as_bytes());
        assert_eq!(attributes.iter().next(), Some((1, &b"abc\0"[..])));
        assert_eq!(attributes.string(1), Some("abc"));
        let nested = attributes.nested(3).expect("it was written");
        assert_eq!(nested.get(7), Some(&[1, 2, 3, 4, 5][..]));
        assert_eq!(nested.be32(8), Some(0x0102_0304));
    }

    #[test]
    fn reading_ends_at_a_damaged_attribute() {
        for damaged in [&[9, 0, 1, 0, 1][..], &[2, 0, 1, 0], &[4, 0]] {
            assert_eq!(Attributes(damaged).iter().count(), 0);
        }
    }
}
