//! Reads JSON values one after the other, and hands over each item of a list as soon as it is read.
//! As with kubectl, a line `---` may separate two values.

use std::{
    cell::Cell,
    fmt,
    io::{self, BufRead, Read},
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

/// Starts a line between two values.
const MARKER: &str = "---";

/// Reads all values. After a syntax error, the next value starts behind the next line `---`.
pub(super) fn read(mut reader: impl BufRead, sink: &mut impl Sink) {
    let position = Position::default();
    loop {
        let input = Input { reader: &mut reader, position: &position };
        let Err(error) = read_values(input, &position, sink) else { return };
        sink.fail("", error);
        match skip_to_marker(&mut reader, &position) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return sink.fail("", error.to_string()),
        }
    }
}

/// Reads values until the end or a syntax error, which it returns.
fn read_values(input: impl Read, position: &Position, sink: &mut impl Sink) -> Result<(), String> {
    let mut values = serde_json::Deserializer::from_reader(input);
    loop {
        position.is_between.set(true);
        position.unread.set(MAX_SIZE);
        if values.end().is_ok() {
            return Ok(());
        }
        position.is_between.set(false);
        let line = 1 + position.lines.get();
        sink.start_document(line);
        match values.deserialize_any(Place { sink, position, header: None }) {
            Ok(value) => sink.end_document(value.unwrap_or_default()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Skips everything up to the next line that starts with `---`, and these three characters. Returns
/// false if there is none.
fn skip_to_marker(reader: &mut impl BufRead, position: &Position) -> io::Result<bool> {
    let mut bytes = reader.bytes();
    // The syntax error may be that a value has no end before the line, of which a part is read then.
    while position.dashes.get() != MARKER.len() {
        let Some(byte) = bytes.next() else { return Ok(false) };
        position.pass(byte?);
    }
    Ok(true)
}

/// Where the reader is.
#[derive(Default)]
struct Position {
    /// The number of line ends so far.
    lines: Cell<usize>,
    /// The number of bytes since the last line end.
    column: Cell<usize>,
    /// The number of bytes since the last line end if all of them are `-`, or 0.
    dashes: Cell<usize>,
    /// The reader is not in a value, so a line may start with the marker.
    is_between: Cell<bool>,
    /// How many bytes may be read before an object must be complete.
    unread: Cell<u64>,
}

impl Position {
    /// Moves behind a byte. Returns a blank in the place of a byte of the marker. If the marker is
    /// not complete, returns one of its bytes, with which no value can start.
    fn pass(&self, byte: u8) -> u8 {
        let (column, dashes) = (self.column.get(), self.dashes.get());
        let is_end = byte == b'\n';
        let is_dash = byte == b'-' && dashes == column;
        self.lines.set(self.lines.get() + usize::from(is_end));
        self.column.set(if is_end { 0 } else { column + 1 });
        self.dashes.set(if is_dash { dashes + 1 } else { 0 });
        if !self.is_between.get() {
            byte
        } else if is_dash && dashes < MARKER.len() {
            b' '
        } else if !is_dash && (1..MARKER.len()).contains(&dashes) {
            b'-'
        } else {
            byte
        }
    }
}

/// Keeps the position, and limits the size of an object. `serde_json` reads byte by byte, so that
/// the position is exact.
struct Input<'a, R> {
    reader: R,
    position: &'a Position,
}

impl<R: Read> Read for Input<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.reader.read(buffer)?;
        for byte in &mut buffer[..length] {
            *byte = self.position.pass(*byte);
        }
        let unread = &self.position.unread;
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
