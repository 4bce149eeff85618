//! The envelopes of lists and watches, as JSON and as protobuf. Objects stay bytes: each is decoded
//! on its own, so that one object which cannot be decoded affects no other.

use std::borrow::Cow;

use http::HeaderValue;
use prost::Message;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::failure::Failure;
use crate::{
    model::SharedValues,
    net::ContentType,
    watch::decode::{
        self, Decoded, Kind, Problem, RawMetadata,
        message::{self, Text, message},
    },
};

/// The first bytes of each whole message of protobuf (`protobuf.go` in `k8s.io/apimachinery`).
pub(super) const PROTOBUF_PREFIX: &[u8] = b"k8s\0";
/// The longest event or object of protobuf in bytes, ten times the largest object that etcd stores.
pub(super) const MAX_MESSAGE: usize = 16 << 20;

/// Returns the encoding of a response with this `Content-Type`. Without one it is JSON.
pub(super) fn encoding_of(content_type: Option<&HeaderValue>) -> ContentType {
    let text = content_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
    ContentType::named(text).unwrap_or(ContentType::Json)
}

/// `metadata` of a list.
#[derive(Deserialize, Message)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListMetadata {
    #[prost(string, optional, tag = "2")]
    pub(super) resource_version: Option<String>,
    #[serde(rename = "continue")]
    #[prost(string, optional, tag = "3")]
    pub(super) continue_token: Option<String>,
}

/// An event of a watch.
pub(super) struct Event<'a> {
    pub(super) event_type: Cow<'a, str>,
    pub(super) object: Object<'a>,
}

/// An object that is not decoded yet.
pub(super) enum Object<'a> {
    Json(&'a RawValue),
    /// A message of the object's kind, without an envelope.
    Protobuf(&'a [u8]),
}

/// The `Status` of a failure.
#[derive(Deserialize, Message)]
#[serde(default)]
pub(super) struct Status {
    #[prost(int32, tag = "6")]
    pub(super) code: i32,
    #[prost(string, tag = "3")]
    pub(super) message: String,
}

/// A line of a watch.
#[derive(Deserialize)]
struct JsonEvent<'a> {
    #[serde(rename = "type")]
    event_type: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// `WatchEvent` of `k8s.io/apimachinery/pkg/apis/meta/v1`.
#[derive(Default)]
struct ProtobufEvent<'a> {
    event_type: Text<'a>,
    object: Option<RawExtension<'a>>,
}
message!(ProtobufEvent<'a> { event_type = 1, object = 2 });

/// `RawExtension` of `k8s.io/apimachinery/pkg/runtime`.
#[derive(Default)]
struct RawExtension<'a> {
    raw: &'a [u8],
}
message!(RawExtension<'a> { raw = 1 });

/// `Unknown` of `k8s.io/apimachinery/pkg/runtime`, the envelope of each object.
#[derive(Default)]
struct Envelope<'a> {
    raw: &'a [u8],
}
message!(Envelope<'a> { raw = 2 });

impl<'a> Event<'a> {
    /// Decodes the envelope of an event.
    pub(super) fn decode(bytes: &'a [u8], encoding: ContentType) -> Result<Self, Failure> {
        if encoding == ContentType::Json {
            let JsonEvent { event_type, object } = serde_json::from_slice(bytes).map_err(Failure::invalid)?;
            return Ok(Self { event_type: event_type.into(), object: Object::Json(object) });
        }
        let ProtobufEvent { event_type, object } =
            message::Message::decode(bytes).map_err(Failure::invalid)?;
        let object = object.ok_or_else(|| Failure::invalid("an event without an object"))?;
        Ok(Self { event_type, object: Object::Protobuf(without_envelope(object.raw)?) })
    }
}

impl Object<'_> {
    /// Decodes the object. Values that many objects repeat become shared copies.
    ///
    /// # Errors
    /// Returns an error if a field has the wrong type: then nothing can be decoded.
    pub(super) fn decode<K: Kind>(&self, shared: &mut SharedValues) -> Result<Decoded<'_, K>, Problem> {
        match self {
            Self::Json(text) => decode::decode_json(text.get(), shared),
            Self::Protobuf(message) => decode::decode_protobuf(message, shared),
        }
    }

    /// Decodes only the metadata. Other fields may be invalid.
    pub(super) fn metadata(&self) -> Result<RawMetadata<'_>, Problem> {
        match self {
            Self::Json(text) => decode::decode_metadata(&mut serde_json::Deserializer::from_str(text.get())),
            Self::Protobuf(message) => decode::decode_protobuf_metadata(message),
        }
    }

    /// Decodes the object of an `ERROR`.
    pub(super) fn status(&self) -> Result<Status, Failure> {
        match self {
            Self::Json(text) => serde_json::from_str(text.get()).map_err(Failure::invalid),
            Self::Protobuf(message) => Status::decode(*message).map_err(Failure::invalid),
        }
    }
}

impl Status {
    /// Returns the failure that the server describes.
    pub(super) fn failure(&self) -> Failure {
        Failure::status(u16::try_from(self.code).unwrap_or_default(), &self.message)
    }

    /// Decodes a whole response.
    pub(super) fn of_response(body: &[u8], encoding: ContentType) -> Result<Self, Failure> {
        match encoding {
            ContentType::Json => serde_json::from_slice(body).map_err(Failure::invalid),
            ContentType::Protobuf => Self::decode(without_envelope(body)?).map_err(Failure::invalid),
        }
    }
}

/// Returns the message in an envelope.
fn without_envelope(bytes: &[u8]) -> Result<&[u8], Failure> {
    let Some(envelope) = bytes.strip_prefix(PROTOBUF_PREFIX) else {
        return Err(Failure::invalid("protobuf without the prefix \"k8s\""));
    };
    let envelope: Envelope<'_> = message::Message::decode(envelope).map_err(Failure::invalid)?;
    Ok(envelope.raw)
}
