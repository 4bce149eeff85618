//! Reads lists item by item.

use std::{
    cell::Cell,
    io::{self, BufReader, Cursor, Read, Seek, SeekFrom},
};

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{
    super::{documents::Sink, json, yaml},
    documents::read,
    service,
};

/// A text that counts how much of it was read.
struct Counted<'a> {
    text: Cursor<&'a [u8]>,
    bytes_read: &'a Cell<u64>,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.text.read(buffer)?;
        self.bytes_read.set(self.text.position());
        Ok(length)
    }
}

impl Seek for Counted<'_> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.text.seek(position)
    }
}

/// Records what a document contains.
#[derive(Default)]
struct Recorder<'a> {
    bytes_read: Option<&'a Cell<u64>>,
    /// The items of the present document.
    items: Option<Vec<Value>>,
    /// How much was read when each item came.
    item_at: Vec<u64>,
    documents: Vec<Result<Value, String>>,
}

impl Sink for Recorder<'_> {
    fn start_document(&mut self, _line: usize) {}

    fn start_items(&mut self) {
        self.items = Some(Vec::new());
    }

    fn forget_items(&mut self) {
        self.items = None;
    }

    fn item(&mut self, _header: &Map<String, Value>, item: Value) {
        self.item_at.extend(self.bytes_read.map(Cell::get));
        self.items.as_mut().unwrap().push(item);
    }

    fn end_document(&mut self, mut value: Value) {
        if let Some(items) = self.items.take() {
            value["items"] = items.into();
        }
        self.documents.push(Ok(value));
    }

    fn fail(&mut self, field: &str, what: String) {
        self.items = None;
        self.documents.push(Err(format!("{field}: {what}")));
    }
}

const BUFFER: usize = 100;

/// Reads a list of many items, and returns its length and how much of it was read when each item
/// came.
fn item_positions(text: &str, is_json: bool) -> (usize, Vec<u64>) {
    let bytes_read = Cell::new(0);
    let mut sink = Recorder { bytes_read: Some(&bytes_read), ..Recorder::default() };
    let text = Counted { text: Cursor::new(text.as_bytes()), bytes_read: &bytes_read };
    let reader = BufReader::with_capacity(BUFFER, text);
    if is_json {
        json::read(reader, &mut sink);
    } else {
        yaml::read_parts(reader, &mut sink, 1);
    }
    let [Ok(list)] = &*sink.documents else { panic!("{:?}", sink.documents) };
    assert_eq!(list["kind"], "List");
    (list["items"].as_array().unwrap().len(), sink.item_at)
}

#[test]
fn an_item_is_handed_over_before_the_next_one_is_read() {
    let list = json!({"apiVersion": "v1", "items": vec![json!({"kind": "Node"}); 1000], "kind": "List"});
    let json = serde_json::to_string_pretty(&list).unwrap();
    let yaml =
        format!("apiVersion: v1\nitems:\n{}kind: List\n", "- kind: Node\n  apiVersion: v1\n".repeat(1000));
    for (text, is_json) in [(json, true), (yaml, false)] {
        let (number, positions) = item_positions(&text, is_json);
        assert_eq!((number, positions.len()), (1000, 1000));
        for (i, position) in positions.into_iter().enumerate() {
            // The header, this item and the next one, and a buffer.
            let expected = text.len() * (i + 2) / 1000 + BUFFER + 40;
            assert!(position <= expected as u64, "item {i}: {position} bytes read, expected {expected}");
        }
    }
}

/// Lines that start, end or continue something, alone or together with others.
const LINES: &[&str] = &[
    "items:",
    "items: # all",
    "items: []",
    "items: null",
    "  items:",
    "kind: List",
    "a: 1",
    "x:",
    "...",
    "# text",
    "",
    "\t",
    "- a: 1",
    "  b: 2",
    "- 2",
    "-",
    "- null",
    "  - n",
    "  - c: 3",
    "    d: 4",
    "- &a 1",
    "- *a",
    "x: &a {k: v}",
    "- <<: *a",
    "<<: {k: v}",
    "- |",
    "- a: >",
    "x: |",
    "   text",
    " text",
    "text",
    "\ttext",
    "x: \"",
    "\"",
    "- \"a",
    "b\"",
    "- 'q",
    "q'",
    "x: 'q",
    "- {",
    "}",
    "- [",
    "]",
    "x: [",
    "? x",
    ": y",
    "- ? x",
    "!!str x",
    "- !t x",
    "%TAG ! x",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    /// The split must never change what a document means.
    #[test]
    fn a_document_in_parts_has_the_value_of_the_whole(
        before in proptest::collection::vec(proptest::sample::select(LINES), 0..4),
        after in proptest::collection::vec(proptest::sample::select(LINES), 0..8),
        part in 1..20_usize,
    ) {
        let lines: Vec<&str> = before.into_iter().chain(["items:", "- a: 1"]).chain(after).collect();
        let text = lines.join("\n") + "\n";
        let mut sink = Recorder::default();
        yaml::read_parts(Cursor::new(&text), &mut sink, part);
        match (yaml::parse(&text), &*sink.documents) {
            (Ok(expected), [Ok(value)]) => prop_assert_eq!(&expected, value, "{}", text),
            (Err(_), [Err(_)]) => {}
            (expected, found) => prop_assert!(false, "{text}\n{expected:?}\n{found:?}"),
        }
    }
}

