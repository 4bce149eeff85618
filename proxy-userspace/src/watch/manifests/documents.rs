//! Decodes a file's text, document by document.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt,
    path::Path,
    sync::Arc,
};

use serde_json::Value;
use serde_yaml_ng::Value as Yaml;
use tracing::debug;

use crate::{
    model::{Delta, EndpointSlice, Interner, NamespacedName, Node, Service, ServiceCidr, WatchEvent},
    watch::decode::{self, Kind, Problem},
};

/// An object, as the event that applies it.
pub(super) type Object = Arc<WatchEvent>;

/// Kind and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: &'static str,
    pub(super) name: NamespacedName,
}

impl Key {
    /// Returns the event that deletes the object.
    pub(super) fn deletion(self) -> WatchEvent {
        match self.kind {
            Service::KIND => WatchEvent::Services(Delta::Delete(self.name)),
            EndpointSlice::KIND => WatchEvent::EndpointSlices(Delta::Delete(self.name)),
            Node::KIND => WatchEvent::Nodes(Delta::Delete(self.name)),
            _ => WatchEvent::ServiceCidrs(Delta::Delete(self.name)),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Why a document cannot be used, with its object if the name can be read.
pub(super) type DocumentError = (Option<Key>, String);

/// The contents of a file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The objects, without those that the label selectors exclude.
    pub(super) objects: BTreeMap<Key, Object>,
    pub(super) errors: Vec<DocumentError>,
}

impl Contents {
    /// Adds from `last` each object that the file may still hold, but that cannot be read.
    pub(super) fn keep_unreadable(&mut self, last: &BTreeMap<Key, Object>) {
        let faulty: BTreeSet<Option<&Key>> = self.errors.iter().map(|(key, _)| key.as_ref()).collect();
        for (key, object) in last {
            if faulty.contains(&None) || faulty.contains(&Some(key)) {
                self.objects.entry(key.clone()).or_insert_with(|| Arc::clone(object));
            }
        }
    }
}

/// Decodes a file's text: YAML documents, or JSON values one after the other.
pub(super) fn read(path: &Path, text: &str, strings: &mut Interner<str>) -> Contents {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = Reader { path, strings, contents: Contents::default(), document: 0, line: 0 };
    if path.extension().is_some_and(|extension| extension == "json") || text.trim_start().starts_with('{') {
        reader.json(text);
    } else {
        reader.yaml(text);
    }
    reader.contents
}

/// YAML as kubectl sends it to the API server: keys that are numbers or booleans become text.
fn to_json(value: Yaml) -> Value {
    match value {
        Yaml::Sequence(items) => items.into_iter().map(to_json).collect(),
        Yaml::Mapping(fields) => {
            let field = |(key, value)| match to_json(key) {
                Value::String(key) => (key, to_json(value)),
                key => (key.to_string(), to_json(value)),
            };
            fields.into_iter().map(field).collect()
        }
        Yaml::Tagged(tagged) => to_json(tagged.value),
        scalar => serde_json::to_value(scalar).unwrap_or_default(),
    }
}

/// Splits at document markers, so that a syntax error affects one document only. Returns each
/// document with its first line. `---` at the start of a line is a marker also in block scalars
/// (YAML 1.2, 9.1.2). Comments and directives before the first marker are no document.
fn yaml_documents(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut first_line, mut start, mut offset) = (1, 0, 0);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let is_marker = line
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if is_marker {
            documents.push((first_line, &text[start..offset]));
            (first_line, start) = (index + 1, offset);
        }
        offset += line.len();
    }
    documents.push((first_line, &text[start..]));
    let is_comment = |line: &str| line.trim_start().starts_with(['#', '%']) || line.trim().is_empty();
    documents.retain(|(_, document)| !document.lines().all(is_comment));
    documents
}

struct Reader<'a> {
    path: &'a Path,
    strings: &'a mut Interner<str>,
    contents: Contents,
    /// The number of the present document, and its first line; both from 1.
    document: usize,
    line: usize,
}

