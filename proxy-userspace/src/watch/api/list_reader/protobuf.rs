//! Finds the items of a list in protobuf: `k8s\0`, and the message `Unknown`. Its field `raw` is
//! the list, which has metadata and items.

use bytes::{Buf as _, Bytes, BytesMut};
use prost::Message as _;

use super::super::{
    failure::Failure,
    wire::{ListMetadata, MAX_MESSAGE, PROTOBUF_PREFIX},
};

/// The field of `Unknown` with the list.
const RAW: usize = 2;
/// The fields of a list, which are the same for each kind.
const METADATA: usize = 1;
const ITEMS: usize = 2;
/// The wire type of text, bytes and messages. These envelopes have no other fields.
const LENGTH_DELIMITED: usize = 2;
/// The most bytes of a varint.
const MAX_VARINT: usize = 10;

/// A list in protobuf.
#[derive(Default)]
pub(in crate::watch::api) struct ProtobufList {
    /// The bytes that are not read yet.
    pending: BytesMut,
    place: Place,
    metadata: ListMetadata,
}

/// Where the next field is.
#[derive(Default)]
enum Place {
    #[default]
    BeforePrefix,
    /// In the envelope, before the list.
    BeforeList,
    /// So many bytes of the list are to come.
    InList(usize),
    /// In the envelope, after the list.
    AfterList,
}

/// The key and the length of a field.
struct Head {
    number: usize,
    /// The bytes of the key and the length.
    size: usize,
    /// The bytes of the value.
    length: usize,
}

impl ProtobufList {
    /// Reads the next bytes, and calls `take` with each item that they complete.
    pub(super) fn read(&mut self, bytes: &[u8], mut take: impl FnMut(Bytes)) -> Result<(), Failure> {
        self.pending.extend_from_slice(bytes);
        while self.read_field(&mut take)? {}
        Ok(())
    }

    /// Returns the metadata of the list, once all bytes were read.
    pub(super) fn finish(self) -> Result<ListMetadata, Failure> {
        if matches!(self.place, Place::AfterList) && self.pending.is_empty() {
            Ok(self.metadata)
        } else {
            Err(Failure::invalid("the list ends within a field"))
        }
    }

    /// Reads a field. Returns false if more bytes must come first.
    fn read_field(&mut self, take: &mut impl FnMut(Bytes)) -> Result<bool, Failure> {
        match self.place {
            Place::BeforePrefix => self.read_prefix(),
            Place::BeforeList | Place::AfterList => {
                let Some(head) = Head::decode(&self.pending)? else { return Ok(false) };
                if head.number != RAW || matches!(self.place, Place::AfterList) {
                    return Ok(self.value(&head).is_some());
                }
                self.pending.advance(head.size);
                self.enter(head.length);
                Ok(true)
            }
            Place::InList(left) => {
                let Some(head) = Head::decode(&self.pending)? else { return Ok(false) };
                if head.length > MAX_MESSAGE {
                    let length = head.length;
                    return Err(Failure::invalid(format!(
                        "an object has {length} bytes; the limit is {MAX_MESSAGE}"
                    )));
                }
                let left = left.checked_sub(head.size + head.length);
                let left = left.ok_or_else(|| Failure::invalid("a field is longer than its list"))?;
                let Some(value) = self.value(&head) else { return Ok(false) };
                match head.number {
                    METADATA => self.metadata = ListMetadata::decode(value).map_err(Failure::invalid)?,
                    ITEMS => take(value),
                    _ => {}
                }
                self.enter(left);
                Ok(true)
            }
        }
    }

    fn read_prefix(&mut self) -> Result<bool, Failure> {
        let known = self.pending.len().min(PROTOBUF_PREFIX.len());
        if self.pending[..known] != PROTOBUF_PREFIX[..known] {
            return Err(Failure::invalid("protobuf without the prefix \"k8s\""));
        }
        if known < PROTOBUF_PREFIX.len() {
            return Ok(false);
        }
        self.pending.advance(known);
        self.place = Place::BeforeList;
        Ok(true)
    }

    /// Continues in the list, of which so many bytes are to come.
    fn enter(&mut self, left: usize) {
        self.place = if left == 0 { Place::AfterList } else { Place::InList(left) };
    }

    /// Takes the value of a field, once all of its bytes are there.
    fn value(&mut self, head: &Head) -> Option<Bytes> {
        let end = head.size + head.length;
        (self.pending.len() >= end).then(|| self.pending.split_to(end).freeze().split_off(head.size))
    }
}

