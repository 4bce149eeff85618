//! Writes the wire format of protobuf: keys, varints, and values with a length.

/// The wire type of a varint.
const VARINT: u32 = 0;
/// The wire type of a value with a length: texts, bytes and messages.
const LENGTH_DELIMITED: u32 = 2;

/// Appends a varint: seven bits in a byte, the lowest first.
fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(low_byte(value) | 0x80);
        value >>= 7;
    }
    out.push(low_byte(value));
}

fn low_byte(value: u64) -> u8 {
    value.to_le_bytes()[0]
}

/// Appends a number field. A negative number has ten bytes, as int32 and int64 have.
pub(super) fn number(out: &mut Vec<u8>, field: u32, value: i64) {
    varint(out, u64::from(field << 3 | VARINT));
    varint(out, value.cast_unsigned());
}

/// Appends a field of text, bytes or a message.
pub(super) fn bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    varint(out, u64::from(field << 3 | LENGTH_DELIMITED));
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}
