//! A row of a table: one field of a message, in JSON and in protobuf.

/// The fields of a message, in the order of their numbers, which is the order in which the server
/// writes them.
pub(super) type Table = &'static [Field];

/// A field of a message.
#[derive(Debug)]
pub(super) struct Field {
    /// The name in JSON.
    pub(super) name: &'static str,
    /// The number in protobuf.
    pub(super) number: u32,
    pub(super) presence: Presence,
    pub(super) value: Type,
}

/// How often a field is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// Always, also if JSON does not have it: a field that is no pointer in Go.
    Required,
    /// If JSON has it: a pointer in Go.
    Optional,
    /// Once for each element of a list.
    Repeated,
    /// Once for each entry of a map from text, in the order of the keys.
    Map,
    /// Never, because the envelope has it: `kind` and `apiVersion` of an object.
    InEnvelope,
}

/// The type of a value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Type {
    Text,
    /// int32 or int64.
    Number,
    /// bool.
    Flag,
    /// RFC 3339 in JSON, seconds and nanoseconds in protobuf.
    Time,
    /// A number or a text.
    IntOrString,
    /// A text in JSON, a message with a text in protobuf.
    Quantity,
    /// A message that holds its JSON text: `FieldsV1`.
    RawJson,
    Message(Table),
}

impl Field {
    const fn new(number: u32, name: &'static str, presence: Presence, value: Type) -> Self {
        Self { name, number, presence, value }
    }
}

pub(super) const fn required(number: u32, name: &'static str, value: Type) -> Field {
    Field::new(number, name, Presence::Required, value)
}

pub(super) const fn optional(number: u32, name: &'static str, value: Type) -> Field {
    Field::new(number, name, Presence::Optional, value)
}

pub(super) const fn repeated(number: u32, name: &'static str, value: Type) -> Field {
    Field::new(number, name, Presence::Repeated, value)
}

pub(super) const fn map(number: u32, name: &'static str, value: Type) -> Field {
    Field::new(number, name, Presence::Map, value)
}

pub(super) const KIND: Field = Field::new(0, "kind", Presence::InEnvelope, Type::Text);
pub(super) const API_VERSION: Field = Field::new(0, "apiVersion", Presence::InEnvelope, Type::Text);
