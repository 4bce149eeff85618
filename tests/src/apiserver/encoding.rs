//! The encodings of answers, and how a request chooses one.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, header::ACCEPT};
use serde_json::{Value, json};

use super::{Resource, protobuf, stored::Stored};

const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const PROTOBUF_WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";

/// The encoding of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// JSON, which the server prefers.
    #[default]
    Json,
    /// Kubernetes' protobuf.
    Protobuf,
}

impl Encoding {
    /// Returns the encoding that a header `Accept` asks for: that of the first media type which the
    /// server has. Returns JSON without the header, and `None` if the server has none of the types.
    pub(super) fn negotiate(accept: Option<&str>) -> Option<Self> {
        let Some(accept) = accept.filter(|accept| !accept.is_empty()) else { return Some(Self::Json) };
        let media_types = accept.split(',').filter_map(|entry| entry.split(';').next());
        media_types.map(str::trim).find_map(|media_type| match media_type {
            PROTOBUF => Some(Self::Protobuf),
            JSON | "*/*" => Some(Self::Json),
            _ => None,
        })
    }

    /// Returns the encoding of an answer to these headers. It is JSON if they accept nothing that
    /// the server has.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
        Self::negotiate(accept).unwrap_or_default()
    }

    /// Returns the `Content-Type` of an object, a list or a Status.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::Protobuf => PROTOBUF,
        }
    }

    /// Returns the `Content-Type` of a watch.
    pub(super) fn content_type_of_watch(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::Protobuf => PROTOBUF_WATCH,
        }
    }

    /// Returns the body of an answer with an object.
    pub(super) fn object(self, object: &Stored) -> Result<Vec<u8>> {
        match self {
            Self::Json => Ok([object.json(), "\n".as_bytes()].concat()),
            Self::Protobuf => protobuf::enveloped(object.value(), object.message()?),
        }
    }

    /// Returns the body of an answer with a list.
    pub(super) fn list<'a>(
        self,
        resource: &Resource,
        metadata: &Value,
        items: impl Iterator<Item = &'a Stored>,
    ) -> Result<Vec<u8>> {
        let (api_version, kind) = (resource.api_version(), format!("{}List", resource.kind));
        match self {
            Self::Json => {
                let items: Vec<_> = items.map(Stored::json_item).collect::<Result<_>>()?;
                let list =
                    json!({"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": []});
                json_list(&list, &items)
            }
            Self::Protobuf => {
                let items: Vec<_> = items.map(Stored::message).collect::<Result<_>>()?;
                protobuf::list(&api_version, &kind, metadata, items.iter().map(|item| &***item))
            }
        }
    }

    /// Returns an event of a watch: a line of JSON, or a message behind its length.
    pub(super) fn event(self, event_type: &str, object: &Stored) -> Result<Bytes> {
        match self {
            Self::Json => {
                // The type comes first, as the server writes it.
                let head = format!("{{\"type\":\"{event_type}\",\"object\":");
                Ok([head.as_bytes(), object.json(), b"}\n"].concat().into())
            }
            Self::Protobuf => Ok(protobuf::event(event_type, &self.object(object)?)?.into()),
        }
    }
}

/// Returns a list as JSON. `list` has no items. `items` are their texts.
fn json_list(list: &Value, items: &[&Bytes]) -> Result<Vec<u8>> {
    let list = list.to_string();
    let (head, tail) = list.split_once("\"items\":[]").context("a list with items")?;
    let of_items: usize = items.iter().map(|item| item.len() + 1).sum();
    let mut out = Vec::with_capacity(list.len() + of_items + 1);
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(b"\"items\":[");
    for (number, item) in items.iter().enumerate() {
        if number > 0 {
            out.push(b',');
        }
        out.extend_from_slice(item);
    }
    out.push(b']');
    out.extend_from_slice(tail.as_bytes());
    out.push(b'\n');
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_media_type_that_the_server_has_decides() {
        for (accept, expected) in [
            (None, Some(Encoding::Json)),
            (Some(""), Some(Encoding::Json)),
            (Some("*/*"), Some(Encoding::Json)),
            (Some("application/json"), Some(Encoding::Json)),
            (Some("application/vnd.kubernetes.protobuf"), Some(Encoding::Protobuf)),
            (Some("application/vnd.kubernetes.protobuf, application/json"), Some(Encoding::Protobuf)),
            (Some("application/vnd.kubernetes.protobuf;stream=watch,*/*"), Some(Encoding::Protobuf)),
            (Some("application/json,application/vnd.kubernetes.protobuf"), Some(Encoding::Json)),
            (Some("application/cbor, application/vnd.kubernetes.protobuf;q=0.9"), Some(Encoding::Protobuf)),
            (Some("application/yaml , */* ; q=0.1"), Some(Encoding::Json)),
            (Some("application/cbor"), None),
            (Some("text/html, application/vnd.kubernetes.protobuf2"), None),
        ] {
            assert_eq!(Encoding::negotiate(accept), expected, "{accept:?}");
        }
    }

    #[test]
    fn a_list_as_json_has_items_without_kind_and_version() -> Result<()> {
        let service = &Resource::ALL[0];
        let objects = ["a", "b"].map(|name| {
            Stored::new(json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": name}}))
        });
        let list = Encoding::Json.list(service, &json!({"resourceVersion": "7"}), objects.iter())?;
        let expected = json!({
            "kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"},
            "items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}],
        });
        assert_eq!(String::from_utf8(list)?, format!("{expected}\n"));
        let empty = Encoding::Json.list(service, &json!({}), std::iter::empty())?;
        let expected = json!({"kind": "ServiceList", "apiVersion": "v1", "metadata": {}, "items": []});
        assert_eq!(String::from_utf8(empty)?, format!("{expected}\n"));
        Ok(())
    }
}
