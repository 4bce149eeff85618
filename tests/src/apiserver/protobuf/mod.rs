//! Kubernetes' protobuf encoding of objects, lists and events of watches
//! (`serializer/protobuf` of `k8s.io/apimachinery`).

mod encoder;
mod table;
mod tables;
mod wire;

#[cfg(test)]
mod tests;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// What each object, list and Status begins with.
const PREFIX: &[u8] = b"k8s\0";
/// The bytes that a list item has besides its message: the key and the longest length.
const ITEM_OVERHEAD: usize = 6;

/// Returns the message of an object, without its kind and its envelope.
pub(super) fn message(object: &Value) -> Result<Vec<u8>> {
    let kind = text(object, "kind")?;
    let table = tables::of_kind(kind).with_context(|| format!("no table for the kind {kind}"))?;
    let name = &object["metadata"]["name"];
    encoder::message(table, object).with_context(|| format!("cannot encode the {kind} {name}"))
}

/// Returns the prefix and the envelope (`runtime.Unknown`) with the message of an object in it.
pub(super) fn enveloped(object: &Value, message: &[u8]) -> Result<Vec<u8>> {
    Ok(envelope(text(object, "apiVersion")?, text(object, "kind")?, message))
}

/// Returns a list in its envelope. `items` are messages.
pub(super) fn list<'a>(
    api_version: &str,
    kind: &str,
    metadata: &Value,
    items: impl Iterator<Item = &'a [u8]> + Clone,
) -> Result<Vec<u8>> {
    let metadata = encoder::message(tables::LIST_META, metadata)?;
    let of_items: usize = items.clone().map(|item| item.len() + ITEM_OVERHEAD).sum();
    let mut list = Vec::with_capacity(metadata.len() + ITEM_OVERHEAD + of_items);
    wire::bytes(&mut list, 1, &metadata);
    items.for_each(|item| wire::bytes(&mut list, 2, item));
    Ok(envelope(api_version, kind, &list))
}

/// Returns an event of a watch behind its length. `object` is in its envelope.
pub(super) fn event(event_type: &str, object: &[u8]) -> Result<Vec<u8>> {
    let mut extension = Vec::new();
    wire::bytes(&mut extension, 1, object);
    let mut event = Vec::new();
    wire::bytes(&mut event, 1, event_type.as_bytes());
    wire::bytes(&mut event, 2, &extension);
    let length = u32::try_from(event.len()).context("the length of an event")?;
    Ok([&length.to_be_bytes(), &*event].concat())
}

fn envelope(api_version: &str, kind: &str, message: &[u8]) -> Vec<u8> {
    let mut type_meta = Vec::new();
    wire::bytes(&mut type_meta, 1, api_version.as_bytes());
    wire::bytes(&mut type_meta, 2, kind.as_bytes());
    let mut out = Vec::with_capacity(message.len() + 128);
    out.extend_from_slice(PREFIX);
    wire::bytes(&mut out, 1, &type_meta);
    wire::bytes(&mut out, 2, message);
    // The encoding and the content type are empty, but the server writes them.
    wire::bytes(&mut out, 3, b"");
    wire::bytes(&mut out, 4, b"");
    out
}

fn text<'a>(object: &'a Value, name: &str) -> Result<&'a str> {
    object[name].as_str().with_context(|| format!("an object without {name}"))
}
