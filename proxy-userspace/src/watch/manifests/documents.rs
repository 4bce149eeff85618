//! Decodes the objects of a file's documents.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt,
    io::{BufRead, Seek},
    path::Path,
    sync::Arc,
};

use serde_json::{Map, Value};
use tracing::debug;

use super::{file::Text, json, yaml};
use crate::{
    model::{Delta, EndpointSlice, NamespacedName, Node, Service, ServiceCidr, SharedValues, WatchEvent},
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

/// The largest object that is read, in bytes: it is in memory as a whole, as are documents that are
/// no lists.
pub(super) const MAX_SIZE: u64 = 64 << 20;

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
    /// Adds each object of `last` that is missing.
    pub(super) fn keep_missing(&mut self, last: &BTreeMap<Key, Object>) {
        for (key, object) in last {
            self.objects.entry(key.clone()).or_insert_with(|| Arc::clone(object));
        }
    }

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

/// Where the documents of a file go.
pub(super) trait Sink {
    /// A document starts at this line, from 1.
    fn start_document(&mut self, line: usize);
    /// The document has a list of items.
    fn start_items(&mut self);
    /// The items so far are no items of the document.
    fn forget_items(&mut self);
    /// The next item. `header` has the document's fields so far.
    fn item(&mut self, header: &Map<String, Value>, item: Value);
    /// The document is complete: its value without the items.
    fn end_document(&mut self, value: Value);
    /// The document is not used, because the text at `field` is invalid.
    fn fail(&mut self, field: &str, what: String);
}

/// Decodes a file: YAML documents, or JSON values one after the other. An object that is equal to
/// the one in `last` is shared with it.
pub(super) fn read<R: BufRead + Seek>(
    path: &Path,
    text: Text<R>,
    last: &BTreeMap<Key, Object>,
    shared: &mut SharedValues,
) -> Contents {
    read_in_parts(path, text, last, shared, yaml::PART)
}

/// Decodes a file as [`read`] does. The items of a YAML list are parsed together until their text
/// has `part` bytes.
pub(super) fn read_in_parts<R: BufRead + Seek>(
    path: &Path,
    text: Text<R>,
    last: &BTreeMap<Key, Object>,
    shared: &mut SharedValues,
    part: usize,
) -> Contents {
    let contents = Contents::default();
    let mut reader = Reader { path, last, shared, contents, document: 0, line: 0, items: None };
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    if is_json || text.first == Some(b'{') {
        json::read(text.reader, &mut reader);
    } else {
        yaml::read_parts(text.reader, &mut reader, part);
    }
    reader.contents
}

struct Reader<'a> {
    path: &'a Path,
    last: &'a BTreeMap<Key, Object>,
    shared: &'a mut SharedValues,
    contents: Contents,
    /// The number of the present document, and its first line; both from 1.
    document: usize,
    line: usize,
    /// The items of the present document; none if it has no list of items.
    items: Option<Items>,
}

/// The items of a document. They are known to be objects when the document is complete: kubectl
/// writes `kind: List` after the items.
#[derive(Default)]
struct Items {
    count: usize,
    /// Items with their index whose type follows from the type of the list, which is not known yet.
    untyped: Vec<(usize, Value)>,
    /// The keys that the items added to the contents.
    added: Vec<Key>,
    /// The number of errors before the items.
    errors: usize,
}

