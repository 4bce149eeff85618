//! Encodes a JSON object as the message of a table.

use anyhow::{Context as _, Result, bail};
use jiff::Timestamp;
use serde_json::Value;

use super::{
    table::{Field, Presence, Type},
    wire,
};

/// Returns the message. A missing object is an object without fields, as in the server. A field
/// that the table does not have is an error, so that nothing is lost unnoticed.
pub(super) fn message(table: &[Field], object: &Value) -> Result<Vec<u8>> {
    if !object.is_object() && !object.is_null() {
        bail!("{object} is no object");
    }
    let fields = object.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    for (name, _) in fields {
        if !table.iter().any(|field| field.name == name) {
            bail!("the table has no field {name}");
        }
    }
    let mut out = Vec::new();
    for field in table {
        write_field(&mut out, field, &object[field.name]).context(field.name)?;
    }
    Ok(out)
}

/// Appends a field. Null is the same as an absent field.
fn write_field(out: &mut Vec<u8>, field: &Field, value: &Value) -> Result<()> {
    let number = field.number;
    match field.presence {
        Presence::InEnvelope => Ok(()),
        Presence::Required => write_value(out, number, field.value, value),
        _ if value.is_null() => Ok(()),
        Presence::Optional => write_value(out, number, field.value, value),
        Presence::Repeated => {
            let elements = value.as_array().with_context(|| format!("{value} is no list"))?;
            elements.iter().try_for_each(|element| write_value(out, number, field.value, element))
        }
        Presence::Map => write_map(out, number, field.value, value),
    }
}

/// Appends a map: each entry is a message of a key and a value.
fn write_map(out: &mut Vec<u8>, number: u32, of_values: Type, map: &Value) -> Result<()> {
    let map = map.as_object().with_context(|| format!("{map} is no map"))?;
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    for (key, value) in entries {
        let mut entry = Vec::new();
        wire::bytes(&mut entry, 1, key.as_bytes());
        write_value(&mut entry, 2, of_values, value).with_context(|| key.clone())?;
        wire::bytes(out, number, &entry);
    }
    Ok(())
}

/// Appends a value. Null is the zero value of the type.
fn write_value(out: &mut Vec<u8>, number: u32, of: Type, value: &Value) -> Result<()> {
    match of {
        Type::Text => wire::bytes(out, number, text(value)?.as_bytes()),
        Type::Number | Type::Flag => write_number(out, number, value)?,
        Type::Time => wire::bytes(out, number, &time(value)?),
        Type::IntOrString => wire::bytes(out, number, &int_or_string(value)?),
        Type::Quantity => wire::bytes(out, number, &with_bytes(text(value)?.as_bytes())),
        Type::RawJson => wire::bytes(out, number, &with_bytes(value.to_string().as_bytes())),
        Type::Message(table) => wire::bytes(out, number, &message(table, value)?),
    }
    Ok(())
}

fn text(value: &Value) -> Result<&str> {
    match value {
        Value::Null => Ok(""),
        Value::String(text) => Ok(text),
        value => bail!("{value} is no text"),
    }
}

/// Appends a number or a flag. A text is written as a text. That makes a bad field in protobuf of
/// what is a bad field in JSON, for tests with bad objects.
fn write_number(out: &mut Vec<u8>, number: u32, value: &Value) -> Result<()> {
    match value {
        Value::String(text) => wire::bytes(out, number, text.as_bytes()),
        value => wire::number(out, number, integer(value)?),
    }
    Ok(())
}

fn integer(value: &Value) -> Result<i64> {
    match value {
        Value::Null => Ok(0),
        Value::Bool(flag) => Ok((*flag).into()),
        value => value.as_i64().with_context(|| format!("{value} is no integer")),
    }
}

/// Returns a `Time`. The zero value is an empty message.
fn time(value: &Value) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    if !value.is_null() {
        let time: Timestamp = text(value)?.parse().with_context(|| format!("{value} is no time"))?;
        wire::number(&mut out, 1, time.as_second());
        wire::number(&mut out, 2, time.subsec_nanosecond().into());
    }
    Ok(out)
}

/// Returns an `IntOrString`: the type, the number and the text, of which one is zero.
fn int_or_string(value: &Value) -> Result<Vec<u8>> {
    let (is_text, number, text) = match value {
        Value::String(text) => (1, 0, &**text),
        value => (0, integer(value)?, ""),
    };
    let mut out = Vec::new();
    wire::number(&mut out, 1, is_text);
    wire::number(&mut out, 2, number);
    wire::bytes(&mut out, 3, text.as_bytes());
    Ok(out)
}

/// Returns a message with these bytes as its field 1.
fn with_bytes(value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    wire::bytes(&mut out, 1, value);
    out
}
