//! A decoder of messages that knows no schema.

use anyhow::{Context as _, Result, bail};

/// A value with its field number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Returns the fields of a message in their order.
pub(super) fn fields(mut message: &[u8]) -> Result<Vec<(u64, Value<'_>)>> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let value = match key & 7 {
            0 => Value::Number(varint(&mut message)?),
            2 => {
                let length = usize::try_from(varint(&mut message)?)?;
                let (value, rest) = message.split_at_checked(length).context("the message is cut")?;
                message = rest;
                Value::Bytes(value)
            }
            other => bail!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    Ok(fields)
}

/// Returns all values at a path of field numbers.
pub(super) fn values<'a>(message: &'a [u8], path: &[u64]) -> Result<Vec<Value<'a>>> {
    let (wanted, rest) = path.split_first().context("a path")?;
    let here = fields(message)?.into_iter().filter(|(number, _)| number == wanted).map(|(_, value)| value);
    if rest.is_empty() {
        return Ok(here.collect());
    }
    let mut found = Vec::new();
    for value in here {
        let Value::Bytes(message) = value else { bail!("{value:?} is no message") };
        found.extend(values(message, rest)?);
    }
    Ok(found)
}

/// Returns all texts at a path of field numbers.
pub(super) fn texts<'a>(message: &'a [u8], path: &[u64]) -> Result<Vec<&'a str>> {
    let text = |value| match value {
        Value::Bytes(text) => Ok(std::str::from_utf8(text)?),
        Value::Number(number) => bail!("{number} is no text"),
    };
    values(message, path)?.into_iter().map(text).collect()
}

/// Returns all numbers at a path of field numbers.
pub(super) fn numbers(message: &[u8], path: &[u64]) -> Result<Vec<i64>> {
    let number = |value| match value {
        Value::Number(number) => Ok(number.cast_signed()),
        Value::Bytes(bytes) => bail!("{bytes:?} is no number"),
    };
    values(message, path)?.into_iter().map(number).collect()
}

/// Returns the type and the message of what has an envelope: `apiVersion`, `kind` and the bytes.
pub(super) fn unwrapped(body: &[u8]) -> Result<([&str; 2], &[u8])> {
    let unknown = body.strip_prefix(b"k8s\0").context("no prefix")?;
    let all = fields(unknown)?;
    let [(1, Value::Bytes(_)), (2, Value::Bytes(message)), (3, Value::Bytes(b"")), (4, Value::Bytes(b""))] =
        all[..]
    else {
        bail!("the envelope has {all:?}")
    };
    let type_meta = [texts(unknown, &[1, 1])?, texts(unknown, &[1, 2])?].concat();
    Ok((type_meta.try_into().ok().context("the type")?, message))
}

/// Returns the events of a watch: the type, and the object in its envelope.
pub(super) fn events(mut body: &[u8]) -> Result<Vec<(&str, &[u8])>> {
    let mut events = Vec::new();
    while let Some((length, rest)) = body.split_first_chunk() {
        let length = usize::try_from(u32::from_be_bytes(*length))?;
        let (event, rest) = rest.split_at_checked(length).context("the event is cut")?;
        body = rest;
        let event_type = texts(event, &[1])?.pop().context("a type")?;
        let Some(Value::Bytes(object)) = values(event, &[2, 1])?.pop() else { bail!("no object") };
        events.push((event_type, object));
    }
    anyhow::ensure!(body.is_empty(), "the length is cut");
    Ok(events)
}

fn varint(message: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = message.split_first().context("a varint is cut")?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    bail!("a varint has no end")
}
