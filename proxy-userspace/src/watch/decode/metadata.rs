//! The metadata of objects: of labels and annotations, only those that shunt uses.

use std::marker::PhantomData;

use prost::encoding::WireType;
use serde::{Deserialize, Deserializer, de};

use super::message::{Bytes, MessageError, MostlyOne, Text, Value, message};

/// kube-proxy does not watch Services with this label.
pub(in crate::watch) const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// kube-proxy does not watch EndpointSlices with this label.
pub(in crate::watch) const HEADLESS: &str = "service.kubernetes.io/headless";
/// The label with the Service of an EndpointSlice.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label with the zone of a Node.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
/// The annotation with the choice of an endpoint.
pub(super) const BALANCE: &str = "shunt.dev/balance";
/// The annotation about packets for endpoints on other nodes.
pub(super) const FORWARDING: &str = "shunt.dev/forwarding";
/// The annotation with which a node announces where it takes packets of the tunnel for direct
/// server return.
pub(in crate::watch) const DSR: &str = "shunt.dev/dsr";
/// The annotation with the time of the change that led to this version of an EndpointSlice.
pub(super) const LAST_CHANGE_TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// The annotation of the bookmark that ends the objects of a streaming list (KEP-3157).
pub(in crate::watch) const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// The labels and annotations that are kept.
const USED: [&str; 9] = [
    SERVICE_PROXY_NAME,
    HEADLESS,
    SERVICE_NAME,
    ZONE,
    BALANCE,
    FORWARDING,
    DSR,
    LAST_CHANGE_TRIGGER_TIME,
    INITIAL_EVENTS_END,
];

/// `metadata`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::watch) struct RawMetadata<'a> {
    name: Option<Text<'a>>,
    namespace: Option<Text<'a>>,
    pub(in crate::watch) resource_version: Option<Text<'a>>,
    deletion_timestamp: Option<RawTime>,
    labels: UsedEntries<'a>,
    annotations: UsedEntries<'a>,
}
message!(RawMetadata<'a> {
    name = 1, namespace = 3, resource_version = 6, deletion_timestamp = 9, labels = 11, annotations = 12,
});

/// A time, of which it only matters that it is there.
#[derive(Debug, Default)]
struct RawTime {}
message!(RawTime {});

/// The entries of labels or annotations that are used.
#[derive(Debug, Default)]
struct UsedEntries<'a>(MostlyOne<RawEntry<'a>>);

/// An entry of a map from text to text. One whose value is not UTF-8 counts as absent.
#[derive(Debug, Default)]
struct RawEntry<'a> {
    key: Bytes<'a>,
    value: Bytes<'a>,
}
message!(RawEntry<'a> { key = 1, value = 2 });

impl RawMetadata<'_> {
    /// Returns the value of a label.
    pub(super) fn label(&self, key: &str) -> Option<&str> {
        self.labels.value(key)
    }

    /// Returns the value of an annotation.
    pub(in crate::watch) fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.value(key)
    }

    /// Returns true if the object is being deleted.
    pub(super) fn is_being_deleted(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    /// Returns the name as it is written, if there is one.
    pub(in crate::watch) fn non_empty_name(&self) -> Option<&str> {
        self.name.as_deref().filter(|name| !name.is_empty())
    }

    /// Returns the namespace as it is written, if there is one.
    pub(in crate::watch) fn non_empty_namespace(&self) -> Option<&str> {
        self.namespace.as_deref().filter(|namespace| !namespace.is_empty())
    }

    /// Returns namespace and name for the log. They may be invalid, so that characters without a
    /// glyph are escaped.
    pub(in crate::watch) fn written_name(&self) -> Option<String> {
        let name = self.non_empty_name()?.escape_debug();
        Some(match self.non_empty_namespace() {
            Some(namespace) => format!("{}/{name}", namespace.escape_debug()),
            None => name.to_string(),
        })
    }
}

impl UsedEntries<'_> {
    /// Returns the value of a key. As with Go's maps, the last entry counts.
    fn value(&self, key: &str) -> Option<&str> {
        let entry = self.0.iter().rev().find(|entry| *entry.key == *key.as_bytes())?;
        std::str::from_utf8(&entry.value).ok()
    }
}

impl<'a> Value<'a> for UsedEntries<'a> {
    fn read(&mut self, wire_type: WireType, bytes: &mut &'a [u8]) -> Result<(), MessageError> {
        let mut entry = RawEntry::default();
        entry.read(wire_type, bytes)?;
        if used_key(&entry.key).is_some() {
            self.0.push(entry);
        }
        Ok(())
    }

    #[cfg(test)]
    fn write(&self, tag: u32, out: &mut Vec<u8>) {
        self.0.write(tag, out);
    }
}

impl<'de> Deserialize<'de> for RawTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|_| Self {})
    }
}

/// Values of entries that are not used may be of any type.
impl<'de> Deserialize<'de> for UsedEntries<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_option(EntriesVisitor(PhantomData))
    }
}

/// The lifetime is that of the entries. They own their text.
struct EntriesVisitor<'a>(PhantomData<UsedEntries<'a>>);

impl<'de, 'a> de::Visitor<'de> for EntriesVisitor<'a> {
    type Value = UsedEntries<'a>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(UsedEntries::default())
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(UsedEntries::default())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = MostlyOne::new();
        while let Some(UsedKey(key)) = map.next_key()? {
            if let Some(key) = key {
                let value: Option<String> = map.next_value()?;
                let entry =
                    |value: String| RawEntry { key: key.as_bytes().into(), value: value.into_bytes().into() };
                entries.extend(value.map(entry));
            } else {
                map.next_value::<de::IgnoredAny>()?;
            }
        }
        Ok(UsedEntries(entries))
    }
}

/// Returns the key if its entry is used.
fn used_key(key: &[u8]) -> Option<&'static str> {
    USED.into_iter().find(|used| used.as_bytes() == key)
}

/// A key; none if the entry is not used.
struct UsedKey(Option<&'static str>);

impl<'de> Deserialize<'de> for UsedKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_identifier(Self(None))
    }
}

impl de::Visitor<'_> for UsedKey {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self, E> {
        Ok(Self(used_key(key.as_bytes())))
    }
}
