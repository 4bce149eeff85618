//! Decodes messages of protobuf whose text borrows from the bytes of the message.
//!
//! Messages of prost own their text. To decode the lists of a large cluster would take millions of
//! allocations, nearly all of them freed at once, which is most of the time of a restart. So only
//! the primitives of prost's encoding are used here.

use std::{
    borrow::Cow,
    str::{self, Utf8Error},
};

#[cfg(test)]
use prost::encoding::{encode_key, encode_varint};
use prost::{
    DecodeError,
    encoding::{DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field},
};
use smallvec::SmallVec;

/// The text of a field. Decoded from protobuf, it borrows from the object's bytes.
pub(in crate::watch) type Text<'a> = Cow<'a, str>;

/// Bytes of a field, which may be no text.
pub(in crate::watch) type Bytes<'a> = Cow<'a, [u8]>;

/// A list that nearly always has one entry. One entry takes no allocation.
pub(in crate::watch) type MostlyOne<T> = SmallVec<[T; 1]>;

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
pub(in crate::watch) enum MessageError {
    /// The bytes are no fields, or a field has another type.
    #[error(transparent)]
    Encoding(#[from] DecodeError),
    /// Text is not UTF-8.
    #[error("text is not UTF-8: {0}")]
    Text(#[from] Utf8Error),
    /// A length exceeds the bytes that are there.
    #[error("a field is longer than its message")]
    Length,
    /// A field of a message is invalid.
    #[error("{0}: {1}")]
    Field(&'static str, Box<Self>),
}

impl MessageError {
    /// Returns the error of a message with this field.
    pub(in crate::watch) fn within(self, field: &'static str) -> Self {
        Self::Field(field, self.into())
    }
}

/// A message: the fields that are used, of which each may be absent. Other fields are skipped.
pub(in crate::watch) trait Message<'a>: Default {
    /// Reads a field, of which only the key was read.
    fn read_field(&mut self, tag: u32, wire_type: WireType, bytes: &mut &'a [u8])
    -> Result<(), MessageError>;

    /// Encodes all fields.
    #[cfg(test)]
    fn encode(&self) -> Vec<u8>;

    /// Decodes a message without its length.
    fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut message = Self::default();
        message.read_fields(bytes)?;
        Ok(message)
    }

    /// Reads all fields.
    fn read_fields(&mut self, mut bytes: &'a [u8]) -> Result<(), MessageError> {
        while !bytes.is_empty() {
            let (tag, wire_type) = decode_key(&mut bytes)?;
            self.read_field(tag, wire_type, &mut bytes)?;
        }
        Ok(())
    }
}

/// The value of a field.
pub(in crate::watch) trait Value<'a>: Default {
    /// Reads a value behind its key. If the field is repeated, the last value counts, as protobuf
    /// requires; lists get another entry, and messages get fields.
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError>;

    /// Writes the field.
    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>);
}

impl<'a> Value<'a> for Text<'a> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        *self = Cow::Borrowed(str::from_utf8(delimited(wire_type, bytes)?)?);
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        write_delimited(self.as_bytes(), tag, out);
    }
}

impl<'a> Value<'a> for Bytes<'a> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        *self = Cow::Borrowed(delimited(wire_type, bytes)?);
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        write_delimited(self, tag, out);
    }
}

impl<'a> Value<'a> for &'a [u8] {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        *self = delimited(wire_type, bytes)?;
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        write_delimited(self, tag, out);
    }
}

impl<'a> Value<'a> for i64 {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        check_wire_type(WireType::Varint, wire_type)?;
        *self = decode_varint(bytes)?.cast_signed();
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        encode_key(tag, WireType::Varint, out);
        encode_varint(self.cast_unsigned(), out);
    }
}

impl<'a> Value<'a> for bool {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        let mut number = 0_i64;
        number.read(wire_type, bytes)?;
        *self = number != 0;
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        i64::from(*self).write(tag, out);
    }
}

impl<'a, V: Value<'a>> Value<'a> for Option<V> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        self.get_or_insert_default().read(wire_type, bytes)
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        if let Some(value) = self {
            value.write(tag, out);
        }
    }
}

impl<'a, V: Value<'a>> Value<'a> for Vec<V> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        // Entries are large, so each is read in place.
        self.push_mut(V::default()).read(wire_type, bytes)
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        write_each(self, tag, out);
    }
}

impl<'a, V: Value<'a>> Value<'a> for MostlyOne<V> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        let mut value = V::default();
        value.read(wire_type, bytes)?;
        self.push(value);
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        write_each(self, tag, out);
    }
}

/// Reads a length and as many bytes.
pub(in crate::watch) fn delimited<'a>(
    wire_type: WireType,
    bytes: &mut &'a [u8],
) -> Result<&'a [u8], MessageError> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let length = usize::try_from(decode_varint(bytes)?).map_err(|_| MessageError::Length)?;
    let (value, rest) = bytes.split_at_checked(length).ok_or(MessageError::Length)?;
    *bytes = rest;
    Ok(value)
}

/// Skips a field that is not used.
pub(in crate::watch) fn skip(tag: u32, wire_type: WireType, bytes: &mut &[u8]) -> Result<(), MessageError> {
    Ok(skip_field(wire_type, tag, bytes, DecodeContext::default())?)
}

#[cfg(test)]
fn write_each<'a, V: Value<'a>>(values: &[V], tag: u32, out: &mut Vec<u8>) {
    for value in values {
        value.write(tag, out);
    }
}

#[cfg(test)]
pub(in crate::watch) fn write_delimited(value: &[u8], tag: u32, out: &mut Vec<u8>) {
    encode_key(tag, WireType::LengthDelimited, out);
    encode_varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

/// Implements [`Message`] and [`Value`] for a struct: the fields with their numbers.
macro_rules! message {
    ($name:ident $(<$life:lifetime>)? { $($field:ident = $tag:literal),* $(,)? }) => {
        impl<'a> $crate::watch::decode::message::Message<'a> for $name $(<$life>)? {
            fn read_field(
                &mut self,
                tag: u32,
                wire_type: prost::encoding::WireType,
                bytes: &mut &'a [u8],
            ) -> Result<(), $crate::watch::decode::message::MessageError> {
                match tag {
                    $($tag => $crate::watch::decode::message::Value::read(&mut self.$field, wire_type, bytes)
                        .map_err(|error| error.within(concat!(stringify!($name), ".", stringify!($field)))),)*
                    _ => $crate::watch::decode::message::skip(tag, wire_type, bytes),
                }
            }

            #[cfg(test)]
            fn encode(&self) -> Vec<u8> {
                let out = &mut Vec::new();
                $($crate::watch::decode::message::Value::write(&self.$field, $tag, out);)*
                std::mem::take(out)
            }
        }

        impl<'a> $crate::watch::decode::message::Value<'a> for $name $(<$life>)? {
            fn read(
                &mut self,
                wire_type: prost::encoding::WireType,
                bytes: &mut &'a [u8],
            ) -> Result<(), $crate::watch::decode::message::MessageError> {
                use $crate::watch::decode::message::{self, Message};
                self.read_fields(message::delimited(wire_type, bytes)?)
            }

            #[cfg(test)]
            fn write(&self, tag: u32, out: &mut Vec<u8>) {
                use $crate::watch::decode::message::{self, Message};
                message::write_delimited(&self.encode(), tag, out);
            }
        }
    };
}
pub(in crate::watch) use message;