/// Returns the names of the objects and the errors in a file.
fn contents(text: &str, is_json: bool) -> (Vec<String>, Vec<String>) {
    let contents = read(text, is_json);
    let names = contents.objects.keys().map(|key| key.name.name.to_string()).collect();
    (names, contents.errors.into_iter().map(|(_, error)| error).collect())
}

/// Returns a list as JSON, with its fields in this order.
fn list(fields: &[(&str, &str)]) -> String {
    let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
    format!("{{{}}}", fields.join(", "))
}

const A: &str = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}}"#;
const BAD: &str = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "bad"}, "spec": {"ports": [{"port": "x"}]}}"#;
const UNTYPED: &str = r#"{"metadata": {"name": "u"}}"#;
const NOTHING: Vec<String> = Vec::new();

#[test]
fn the_kind_of_a_list_may_follow_its_items() {
    let items = &*format!("[{A}, {UNTYPED}]");
    let (kind, version) = (("kind", "\"ServiceList\""), ("apiVersion", "\"v1\""));
    for fields in [[kind, version, ("items", items)], [version, ("items", items), kind]] {
        let text = list(&fields);
        assert_eq!(contents(&text, true), (vec!["a".to_owned(), "u".to_owned()], NOTHING));
        // JSON is YAML.
        assert_eq!(contents(&format!("---\n{text}"), false), (vec!["a".to_owned(), "u".to_owned()], NOTHING));
    }
    let yaml = "apiVersion: v1\nitems:\n- metadata: {name: u}\nkind: ServiceList\n";
    assert_eq!(contents(yaml, false), (vec!["u".to_owned()], NOTHING));
}

#[test]
fn an_invalid_item_does_not_stop_the_others() {
    let last = A.replace("\"a\"", "\"z\"");
    let text = list(&[("items", &format!("[{A}, {BAD}, {UNTYPED}, {last}]")), ("kind", "\"List\"")]);
    let (names, errors) = contents(&format!("\n{A}\n{text}").replace("\"a\"", "\"b\""), true);
    assert_eq!(names, ["b", "z"]);
    assert_eq!(errors.len(), 3, "{errors:?}");
    assert!(errors[0].ends_with("\"b\" is already in this file; the first one is used"), "{errors:?}");
    assert!(
        errors[1].starts_with("document 2 (from line 3), Service default/bad: items[1].spec.ports[0].port: ")
    );
    assert_eq!(
        errors[2],
        "document 2 (from line 3): items[2].kind: missing; an object needs one, Service for example"
    );
}

#[test]
fn the_items_of_what_is_no_list_are_ignored() {
    for kind in ["\"PodList\"", "\"Other\""] {
        let fields = [("apiVersion", "\"v1\""), ("items", &*format!("[{A}, {BAD}, 1]")), ("kind", kind)];
        assert_eq!(contents(&list(&fields), true), (vec![], NOTHING));
        let reversed: Vec<_> = fields.into_iter().rev().collect();
        assert_eq!(contents(&list(&reversed), true), (vec![], NOTHING));
    }
    let nested = list(&[("kind", "\"List\""), ("apiVersion", "\"v1\""), ("items", &format!("[{A}]"))]);
    let outer = list(&[("items", &format!("[{nested}]")), ("kind", "\"List\"")]);
    assert_eq!(contents(&outer, true), (vec![], NOTHING));
}

#[test]
fn a_list_may_be_empty_or_null_but_nothing_else() {
    for items in ["[]", "null"] {
        assert_eq!(contents(&list(&[("kind", "\"List\""), ("items", items)]), true), (vec![], NOTHING));
        assert_eq!(contents(&format!("items: {items}\nkind: List\n"), false), (vec![], NOTHING));
    }
    assert_eq!(contents("items:\nkind: List\n", false), (vec![], NOTHING));
    for items in ["1", "\"x\"", "{\"a\": 1}", "true", "-1", "0.5"] {
        let (names, errors) = contents(&list(&[("items", items), ("kind", "\"List\"")]), true);
        assert_eq!(
            (names.len(), &*errors),
            (0, &["document 1 (from line 1): items: not a list of objects".to_owned()][..])
        );
    }
    let twice = list(&[("items", &format!("[{A}]")), ("items", "null"), ("kind", "\"List\"")]);
    assert_eq!(contents(&twice, true), (vec![], NOTHING));
}

#[test]
fn a_list_that_ends_too_early_has_no_items_and_an_error() {
    let (names, errors) =
        contents(&format!("{A}\n{{\"kind\": \"List\", \"items\": [{BAD}, {UNTYPED}, {{"), true);
    assert_eq!(names, ["a"]);
    let [error] = &*errors else { panic!("{errors:?}") };
    assert!(error.starts_with("document 2 (from line 2): EOF while parsing"), "{error}");
    let half = format!("{}---\nitems:\n- {UNTYPED}\n- {{metadata: ", service("a", 1));
    let (names, errors) = contents(&half, false);
    assert_eq!(names, ["a"]);
    let [error] = &*errors else { panic!("{errors:?}") };
    assert!(error.starts_with("document 2 (from line 9): items (from line 11): "), "{error}");
}

#[test]
fn the_items_of_a_yaml_list_may_refer_to_each_other() {
    let text = "kind: List\nitems:\n- &a {apiVersion: v1, kind: Service, metadata: {name: a}}\n- {<<: *a, metadata: {name: b}}\n";
    assert_eq!(contents(text, false), (vec!["a".to_owned(), "b".to_owned()], NOTHING));
}
