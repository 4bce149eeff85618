//! From Kubernetes JSON or YAML to the model's objects: slim decoding, the API server's defaulting, and validation.
//!
//! The same structs and rules serve both sources. A value that does not hold is a [`Problem`] that names its field; it
//! is left out of the object, as kube-proxy leaves it out. The API source logs problems and uses the rest of the
//! object; the manifests source refuses the document.

mod node;
mod parse;
mod raw;
mod service;
mod service_cidr;
mod slice;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, de::DeserializeOwned};

pub(super) use self::raw::RawMetadata;
use crate::model::{Delta, EndpointSlice, Interner, NamespacedName, Node, Service, ServiceCidr, WatchEvent};

/// What is wrong with one field of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// The field's path: `spec.ports[0].port`.
    pub field: String,
    /// Its value and what would be right.
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

/// The problems found while one object was decoded.
#[derive(Debug, Default)]
pub(super) struct Problems(Vec<Problem>);

impl Problems {
    /// `field` holds `value`, which is not `wanted` (a noun with its article and range).
    fn not(&mut self, field: impl fmt::Display, value: impl fmt::Debug, wanted: impl fmt::Display) {
        self.add(field, format!("{value:?} is not {wanted}"));
    }

    fn add(&mut self, field: impl fmt::Display, what: impl Into<String>) {
        self.0.push(Problem { field: field.to_string(), what: what.into() });
    }
}

/// A kind of object that the sources know.
pub(super) trait Kind: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// What is decoded of it.
    type Raw: DeserializeOwned + Send;
    /// `kind`.
    const KIND: &'static str;
    /// The API group; empty for the core group.
    const GROUP: &'static str;
    /// The API version.
    const VERSION: &'static str;
    /// The resource's name in URLs.
    const PLURAL: &'static str;

    /// The object's metadata.
    fn metadata(raw: &Self::Raw) -> Option<&RawMetadata>;
    /// Defaults and validates. None without a usable name.
    fn from_raw(raw: Self::Raw, problems: &mut Problems) -> Option<Self>;
    /// The name in an object's metadata, if it has one.
    fn name_in(metadata: &RawMetadata) -> Option<NamespacedName> {
        metadata.namespaced_name()
    }
    /// Namespace and name.
    fn key(&self) -> NamespacedName;
    /// Replaces the names that many objects repeat by their one copy.
    fn share_strings(&mut self, _strings: &mut Interner<str>) {}
    /// A change of this kind.
    fn event(delta: Delta<Self>) -> WatchEvent;
}

impl Kind for Service {
    type Raw = raw::RawService;
    const KIND: &'static str = "Service";
    const GROUP: &'static str = "";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "services";

    fn metadata(raw: &Self::Raw) -> Option<&RawMetadata> {
        raw.metadata.as_ref()
    }
    fn from_raw(raw: Self::Raw, problems: &mut Problems) -> Option<Self> {
        service::service(raw, problems)
    }
    fn key(&self) -> NamespacedName {
        self.name.clone()
    }
    fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.share_strings(strings);
    }
    fn event(delta: Delta<Self>) -> WatchEvent {
        WatchEvent::Services(delta)
    }
}

impl Kind for EndpointSlice {
    type Raw = raw::RawEndpointSlice;
    const KIND: &'static str = "EndpointSlice";
    const GROUP: &'static str = "discovery.k8s.io";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "endpointslices";

    fn metadata(raw: &Self::Raw) -> Option<&RawMetadata> {
        raw.metadata.as_ref()
    }
    fn from_raw(raw: Self::Raw, problems: &mut Problems) -> Option<Self> {
        slice::endpoint_slice(raw, problems)
    }
    fn key(&self) -> NamespacedName {
        self.name.clone()
    }
    fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.share_strings(strings);
    }
    fn event(delta: Delta<Self>) -> WatchEvent {
        WatchEvent::EndpointSlices(delta)
    }
}

impl Kind for Node {
    type Raw = raw::RawNode;
    const KIND: &'static str = "Node";
    const GROUP: &'static str = "";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "nodes";

    fn metadata(raw: &Self::Raw) -> Option<&RawMetadata> {
        raw.metadata.as_ref()
    }
    fn from_raw(raw: Self::Raw, problems: &mut Problems) -> Option<Self> {
        node::node(raw, problems)
    }
    fn name_in(metadata: &RawMetadata) -> Option<NamespacedName> {
        metadata.cluster_scoped_name()
    }
    fn key(&self) -> NamespacedName {
        NamespacedName::new("", self.name.clone())
    }
    fn event(delta: Delta<Self>) -> WatchEvent {
        WatchEvent::Nodes(delta)
    }
}

impl Kind for ServiceCidr {
    type Raw = raw::RawServiceCidr;
    const KIND: &'static str = "ServiceCIDR";
    const GROUP: &'static str = "networking.k8s.io";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "servicecidrs";

    fn metadata(raw: &Self::Raw) -> Option<&RawMetadata> {
        raw.metadata.as_ref()
    }
    fn from_raw(raw: Self::Raw, problems: &mut Problems) -> Option<Self> {
        service_cidr::service_cidr(raw, problems)
    }
    fn name_in(metadata: &RawMetadata) -> Option<NamespacedName> {
        metadata.cluster_scoped_name()
    }
    fn key(&self) -> NamespacedName {
        NamespacedName::new("", self.name.clone())
    }
    fn event(delta: Delta<Self>) -> WatchEvent {
        WatchEvent::ServiceCidrs(delta)
    }
}

/// A decoded object.
#[derive(Debug)]
pub(super) struct Decoded<K> {
    /// The object without its faulty values; none if it has no usable name.
    pub(super) object: Option<K>,
    /// Whether kube-proxy's label selectors let it through.
    pub(super) selected: bool,
    /// `metadata.resourceVersion`.
    pub(super) resource_version: Option<String>,
    /// What was left out.
    pub(super) problems: Vec<Problem>,
}

/// Decodes one object. An error means that a field has the wrong JSON type, so that nothing could be decoded.
pub(super) fn decode<'de, K, D>(deserializer: D) -> Result<Decoded<K>, Problem>
where
    K: Kind,
    D: serde::Deserializer<'de>,
{
    let raw: K::Raw = deserialize(deserializer)?;
    let metadata = K::metadata(&raw);
    let selected = metadata.is_none_or(RawMetadata::selected);
    let resource_version = metadata.and_then(|metadata| metadata.resource_version.clone());
    let mut problems = Problems::default();
    let object = K::from_raw(raw, &mut problems);
    Ok(Decoded { object, selected, resource_version, problems: problems.0 })
}

/// The metadata of an object whose other fields do not matter or do not decode.
pub(super) fn decode_metadata<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<RawMetadata, Problem> {
    let object: raw::RawObject = deserialize(deserializer)?;
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
