//! Reads JSON values one after the other, and hands over each item of a list as soon as it is read.

use std::{
    cell::Cell,
    fmt,
    io::{self, Read},
};

use serde::{
    Deserialize as _,
    de::{
        DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};
use serde_json::{Map, Value};

use super::documents::{MAX_SIZE, Sink};

/// Reads all values. The text after a syntax error cannot be split into values.
pub(super) fn read(reader: impl Read, sink: &mut impl Sink) {
    let position = Position { lines: Cell::new(0), unread: Cell::new(MAX_SIZE) };
    let mut values = serde_json::Deserializer::from_reader(Input { reader, position: &position });
    while values.end().is_err() {
        sink.start_document(1 + position.lines.get());
        position.unread.set(MAX_SIZE);
        match values.deserialize_any(Place { sink, position: &position, header: None }) {
            Ok(value) => sink.end_document(value.unwrap_or_default()),
            Err(error) => return sink.fail("", error.to_string()),
        }
    }
}

/// Where the reader is.
struct Position {
    /// The number of line ends so far.
    lines: Cell<usize>,
    /// How many bytes may be read before an object must be complete.
    unread: Cell<u64>,
}

/// Counts lines, and limits the size of an object. `serde_json` reads byte by byte, so that the
/// position is exact.
struct Input<'a, R> {
    reader: R,
    position: &'a Position,
}

impl<R: Read> Read for Input<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.reader.read(buffer)?;
        let Position { lines, unread } = self.position;
        lines.set(lines.get() + buffer[..length].split(|byte| *byte == b'\n').count() - 1);
        let rest = unread.get().checked_sub(length as u64);
        let too_large = || io::Error::other(format!("an object is larger than {MAX_SIZE} bytes"));
        unread.set(rest.ok_or_else(too_large)?);
        Ok(length)
    }
}

/// A place of the document: its root, or its field `items`. Yields the value there, none for a list
/// of items, which the sink has got.
struct Place<'a, S> {
    sink: &'a mut S,
    position: &'a Position,
    /// The fields before `items`; none at the root.
    header: Option<&'a Map<String, Value>>,
}

impl<'de, S: Sink> DeserializeSeed<'de> for Place<'_, S> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: Sink> Visitor<'de> for Place<'_, S> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        if self.header.is_some() {
            return Value::deserialize(MapAccessDeserializer::new(fields)).map(Some);
        }
        let mut header = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let value = if name == "items" {
                header.remove("items");
                self.sink.forget_items();
                let place = Place { sink: self.sink, position: self.position, header: Some(&header) };
                fields.next_value_seed(place)?
            } else {
                fields.next_value().map(Some)?
            };
            header.extend(value.map(|value| (name, value)));
        }
        Ok(Some(Value::Object(header)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let Some(header) = self.header else {
            return Value::deserialize(SeqAccessDeserializer::new(items)).map(Some);
        };
        self.sink.start_items();
        self.position.unread.set(MAX_SIZE);
        while let Some(item) = items.next_element()? {
            self.sink.item(header, item);
            self.position.unread.set(MAX_SIZE);
        }
        Ok(None)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Some(value.into()))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Some(Value::Null))
    }
}
