//! Reads YAML documents one after the other, and the items of a list a few at a time.
//!
//! The YAML parser keeps a whole document in memory. So a list in the layout of kubectl is split:
//! its items are parsed apart from each other and from the fields around them. If one part is not
//! valid on its own, because of an anchor or of a line break in a quoted text, the document is read
//! again as a whole.

use std::{
    io::{self, BufRead, Read as _, Seek, SeekFrom},
    mem, str,
};

use serde_json::{Map, Value};
use serde_yaml_ng::{Error, Value as Yaml};

use super::documents::{MAX_SIZE, Sink};
use crate::yaml;

/// Items are parsed together until their text is this long: a parser costs more than a short text.
pub(super) const PART: usize = 64 << 10;
/// An item that stands for all items.
const PLACEHOLDER: &str = "- 0";
/// The longest list that is read again as a whole, in bytes. That takes about thirty times the
/// memory.
const MAX_WHOLE_LIST: u64 = 8 << 20;

/// Reads all documents. A syntax error affects one document only. The items of a list are parsed
/// when their text has `part` bytes.
pub(super) fn read_parts<R: BufRead + Seek>(reader: R, sink: &mut impl Sink, part: usize) {
    let document = Document::default();
    let mut documents = Documents { reader, sink, part, line: 0, offset: 0, document };
    if let Err(error) = documents.read() {
        documents.sink.fail("", format!("cannot be read: {error}"));
    }
}

pub(super) fn parse(text: &str) -> Result<Value, Error> {
    let mut value = yaml::parse(text)?;
    value.apply_merge()?;
    Ok(to_json(value))
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

struct Documents<'a, R, S> {
    reader: R,
    sink: &'a mut S,
    part: usize,
    /// The number of lines and bytes so far.
    line: usize,
    offset: u64,
    document: Document,
}

/// The present document.
#[derive(Default)]
struct Document {
    first_line: usize,
    offset: u64,
    /// It has more than comments and directives.
    has_content: bool,
    state: State,
    /// The text; with the placeholder instead of the items if these are parsed apart.
    header: String,
    /// The fields before the items.
    fields: Map<String, Value>,
    /// The text of the items that are not parsed yet, and its first line.
    part: String,
    part_line: usize,
}

#[derive(Default)]
enum State {
    /// Before the line `items:`.
    #[default]
    Before,
    /// After the line `items:`, before the first item.
    NoItem,
    /// In the items, which have this indentation.
    Items(usize),
    /// After the items.
    After,
    /// Not a list in the layout of kubectl.
    Whole,
    Failed(Failure),
}

/// Why a document cannot be used.
struct Failure {
    field: String,
    what: String,
    /// The text may be valid as a whole.
    is_part: bool,
}

impl Failure {
    fn new(what: String) -> Self {
        Self { field: String::new(), what, is_part: false }
    }
}

