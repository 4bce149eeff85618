//! Decodes Kubernetes objects from JSON, YAML or protobuf: only the fields that shunt uses, with
//! the API server's defaults and validation.
//!
//! Both sources use the same rules. An invalid value is a [`Problem`] that names its field. It is
//! not part of the decoded object, as with kube-proxy. The API source logs problems and uses the
//! rest of the object. The manifests source rejects the document.

pub(super) mod message;
mod metadata;
mod node;
mod parse;
mod pod;
mod raw;
mod service;
mod service_cidr;
mod slice;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, de::DeserializeOwned};

use self::message::{Message, MessageError};
pub(super) use self::{
    message::Text,
    metadata::{DSR as DSR_ANNOTATION, INITIAL_EVENTS_END, RawMetadata, SERVICE_PROXY_NAME},
    pod::pod_place,
    raw::RawPod,
};
use crate::model::{
    Delta, EndpointSlice, Interner, InvalidName, ListPart, Name, NamespacedName, Node, Service, ServiceCidr,
    SharedValues, WatchEvent,
};

/// An invalid field of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// The field's path: `spec.ports[0].port`.
    pub field: String,
    /// The field's value, and what is allowed.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.what)
        } else {
            write!(f, "{}: {}", self.field, self.what)
        }
    }
}

/// The invalid fields of one object.
#[derive(Debug, Default)]
pub(super) struct Problems(Vec<Problem>);

impl Problems {
    /// Adds that `field` has a `value` which is not `allowed` (a noun with its article and range).
    fn not(&mut self, field: impl fmt::Display, value: impl fmt::Debug, allowed: impl fmt::Display) {
        self.add(field, format!("{value:?} is not {allowed}"));
    }

    fn add(&mut self, field: impl fmt::Display, what: impl Into<String>) {
        self.0.push(Problem { field: field.to_string(), what: what.into() });
    }
}

/// A kind of object that the sources decode.
pub(super) trait Kind: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The decoded fields, before validation.
    type Raw<'a>: DeserializeOwned + Message<'a>;
    /// `kind`.
    const KIND: &'static str;
    /// The API group; empty for the core group.
    const GROUP: &'static str;
    /// The API version.
    const VERSION: &'static str = "v1";
    /// The resource's name in URLs.
    const PLURAL: &'static str;
    /// Objects of the kind have a namespace.
    const IS_NAMESPACED: bool;
    /// Validates a name of the kind.
    const PARSE_NAME: fn(&str) -> Result<Name, InvalidName>;
    /// kube-proxy does not watch objects with this label, whatever its value is
    /// (`cmd/kube-proxy/app/server.go`).
    const EXCLUDING_LABEL: Option<&'static str> = None;

    /// Returns true if the object has [`Self::EXCLUDING_LABEL`].
    fn is_excluded(metadata: &RawMetadata<'_>) -> bool {
        Self::EXCLUDING_LABEL.is_some_and(|label| metadata.label(label).is_some())
    }
    /// Returns the object's metadata.
    fn metadata<'r, 'a>(raw: &'r Self::Raw<'a>) -> Option<&'r RawMetadata<'a>>;
    /// Validates the fields and sets defaults.
    fn from_raw(
        name: NamespacedName,
        raw: Self::Raw<'_>,
        shared: &mut SharedValues,
        problems: &mut Problems,
    ) -> Self;
    /// Returns the name in an object's metadata, if it is valid.
    fn name_in(metadata: &RawMetadata<'_>) -> Option<NamespacedName> {
        Self::checked_name(metadata, &mut Interner::default(), &mut Problems::default())
    }
    /// Returns the name in an object's metadata. The default namespace is `default`, as with
    /// kubectl. Without a valid name there is none: an object must not get the name of another.
    fn checked_name(
        metadata: &RawMetadata<'_>,
        strings: &mut Interner<str>,
        problems: &mut Problems,
    ) -> Option<NamespacedName> {
        let Some(name) = metadata.non_empty_name() else {
            problems.add("metadata.name", "missing; every object needs a name");
            return None;
        };
        let name = parse::name("metadata.name", name, Self::PARSE_NAME, problems);
        if !Self::IS_NAMESPACED {
            return name.map(Into::into);
        }
        let namespace = metadata.non_empty_namespace().unwrap_or("default");
        let namespace =
            parse::name("metadata.namespace", namespace, |text| Name::shared_label(text, strings), problems);
        Some(NamespacedName { namespace: namespace?, name: name? })
    }
    /// Returns namespace and name.
    fn key(&self) -> NamespacedName;
    /// Creates the event for a change of this kind.
    fn event(delta: Delta<Self>) -> WatchEvent;
    /// Creates the event for a part of the first list, of a kind with many objects.
    const PART: Option<fn(ListPart<Self>) -> WatchEvent> = None;
}

