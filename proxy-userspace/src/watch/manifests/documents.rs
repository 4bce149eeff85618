//! From a file's text to its objects, document by document.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    sync::Arc,
};

use serde_json::Value;
use serde_yaml_ng::Value as Yaml;

use super::object::{Key, Object, ObjectKind};
use crate::{
    model::{EndpointSlice, Node, Service, ServiceCidr},
    watch::decode::{self, Decoded, Kind, Problem},
};

/// Something in a file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DocumentError {
    /// Which document of the file, from 1; none if it is about the file as a whole.
    pub(super) document: Option<usize>,
    /// The line on which that document starts, from 1.
    pub(super) line: usize,
    /// The object, if it can be told.
    pub(super) key: Option<Key>,
    /// The field, its value and what would be right.
    pub(super) problem: Problem,
}

impl fmt::Display for DocumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(document) = self.document {
            write!(f, "document {document} (from line {})", self.line)?;
            if let Some(key) = &self.key {
                write!(f, ", {key}")?;
            }
            f.write_str(": ")?;
        }
        self.problem.fmt(f)
    }
}

/// What a file holds.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The objects; those that the label selectors leave out are not among them.
    pub(super) objects: BTreeMap<Key, Object>,
    /// Documents that cannot be used.
    pub(super) errors: Vec<DocumentError>,
    /// Kinds that are none of ours, each once.
    pub(super) ignored: Vec<String>,
}

/// Reads a file's text: YAML documents, or JSON values one after the other.
pub(super) fn read(text: &str, json: bool) -> Contents {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut contents = Contents::default();
    if json || text.trim_start().starts_with('{') {
        read_json(text, &mut contents);
    } else {
        read_yaml(text, &mut contents);
    }
    contents
}

fn read_json(text: &str, contents: &mut Contents) {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    for number in 1.. {
        let offset = values.byte_offset();
        let rest = text.get(offset..).unwrap_or_default();
        let blank = rest.len() - rest.trim_start().len();
        let line = 1 + text.get(..offset + blank).unwrap_or_default().matches('\n').count();
        let document = Document { number, line };
        match values.next() {
            None => break,
            Some(Ok(value)) => document.object(value, contents),
            Some(Err(error)) => {
                // What follows a syntax error cannot be told apart.
                document.fails(None, "", error.to_string(), contents);
                break;
            }
        }
    }
}

fn read_yaml(text: &str, contents: &mut Contents) {
    for (index, (line, text)) in yaml_documents(text).enumerate() {
        let document = Document { number: index + 1, line };
        let value =
            serde_yaml_ng::from_str::<Yaml>(text).and_then(|mut value| value.apply_merge().map(|()| value));
        match value {
            Ok(value) => document.object(to_json(value), contents),
            Err(error) => document.fails(None, "", error.to_string(), contents),
        }
    }
}

/// YAML as kubectl sends it to the API server: keys that are numbers or booleans become text.
fn to_json(value: Yaml) -> Value {
    match value {
        Yaml::Null => Value::Null,
        Yaml::Bool(value) => Value::Bool(value),
        Yaml::Number(number) => {
            let whole = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
            whole.unwrap_or_else(|| number.as_f64().map_or(Value::Null, Value::from))
        }
        Yaml::String(text) => Value::String(text),
        Yaml::Sequence(items) => items.into_iter().map(to_json).collect(),
        Yaml::Mapping(fields) => {
            let field = |(key, value)| match to_json(key) {
                Value::String(key) => (key, to_json(value)),
                key => (key.to_string(), to_json(value)),
            };
            Value::Object(fields.into_iter().map(field).collect())
        }
        Yaml::Tagged(tagged) => to_json(tagged.value),
    }
}

/// Splits at document markers, so that one document's syntax error leaves the others alone. `---` at the start of a line
/// is a marker wherever it stands, in block scalars too (YAML 1.2, 9.1.2). Comments and directives before the first
/// marker make no document of their own.
fn yaml_documents(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut starts = vec![(1, 0)];
    let mut offset = 0;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        let marker = line
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if marker && offset > 0 {
            starts.push((index + 1, offset));
        }
        offset += line.len();
    }
    let ends: Vec<usize> = starts.iter().skip(1).map(|(_, offset)| *offset).chain([text.len()]).collect();
    let pieces = starts.into_iter().zip(ends).map(|((line, start), end)| (line, &text[start..end]));
    pieces.filter(|(_, piece)| !only_comments(piece))
}

fn only_comments(piece: &str) -> bool {
    piece.lines().all(|line| line.trim_start().starts_with(['#', '%']) || line.trim().is_empty())
}

/// The document being read, for its errors.
struct Document {
    number: usize,
    line: usize,
}

impl Document {
    fn fails(&self, key: Option<Key>, field: &str, what: String, contents: &mut Contents) {
        let problem = Problem { field: field.to_owned(), what };
        contents.errors.push(DocumentError { document: Some(self.number), line: self.line, key, problem });
    }

