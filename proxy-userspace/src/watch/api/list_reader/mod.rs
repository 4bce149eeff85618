//! Reads a list as its bytes come, so that no more than one item is in memory as bytes.

mod json;
mod protobuf;

use self::{json::JsonList, protobuf::ProtobufList};
use super::{
    failure::Failure,
    wire::{ListMetadata, Object},
};
use crate::net::ContentType;

/// Finds the items of a list in its bytes.
pub(super) enum ListReader {
    Json(JsonList),
    Protobuf(ProtobufList),
}

impl ListReader {
    pub(super) fn new(encoding: ContentType) -> Self {
        match encoding {
            ContentType::Json => Self::Json(JsonList::default()),
            ContentType::Protobuf => Self::Protobuf(ProtobufList::default()),
        }
    }

    /// Reads the next bytes, and calls `take` with each item that they complete.
    pub(super) fn read(&mut self, bytes: &[u8], mut take: impl FnMut(&Object<'_>)) -> Result<(), Failure> {
        match self {
            Self::Json(list) => list.read(bytes, |item| {
                take(&Object::Json(serde_json::from_slice(item).map_err(Failure::invalid)?));
                Ok(())
            }),
            Self::Protobuf(list) => list.read(bytes, |item| take(&Object::Protobuf(&item))),
        }
    }

    /// Returns the metadata of the list, once all bytes were read.
    pub(super) fn finish(self) -> Result<ListMetadata, Failure> {
        match self {
            Self::Json(list) => Ok(list.finish()?.metadata),
            Self::Protobuf(list) => list.finish(),
        }
    }
}