/// Implements [`Kind`] for `$type`.
macro_rules! kind {
    ($type:ident: $kind:literal, $group:literal, $plural:literal, namespaced: $is_namespaced:literal,
     name: $parse_name:path, $event:ident, $raw:ident, $from_raw:path
     $(, excluded: $label:expr, in_parts: $part:ident)?) => {
        impl Kind for $type {
            type Raw<'a> = raw::$raw<'a>;
            const KIND: &'static str = $kind;
            const GROUP: &'static str = $group;
            const PLURAL: &'static str = $plural;
            const IS_NAMESPACED: bool = $is_namespaced;
            const PARSE_NAME: fn(&str) -> Result<Name, InvalidName> = $parse_name;
            $(const EXCLUDING_LABEL: Option<&'static str> = Some($label);
            const PART: Option<fn(ListPart<Self>) -> WatchEvent> = Some(WatchEvent::$part);)?

            fn metadata<'r, 'a>(raw: &'r Self::Raw<'a>) -> Option<&'r RawMetadata<'a>> {
                raw.metadata.as_ref()
            }
            fn from_raw(
                name: NamespacedName,
                raw: Self::Raw<'_>,
                shared: &mut SharedValues,
                problems: &mut Problems,
            ) -> Self {
                $from_raw(name, raw, shared, problems)
            }
            fn key(&self) -> NamespacedName {
                self.name.clone().into()
            }
            fn event(delta: Delta<Self>) -> WatchEvent {
                WatchEvent::$event(delta)
            }
        }
    };
}
kind!(Service: "Service", "", "services", namespaced: true,
    name: Name::label, Services, RawService, service::service,
    excluded: SERVICE_PROXY_NAME, in_parts: ServicePart);
kind!(EndpointSlice: "EndpointSlice", "discovery.k8s.io", "endpointslices", namespaced: true,
    name: Name::subdomain, EndpointSlices, RawEndpointSlice, slice::endpoint_slice,
    excluded: metadata::HEADLESS, in_parts: EndpointSlicePart);
kind!(Node: "Node", "", "nodes", namespaced: false,
    name: Name::subdomain, Nodes, RawNode, node::node);
kind!(ServiceCidr: "ServiceCIDR", "networking.k8s.io", "servicecidrs", namespaced: false,
    name: Name::subdomain, ServiceCidrs, RawServiceCidr, service_cidr::service_cidr);

/// A decoded object.
#[derive(Debug)]
pub(super) struct Decoded<'a, K> {
    /// The object without its invalid values; none if it has no valid name.
    pub(super) object: Option<K>,
    /// If there is no object: namespace and name as they are written, for the log.
    pub(super) written_name: Option<String>,
    /// True unless the object has [`Kind::EXCLUDING_LABEL`].
    pub(super) selected: bool,
    /// `metadata.resourceVersion`.
    pub(super) resource_version: Option<Text<'a>>,
    /// The invalid values.
    pub(super) problems: Vec<Problem>,
}

/// Decodes one object. Values that many objects repeat become shared copies.
///
/// # Errors
/// Returns an error if a field has the wrong JSON type: then nothing can be decoded.
pub(super) fn decode<'de, K, D>(
    deserializer: D,
    shared: &mut SharedValues,
) -> Result<Decoded<'static, K>, Problem>
where
    K: Kind,
    D: serde::Deserializer<'de>,
{
    deserialize(deserializer).map(|raw| from_raw(raw, shared))
}

/// Decodes one object of JSON.
///
/// The first pass does not note the path of each field, which would take nearly as long as
/// decoding. If it fails, a second pass finds the path for the error.
///
/// # Errors
/// The same as of [`decode`].
pub(super) fn decode_json<K: Kind>(
    json: &str,
    shared: &mut SharedValues,
) -> Result<Decoded<'static, K>, Problem> {
    match serde_json::from_str(json) {
        Ok(raw) => Ok(from_raw(raw, shared)),
        Err(_) => decode(&mut serde_json::Deserializer::from_str(json), shared),
    }
}

/// Decodes one object of protobuf, without its envelope.
///
/// # Errors
/// Returns an error if these are no bytes of a message, or if a field has another type.
pub(super) fn decode_protobuf<'a, K: Kind>(
    object: &'a [u8],
    shared: &mut SharedValues,
) -> Result<Decoded<'a, K>, Problem> {
    K::Raw::decode(object).map(|raw| from_raw(raw, shared)).map_err(|error| undecodable(&error))
}

fn undecodable(error: &MessageError) -> Problem {
    Problem { field: String::new(), what: error.to_string() }
}

fn from_raw<'a, K: Kind>(raw: K::Raw<'a>, shared: &mut SharedValues) -> Decoded<'a, K> {
    let metadata = K::metadata(&raw);
    let selected = metadata.is_none_or(|metadata| !K::is_excluded(metadata));
    let resource_version = metadata.and_then(|metadata| metadata.resource_version.clone());
    let mut problems = Problems::default();
    let name =
        K::checked_name(metadata.unwrap_or(&RawMetadata::default()), &mut shared.strings, &mut problems);
    let written_name = metadata.filter(|_| name.is_none()).and_then(RawMetadata::written_name);
    let object = name.map(|name| K::from_raw(name, raw, shared, &mut problems));
    Decoded { object, written_name, selected, resource_version, problems: problems.0 }
}

/// Decodes only the metadata of an object. Its other fields may be invalid.
pub(super) fn decode_metadata<'de, 'a, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<RawMetadata<'a>, Problem> {
    let object: raw::RawObject<'a> = deserialize(deserializer)?;
    Ok(object.metadata.unwrap_or_default())
}

/// Decodes only the metadata of an object of protobuf.
pub(super) fn decode_protobuf_metadata(object: &[u8]) -> Result<RawMetadata<'_>, Problem> {
    let object = raw::RawObject::decode(object).map_err(|error| undecodable(&error))?;
    Ok(object.metadata.unwrap_or_default())
}

fn deserialize<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(deserializer: D) -> Result<T, Problem> {
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let field = error.path().to_string();
        Problem {
            field: if field == "." { String::new() } else { field },
            what: error.into_inner().to_string(),
        }
    })
}