impl<R: BufRead + Seek, S: Sink> Documents<'_, R, S> {
    fn read(&mut self) -> io::Result<()> {
        self.offset = self.reader.stream_position()?;
        self.document = Document { first_line: 1, offset: self.offset, ..Document::default() };
        let mut line = Vec::new();
        loop {
            line.clear();
            let length = self.reader.by_ref().take(MAX_SIZE).read_until(b'\n', &mut line)? as u64;
            if length == 0 {
                return self.end();
            }
            if is_marker(&line) {
                self.end()?;
                let (first_line, offset) = (self.line + 1, self.offset);
                self.document = Document { first_line, offset, ..Document::default() };
            }
            self.line += 1;
            self.offset += length;
            match str::from_utf8(&line) {
                Ok(line) => self.line(line),
                Err(error) => self.fail(Failure::new(format!("line {}: not UTF-8 text: {error}", self.line))),
            }
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.start();
        self.document.state = State::Failed(failure);
    }

    fn start(&mut self) {
        if !mem::replace(&mut self.document.has_content, true) {
            self.sink.start_document(self.document.first_line);
        }
    }

    fn line(&mut self, line: &str) {
        if !is_comment(line) {
            self.start();
        }
        let document = &mut self.document;
        if (document.header.len() + document.part.len() + line.len()) as u64 > MAX_SIZE {
            return self.fail(Failure::new(format!("an object is larger than {MAX_SIZE} bytes")));
        }
        match document.state {
            State::Before if is_items(line) => self.start_list(line),
            State::Before | State::After | State::Whole => document.header.push_str(line),
            State::NoItem => self.first_item(line),
            State::Items(indentation) => self.item_line(indentation, line),
            State::Failed(_) => {}
        }
    }

    /// Takes the line `items:`. With the text before it, it must be a mapping. Otherwise it may be
    /// in a quoted text.
    fn start_list(&mut self, line: &str) {
        let document = &mut self.document;
        document.header.push_str(line);
        document.state = match parse(&document.header) {
            Ok(Value::Object(fields)) if fields.get("items") == Some(&Value::Null) => {
                document.fields = fields;
                State::NoItem
            }
            _ => State::Whole,
        };
    }

    /// Takes a line between `items:` and the first item.
    fn first_item(&mut self, line: &str) {
        let document = &mut self.document;
        if is_item(line) {
            line.clone_into(&mut document.part);
            document.part_line = self.line;
            document.state = State::Items(indentation(line));
            // An item in the place of all items, so that the rest is parsed as it stands there.
            let indentation = &line[..indentation(line)];
            document.header.extend([indentation, PLACEHOLDER, "\n"]);
            self.sink.start_items();
        } else {
            document.header.push_str(line);
            if !is_comment(line) {
                document.state = State::Whole;
            }
        }
    }

    /// Takes a line among items that have the indentation `items`.
    fn item_line(&mut self, items: usize, line: &str) {
        let indentation = indentation(line);
        let is_next = indentation == items && is_item(line);
        if is_next && self.document.part.len() >= self.part {
            self.end_part(true);
        }
        let document = &mut self.document;
        if is_next || indentation > items || line.trim().is_empty() || line.trim_start().starts_with('#') {
            document.part.push_str(line);
        } else if line.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            document.state = State::After;
            self.end_part(true);
            self.document.header.push_str(line);
        } else {
            let what = "not a list of objects".to_owned();
            self.fail(Failure { field: "items".to_owned(), what, is_part: true });
        }
    }

    /// Parses the items whose text is complete. `has_more` says that the document continues.
    fn end_part(&mut self, has_more: bool) {
        let document = &mut self.document;
        let (what, is_part) = match parse(&document.part) {
            Ok(Value::Array(items)) => {
                for item in items {
                    self.sink.item(&document.fields, item);
                }
                document.part.clear();
                document.part_line = self.line;
                return;
            }
            Ok(_) => ("not a list of objects".to_owned(), true),
            Err(error) => {
                let what = error.to_string();
                // If no text follows, it cannot end what is incomplete.
                let is_part = has_more || what.starts_with("unknown anchor");
                (what, is_part)
            }
        };
        let field = format!("items (from line {})", document.part_line);
        self.fail(Failure { field, what, is_part });
    }

    /// Completes the present document.
    fn end(&mut self) -> io::Result<()> {
        if !self.document.has_content {
            return Ok(());
        }
        if let State::Items(_) = self.document.state {
            self.end_part(false);
        }
        let Document { offset, state, header, .. } = mem::take(&mut self.document);
        let failure = match state {
            State::Before | State::NoItem | State::Whole => {
                self.whole(&header);
                return Ok(());
            }
            State::Items(_) | State::After => match parse_header(&header) {
                Ok(fields) => {
                    self.sink.end_document(fields);
                    return Ok(());
                }
                Err(what) => Failure { field: String::new(), what, is_part: true },
            },
            State::Failed(failure) => failure,
        };
        let length = self.offset - offset;
        if failure.is_part && length <= MAX_WHOLE_LIST {
            let mut text = String::new();
            self.reader.seek(SeekFrom::Start(offset))?;
            self.reader.by_ref().take(length).read_to_string(&mut text)?;
            self.reader.seek(SeekFrom::Start(self.offset))?;
            self.sink.forget_items();
            self.whole(&text);
        } else {
            self.sink.fail(&failure.field, failure.what);
        }
        Ok(())
    }

    /// Parses a document that is in memory as a whole.
    fn whole(&mut self, text: &str) {
        let mut value = match parse(text) {
            Ok(value) => value,
            Err(error) => return self.sink.fail("", error.to_string()),
        };
        if let Some(fields) = value.as_object_mut() {
            match fields.remove("items") {
                Some(Value::Array(items)) => {
                    self.sink.start_items();
                    for item in items {
                        self.sink.item(fields, item);
                    }
                }
                Some(other) => drop(fields.insert("items".to_owned(), other)),
                None => {}
            }
        }
        self.sink.end_document(value);
    }
}

/// Parses a document that has the placeholder as its only item. Returns its other fields.
fn parse_header(text: &str) -> Result<Value, String> {
    let mut value = parse(text).map_err(|error| error.to_string())?;
    let items = value.as_object_mut().and_then(|fields| fields.remove("items"));
    let is_list = items.is_some_and(|items| items.as_array().is_some_and(|items| *items == [Value::from(0)]));
    if is_list { Ok(value) } else { Err("items: not a list of objects".to_owned()) }
}

/// Returns true for a line that starts a document, also in block scalars (YAML 1.2, 9.1.2).
fn is_marker(line: &[u8]) -> bool {
    line.strip_prefix(b"---")
        .is_some_and(|rest| matches!(rest.first(), None | Some(b' ' | b'\t' | b'\r' | b'\n')))
}

/// Comments and directives alone are no document.
fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with(['#', '%']) || line.trim().is_empty()
}

fn is_items(line: &str) -> bool {
    line.strip_prefix("items:").is_some_and(|rest| {
        rest.trim().is_empty() || (rest.starts_with([' ', '\t']) && rest.trim_start().starts_with('#'))
    })
}

fn is_item(line: &str) -> bool {
    let rest = line.trim_start_matches(' ').strip_prefix('-');
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}
