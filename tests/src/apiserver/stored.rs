//! An object with its encodings, each of which is made once.

use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use bytes::Bytes;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::protobuf;

/// An object, which never changes.
#[derive(Debug)]
pub(super) struct Stored {
    value: Value,
    json: OnceLock<Bytes>,
    json_item: OnceLock<Bytes>,
    /// The message, or why the object has none.
    message: OnceLock<Result<Bytes, String>>,
}

/// The fields of an item of a list, which has no `kind` and no `apiVersion`.
struct Item<'a>(&'a Map<String, Value>);

impl Stored {
    pub(super) fn new(value: Value) -> Self {
        Self { value, json: OnceLock::new(), json_item: OnceLock::new(), message: OnceLock::new() }
    }

    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    /// Returns the whole object as JSON.
    pub(super) fn json(&self) -> &Bytes {
        self.json.get_or_init(|| self.value.to_string().into())
    }

    /// Returns the object as JSON as it is in a list.
    pub(super) fn json_item(&self) -> Result<&Bytes> {
        if let Some(item) = self.json_item.get() {
            return Ok(item);
        }
        let fields = self.value.as_object().ok_or_else(|| anyhow!("{} is no object", self.value))?;
        let item = serde_json::to_vec(&Item(fields))?;
        Ok(self.json_item.get_or_init(|| item.into()))
    }

    /// Returns the object as protobuf as it is in a list: its message without an envelope.
    pub(super) fn message(&self) -> Result<&Bytes> {
        let encode = || protobuf::message(&self.value).map(Bytes::from).map_err(|error| format!("{error:#}"));
        self.message.get_or_init(encode).as_ref().map_err(|error| anyhow!("{error}"))
    }
}

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let is_of_item = |name: &str| name != "kind" && name != "apiVersion";
        serializer.collect_map(self.0.iter().filter(|(name, _)| is_of_item(name)))
    }
}