impl Reader<'_> {
    fn json(&mut self, text: &str) {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        loop {
            let (before, rest) = text.split_at(values.byte_offset());
            let blank = rest.len() - rest.trim_start().len();
            self.document += 1;
            self.line = 1 + before.matches('\n').count() + rest[..blank].matches('\n').count();
            match values.next() {
                None => return,
                Some(Ok(value)) => self.object_or_list(value),
                // The text after a syntax error cannot be split into values.
                Some(Err(error)) => return self.error(None, "", error.to_string()),
            }
        }
    }

    fn yaml(&mut self, text: &str) {
        for (line, text) in yaml_documents(text) {
            self.document += 1;
            self.line = line;
            let value = serde_yaml_ng::from_str::<Yaml>(text)
                .and_then(|mut value| value.apply_merge().map(|()| value));
            match value {
                Ok(value) => self.object_or_list(to_json(value)),
                Err(error) => self.error(None, "", error.to_string()),
            }
        }
    }

    fn error(&mut self, key: Option<Key>, field: &str, what: String) {
        let object = key.as_ref().map(|key| format!(", {key}")).unwrap_or_default();
        let problem = Problem { field: field.trim_end_matches('.').to_owned(), what };
        let error = format!("document {} (from line {}){object}: {problem}", self.document, self.line);
        self.contents.errors.push((key, error));
    }

    fn object_or_list(&mut self, mut value: Value) {
        if value.is_null() {
            return;
        }
        let kind = string(&value, "kind").unwrap_or_default();
        let item_kind = kind.strip_suffix("List").filter(|kind| kind.is_empty() || KINDS.contains(kind));
        let (Some(item_kind), Some(items)) = (item_kind, value.get_mut("items").map(Value::take)) else {
            return self.object("", None, value);
        };
        // The items of a ServiceList need not name their type.
        let version = string(&value, "apiVersion").unwrap_or_default();
        let default_type = (!item_kind.is_empty()).then_some((item_kind, &*version));
        match items {
            Value::Array(items) => {
                for (i, item) in items.into_iter().enumerate() {
                    self.object(&format!("items[{i}]."), default_type, item);
                }
            }
            Value::Null => {}
            _ => self.error(None, "items", "not a list of objects".to_owned()),
        }
    }

    /// `prefix` is the path of the object within its document.
    fn object(&mut self, prefix: &str, default_type: Option<(&str, &str)>, value: Value) {
        let (default_kind, default_version) = default_type.unzip();
        let Some(kind) = string(&value, "kind").or(default_kind.map(str::to_owned)) else {
            let what = "missing; an object needs one, Service for example".to_owned();
            return self.error(None, &format!("{prefix}kind"), what);
        };
        let Some(api_version) = string(&value, "apiVersion").or(default_version.map(str::to_owned)) else {
            let what = "missing; an object needs one, v1 for example".to_owned();
            return self.error(None, &format!("{prefix}apiVersion"), what);
        };
        let version = &*api_version;
        match (&*kind, version.split_once('/').map_or("", |(group, _)| group)) {
            (Service::KIND, Service::GROUP) => self.decode::<Service>(prefix, version, value),
            (EndpointSlice::KIND, EndpointSlice::GROUP) => {
                self.decode::<EndpointSlice>(prefix, version, value);
            }
            (Node::KIND, Node::GROUP) => self.decode::<Node>(prefix, version, value),
            (ServiceCidr::KIND, ServiceCidr::GROUP) => self.decode::<ServiceCidr>(prefix, version, value),
            _ => {
                let file = self.path.display();
                debug!(%file, api_version, kind, "ignored an object of a kind that a Service proxy does not use");
            }
        }
    }

    fn decode<K: Kind>(&mut self, prefix: &str, version: &str, value: Value) {
        let name = decode::decode_metadata(&value).ok().and_then(|metadata| K::name_in(&metadata));
        let key = name.map(|name| Key { kind: K::KIND, name });
        if version.rsplit('/').next() != Some(K::VERSION) {
            let what = format!("{version:?} is not a known version of {}; {} is", K::KIND, K::VERSION);
            return self.error(key, &format!("{prefix}apiVersion"), what);
        }
        let (object, problems) = match decode::decode::<K, _>(value) {
            Ok(decoded) => (decoded.object.filter(|_| decoded.selected), decoded.problems),
            Err(problem) => (None, vec![problem]),
        };
        if let (Some(object), []) = (object, &*problems) {
            self.add(object);
        }
        for problem in problems {
            self.error(key.clone(), &format!("{prefix}{}", problem.field), problem.what);
        }
    }

    fn add<K: Kind>(&mut self, object: K) {
        let mut key = Key { kind: K::KIND, name: object.key() };
        let mut event = K::event(Delta::Apply(object));
        // There are many Services and slices, and they repeat names.
        key.name.share_strings(self.strings);
        match &mut event {
            WatchEvent::Services(Delta::Apply(service)) => service.share_strings(self.strings),
            WatchEvent::EndpointSlices(Delta::Apply(slice)) => slice.share_strings(self.strings),
            _ => {}
        }
        match self.contents.objects.entry(key) {
            Entry::Vacant(entry) => drop(entry.insert(Arc::new(event))),
            Entry::Occupied(entry) => {
                let key = entry.key().clone();
                let what = format!("{:?} is already in this file; the first one is used", &*key.name.name);
                self.error(Some(key), "metadata.name", what);
            }
        }
    }
}

const KINDS: [&str; 4] = [Service::KIND, EndpointSlice::KIND, Node::KIND, ServiceCidr::KIND];

fn string(value: &Value, field: &str) -> Option<String> {
    value.get(field).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
}