impl Head {
    /// Decodes a key and a length. None if more bytes must come first.
    fn decode(bytes: &[u8]) -> Result<Option<Self>, Failure> {
        let Some((key, key_size)) = varint(bytes)? else { return Ok(None) };
        let Some((length, length_size)) = varint(&bytes[key_size..])? else { return Ok(None) };
        if key & 7 != LENGTH_DELIMITED {
            return Err(Failure::invalid(format!(
                "field {} of a list has the wire type {}",
                key >> 3,
                key & 7
            )));
        }
        if length > isize::MAX as usize / 2 {
            return Err(Failure::invalid(format!("a field has {length} bytes")));
        }
        Ok(Some(Self { number: key >> 3, size: key_size + length_size, length }))
    }
}

/// Decodes a varint, and returns its size too. None if more bytes must come first.
fn varint(bytes: &[u8]) -> Result<Option<(usize, usize)>, Failure> {
    let Some(last) = bytes.iter().take(MAX_VARINT).position(|byte| *byte < 0x80) else {
        return if bytes.len() < MAX_VARINT {
            Ok(None)
        } else {
            Err(Failure::invalid("a number of more than ten bytes"))
        };
    };
    // prost calls this the delimiter of a length; a key has the same form.
    let value = prost::decode_length_delimiter(&bytes[..=last]).map_err(Failure::invalid)?;
    Ok(Some((value, last + 1)))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[derive(Message)]
    struct List {
        #[prost(message, optional, tag = "1")]
        metadata: Option<ListMetadata>,
        #[prost(bytes = "vec", repeated, tag = "2")]
        items: Vec<Vec<u8>>,
        #[prost(string, tag = "9")]
        later: String,
    }

    #[derive(Message)]
    struct Unknown {
        #[prost(string, tag = "1")]
        type_meta: String,
        #[prost(bytes = "vec", tag = "2")]
        raw: Vec<u8>,
        #[prost(string, tag = "4")]
        content_type: String,
    }

    fn list(items: &[Vec<u8>]) -> Vec<u8> {
        let metadata =
            ListMetadata { resource_version: Some("7".to_owned()), continue_token: Some("x".to_owned()) };
        let list = List { metadata: Some(metadata), items: items.to_vec(), later: "?".to_owned() };
        let unknown = Unknown {
            type_meta: "v1".to_owned(),
            raw: list.encode_to_vec(),
            content_type: "none".to_owned(),
        };
        [PROTOBUF_PREFIX, &unknown.encode_to_vec()].concat()
    }

    /// Reads a list in parts of this size.
    fn read(list: &[u8], size: usize) -> Result<(Vec<Vec<u8>>, ListMetadata), Failure> {
        let (mut reader, mut items) = (ProtobufList::default(), Vec::new());
        for part in list.chunks(size) {
            reader.read(part, |item| items.push(item.to_vec()))?;
        }
        Ok((items, reader.finish()?))
    }

    #[test]
    fn items_are_found_however_the_bytes_are_split() {
        let items = [vec![], b"one".to_vec(), vec![0xff; 300], b"k8s\0".to_vec()];
        let bytes = list(&items);
        for size in [1, 2, 3, 7, 1000] {
            let (read, metadata) = read(&bytes, size).expect("a list");
            assert_eq!(read, items, "{size}");
            assert_eq!(metadata.resource_version.as_deref(), Some("7"));
            assert_eq!(metadata.continue_token.as_deref(), Some("x"));
        }
        assert!(read(&list(&[]), 5).expect("an empty list").0.is_empty());
    }

    #[test]
    fn bytes_without_a_list_are_refused() {
        let whole = list(&[b"one".to_vec()]);
        for end in 0..whole.len() {
            // Only the fields of the envelope that follow the list may be missing: `content_type`.
            assert_eq!(read(&whole[..end], 3).is_ok(), end == whole.len() - 6, "{end}");
        }
        let longer_than_the_list = [PROTOBUF_PREFIX, &[0x12, 2, 0x12, 9]].concat();
        let wrong_wire_type = [PROTOBUF_PREFIX, &[0x08, 1]].concat();
        let endless_number = [PROTOBUF_PREFIX, &[0xff; 11]].concat();
        let too_long =
            [PROTOBUF_PREFIX, &[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]].concat();
        let large = [PROTOBUF_PREFIX, &[0x12, 0xff, 0xff, 0xff, 0x7f, 0x12, 0xff, 0xff, 0xff, 0x0f]].concat();
        for bytes in [
            &large,
            &b"<html>"[..],
            b"k8x\0",
            &longer_than_the_list,
            &wrong_wire_type,
            &endless_number,
            &too_long,
        ] {
            assert!(read(bytes, 5).is_err(), "{bytes:?}");
        }
    }
}