    fn object(&self, value: Value, contents: &mut Contents) {
        if value.is_null() {
            return;
        }
        let kind = value.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        let is_list = kind == "List" || kind.strip_suffix("List").is_some_and(|item| KINDS.contains(&item));
        if is_list && value.get("items").is_some() {
            self.list(&kind, value, contents);
        } else {
            self.item("", None, value, contents);
        }
    }

    fn list(&self, kind: &str, mut value: Value, contents: &mut Contents) {
        // The items of a ServiceList need not say what they are.
        let item_kind = kind.strip_suffix("List").filter(|kind| !kind.is_empty()).map(str::to_owned);
        let default_type = item_kind.map(|kind| (kind, string(&value, "apiVersion").unwrap_or_default()));
        match value.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => {
                for (i, item) in items.into_iter().enumerate() {
                    self.item(&format!("items[{i}]."), default_type.clone(), item, contents);
                }
            }
            None | Some(Value::Null) => {}
            Some(_) => self.fails(None, "items", "not a list of objects".to_owned(), contents),
        }
    }

    /// `prefix` is the path of the object within its document.
    fn item(
        &self,
        prefix: &str,
        default_type: Option<(String, String)>,
        value: Value,
        contents: &mut Contents,
    ) {
        let (default_kind, default_version) = default_type.unzip();
        let Some(kind) = string(&value, "kind").or(default_kind) else {
            let what = "missing; an object needs one, Service for example".to_owned();
            return self.fails(None, &format!("{prefix}kind"), what, contents);
        };
        let Some(api_version) = string(&value, "apiVersion").or(default_version) else {
            let what = "missing; an object needs one, v1 for example".to_owned();
            return self.fails(None, &format!("{prefix}apiVersion"), what, contents);
        };
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let Some(object_kind) = ObjectKind::of(&kind, group) else {
            let ignored = format!("{api_version} {kind}");
            if !contents.ignored.contains(&ignored) {
                contents.ignored.push(ignored);
            }
            return;
        };
        let key = key_of(object_kind, &value);
        // All kinds are used in their v1.
        if version != "v1" {
            let what = format!("{api_version:?} is not a known version of {kind}; v1 is");
            return self.fails(key, &format!("{prefix}apiVersion"), what, contents);
        }
        self.item_of(object_kind, prefix, key.as_ref(), value, contents);
    }

    fn item_of(
        &self,
        object_kind: ObjectKind,
        prefix: &str,
        key: Option<&Key>,
        value: Value,
        contents: &mut Contents,
    ) {
        match object_kind {
            ObjectKind::Service => {
                self.decoded(
                    prefix,
                    object_kind,
                    key,
                    value,
                    |object| Object::Service(Arc::new(object)),
                    contents,
                );
            }
            ObjectKind::EndpointSlice => {
                self.decoded(
                    prefix,
                    object_kind,
                    key,
                    value,
                    |object| Object::EndpointSlice(Arc::new(object)),
                    contents,
                );
            }
            ObjectKind::Node => {
                self.decoded(
                    prefix,
                    object_kind,
                    key,
                    value,
                    |object| Object::Node(Arc::new(object)),
                    contents,
                );
            }
            ObjectKind::ServiceCidr => {
                self.decoded(
                    prefix,
                    object_kind,
                    key,
                    value,
                    |object| Object::ServiceCidr(Arc::new(object)),
                    contents,
                );
            }
        }
    }

    fn decoded<K: Kind>(
        &self,
        prefix: &str,
        kind: ObjectKind,
        key: Option<&Key>,
        value: Value,
        wrap: fn(K) -> Object,
        contents: &mut Contents,
    ) {
        let problems = match decode::decode::<K, _>(value) {
            Ok(Decoded { object: Some(object), selected, problems, .. }) if problems.is_empty() => {
                if selected {
                    self.add(Key { kind, name: object.key() }, wrap(object), contents);
                }
                return;
            }
            Ok(decoded) => decoded.problems,
            Err(problem) => vec![problem],
        };
        for problem in problems {
            let field = format!("{prefix}{}", problem.field);
            self.fails(key.cloned(), field.trim_end_matches('.'), problem.what, contents);
        }
    }

    fn add(&self, key: Key, object: Object, contents: &mut Contents) {
        match contents.objects.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(object);
            }
            Entry::Occupied(entry) => {
                let key = entry.key().clone();
                let what = format!("{:?} is there already in this file; the first is used", &*key.name.name);
                self.fails(Some(key), "metadata.name", what, contents);
            }
        }
    }
}

const KINDS: [&str; 4] = [Service::KIND, EndpointSlice::KIND, Node::KIND, ServiceCidr::KIND];

fn string(value: &Value, field: &str) -> Option<String> {
    value.get(field).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// The key of an object that may be invalid otherwise.
fn key_of(kind: ObjectKind, value: &Value) -> Option<Key> {
    let metadata = decode::decode_metadata(value).ok()?;
    let name = match kind {
        ObjectKind::Service => Service::name_in(&metadata),
        ObjectKind::EndpointSlice => EndpointSlice::name_in(&metadata),
        ObjectKind::Node => Node::name_in(&metadata),
        ObjectKind::ServiceCidr => ServiceCidr::name_in(&metadata),
    };
    Some(Key { kind, name: name? })
}