impl Sink for Reader<'_> {
    fn start_document(&mut self, line: usize) {
        self.document += 1;
        self.line = line;
    }

    fn start_items(&mut self) {
        self.items = Some(Items { errors: self.contents.errors.len(), ..Items::default() });
    }

    fn forget_items(&mut self) {
        let Some(items) = self.items.take() else { return };
        self.contents.errors.truncate(items.errors);
        for key in items.added {
            self.contents.objects.remove(&key);
        }
    }

    fn item(&mut self, header: &Map<String, Value>, item: Value) {
        let Some(items) = &mut self.items else { return };
        let index = items.count;
        items.count += 1;
        let list = (string(header, "kind"), string(header, "apiVersion"));
        match list {
            _ if has_type(&item) => self.object(&item_prefix(index), None, item),
            (Some(kind), Some(version)) => {
                self.object(&item_prefix(index), item_type(kind).map(|kind| (kind, version)), item);
            }
            _ => items.untyped.push((index, item)),
        }
    }

    fn end_document(&mut self, value: Value) {
        if value.is_null() {
            return;
        }
        let field = |field| value.as_object().and_then(|fields| string(fields, field));
        let kind = field("kind").unwrap_or_default();
        let is_list = kind == "List" || item_type(kind).is_some();
        match (value.get("items"), self.items.take_if(|_| is_list)) {
            (_, Some(items)) => {
                let version = field("apiVersion").unwrap_or_default();
                for (index, item) in items.untyped {
                    self.object(&item_prefix(index), item_type(kind).map(|kind| (kind, version)), item);
                }
            }
            (Some(Value::Null), None) if is_list => {}
            (Some(_), None) if is_list => self.error(None, "items", "not a list of objects".to_owned()),
            _ => {
                self.forget_items();
                self.object("", None, value);
            }
        }
    }

    fn fail(&mut self, field: &str, what: String) {
        self.forget_items();
        self.error(None, field, what);
    }
}

impl Reader<'_> {
    fn error(&mut self, key: Option<Key>, field: &str, what: String) {
        let object = key.as_ref().map(|key| format!(", {key}")).unwrap_or_default();
        let problem = Problem { field: field.trim_end_matches('.').to_owned(), what };
        let error = format!("document {} (from line {}){object}: {problem}", self.document, self.line);
        self.contents.errors.push((key, error));
    }

    /// `prefix` is the path of the object within its document.
    fn object(&mut self, prefix: &str, default_type: Option<(&str, &str)>, value: Value) {
        let (default_kind, default_version) = default_type.unzip();
        let field = |name, default: Option<&str>| {
            let value = value.as_object().and_then(|fields| string(fields, name)).or(default);
            value.map(str::to_owned)
        };
        let Some(kind) = field("kind", default_kind) else {
            let what = "missing; an object needs one, Service for example".to_owned();
            return self.error(None, &format!("{prefix}kind"), what);
        };
        let Some(api_version) = field("apiVersion", default_version) else {
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
        let (object, problems) = match decode::decode::<K, _>(value, self.shared) {
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
        key.name.share_strings(&mut self.shared.strings);
        match &mut event {
            WatchEvent::Services(Delta::Apply(service)) => service.share_strings(&mut self.shared.strings),
            WatchEvent::EndpointSlices(Delta::Apply(slice)) => slice.share_strings(&mut self.shared.strings),
            _ => {}
        }
        match self.contents.objects.entry(key) {
            Entry::Vacant(entry) => {
                if let Some(items) = &mut self.items {
                    items.added.push(entry.key().clone());
                }
                let last = self.last.get(entry.key()).filter(|last| ***last == event);
                entry.insert(last.map_or_else(|| Arc::new(event), Arc::clone));
            }
            Entry::Occupied(entry) => {
                let key = entry.key().clone();
                let what = format!("{:?} is already in this file; the first one is used", &*key.name.name);
                self.error(Some(key), "metadata.name", what);
            }
        }
    }
}

const KINDS: [&str; 4] = [Service::KIND, EndpointSlice::KIND, Node::KIND, ServiceCidr::KIND];

/// Returns the kind of the items of a list like `ServiceList`. They need not name their type.
fn item_type(list_kind: &str) -> Option<&str> {
    list_kind.strip_suffix("List").filter(|kind| KINDS.contains(kind))
}

fn item_prefix(index: usize) -> String {
    format!("items[{index}].")
}

/// Returns true if the object names its type.
fn has_type(value: &Value) -> bool {
    let fields = value.as_object();
    fields.is_some_and(|fields| ["kind", "apiVersion"].iter().all(|name| string(fields, name).is_some()))
}

fn string<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
}
