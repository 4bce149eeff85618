//! Prints lists as kubectl does: as tables, JSON, YAML, or by a JSONPath template.

use std::io::{self, BufWriter, Write};

use jsonpath_rust::{
    parser::{errors::JsonPathError, model::JpQuery, parse_json_path},
    query::js_path_process,
};
use serde::Serialize;
use serde_json::{Value, json};
use tabwriter::TabWriter;

use super::{API_VERSION, Row};
use crate::yaml;

/// How to print.
#[derive(Clone, Debug)]
pub enum Output {
    /// A table for people.
    Table,
    /// The same with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// Values that a template picks.
    JsonPath(Template),
}

/// A template of texts and JSONPath expressions in braces, such as `{.items[*].name}`.
#[derive(Clone, Debug)]
pub struct Template(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Path(JpQuery),
}

/// The value of `-o` is not a format.
#[derive(Debug, thiserror::Error)]
pub enum InvalidOutput {
    /// No format has this name.
    #[error("must be table, wide, json, yaml or jsonpath='{{.items[*].name}}'")]
    UnknownFormat,
    /// A brace is not closed.
    #[error("a brace is not closed in the JSONPath template")]
    OpenBrace,
    /// An expression is no JSONPath.
    #[error(
        "{{{expression}}} is not a JSONPath expression (RFC 9535; range and end of kubectl are not supported): {problem}"
    )]
    Path {
        /// The expression.
        expression: String,
        /// What the parser says.
        problem: String,
    },
}

impl std::str::FromStr for Output {
    type Err = InvalidOutput;

    fn from_str(text: &str) -> Result<Self, InvalidOutput> {
        match text {
            "table" => Ok(Self::Table),
            "wide" => Ok(Self::Wide),
            "json" => Ok(Self::Json),
            "yaml" => Ok(Self::Yaml),
            _ => match text.strip_prefix("jsonpath=") {
                Some(template) => Template::parse(template).map(Self::JsonPath),
                None => Err(InvalidOutput::UnknownFormat),
            },
        }
    }
}

impl Template {
    fn parse(mut text: &str) -> Result<Self, InvalidOutput> {
        let mut parts = Vec::new();
        while let Some(open) = text.find('{') {
            let (before, rest) = (&text[..open], &text[open + 1..]);
            let close = rest.find('}').ok_or(InvalidOutput::OpenBrace)?;
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(Part::of_expression(&rest[..close])?);
            text = &rest[close + 1..];
        }
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        Ok(Self(parts))
    }

    fn write(&self, document: &Value, to: &mut dyn Write) -> io::Result<()> {
        for part in &self.0 {
            match part {
                Part::Text(text) => to.write_all(text.as_bytes())?,
                Part::Path(path) => {
                    // Fails if a result is not in the document. No parsed path has such a result.
                    let found = js_path_process(path, document).unwrap_or_default();
                    let values: Vec<String> = found.into_iter().map(|found| plain(found.val)).collect();
                    to.write_all(values.join(" ").as_bytes())?;
                }
            }
        }
        writeln!(to)
    }
}

impl Part {
    /// Reads what is in the braces. As with kubectl, `$` may be left out, and a quoted text stands
    /// for itself, with `\n` and `\t`.
    fn of_expression(expression: &str) -> Result<Self, InvalidOutput> {
        let trimmed = expression.trim();
        if let Some(text) = trimmed.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
            return Ok(Self::Text(text.replace("\\n", "\n").replace("\\t", "\t")));
        }
        let path = if trimmed.starts_with('$') { trimmed.to_owned() } else { format!("${trimmed}") };
        parse_json_path(&path).map(Self::Path).map_err(|error| InvalidOutput::Path {
            expression: trimmed.to_owned(),
            problem: problem_of(&error),
        })
    }
}

/// Returns the error on one line: pest draws the expression with a mark below it.
fn problem_of(error: &JsonPathError) -> String {
    match error {
        JsonPathError::PestError(error) => error.variant.message().into_owned(),
        other => other.to_string(),
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

/// Prints a list. JSON and YAML name its kind. A table of no rows says so on standard error, as
/// kubectl does.
pub fn print<T: Row>(output: &Output, kind: &'static str, rows: &[T], to: &mut dyn Write) -> io::Result<()> {
    match output {
        Output::Table => table(rows, false, true, to),
        Output::Wide => table(rows, true, true, to),
        Output::Json | Output::Yaml | Output::JsonPath(_) => {
            let list = List { api_version: API_VERSION, kind, items: rows };
            print_document(output, &list, to)
        }
    }
}

/// A list as JSON has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<'a, T> {
    api_version: &'static str,
    kind: &'static str,
    items: &'a [T],
}

/// Prints one document that is not a list. `table` stands for its own text.
pub fn print_one<T: Serialize + std::fmt::Display>(
    output: &Output,
    kind: &str,
    document: &T,
    to: &mut dyn Write,
) -> io::Result<()> {
    if matches!(output, Output::Table | Output::Wide) {
        return write!(to, "{document}");
    }
    let mut value = serde_json::to_value(document)?;
    value["apiVersion"] = json!(API_VERSION);
    value["kind"] = json!(kind);
    print_document(output, &value, to)
}

fn print_document(output: &Output, document: &impl Serialize, to: &mut dyn Write) -> io::Result<()> {
    match output {
        Output::JsonPath(template) => template.write(&serde_json::to_value(document)?, to),
        Output::Yaml => {
            let text = yaml::to_string(document).map_err(io::Error::other)?;
            to.write_all(text.as_bytes())
        }
        _ => {
            let mut buffered = BufWriter::new(to);
            serde_json::to_writer_pretty(&mut buffered, document)?;
            writeln!(buffered)?;
            buffered.flush()
        }
    }
}

/// Prints a table, with or without its header.
pub fn table<T: Row>(rows: &[T], is_wide: bool, has_header: bool, to: &mut dyn Write) -> io::Result<()> {
    let (columns, wide) = T::COLUMNS;
    let mut table = TabWriter::new(to).minwidth(0).padding(3);
    if has_header {
        let header: Vec<_> = columns.iter().chain(wide.iter().filter(|_| is_wide)).copied().collect();
        writeln!(table, "{}", header.join("\t"))?;
    }
    for row in rows {
        let mut cells = row.cells();
        if is_wide {
            cells.extend(row.wide_cells());
        }
        writeln!(table, "{}", cells.join("\t"))?;
    }
    table.flush()
}
