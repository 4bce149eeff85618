//! Parses and applies the label and field selectors of requests.

use serde_json::Value;

/// A parsed `labelSelector` and `fieldSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Selectors {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    Exists(String),
    NotExists(String),
    Equals(String, String),
    NotEquals(String, String),
}

impl Selectors {
    pub(super) fn parse(labels: &str, fields: &str) -> Self {
        let parse = |text: &str| text.split(',').filter(|term| !term.is_empty()).map(requirement).collect();
        Self { labels: parse(labels), fields: parse(fields) }
    }

    /// Returns true if there is no selector.
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| object["metadata"]["labels"][key].as_str();
        let field = |path: &str| path.split('.').fold(object, |value, key| &value[key]).as_str();
        self.labels.iter().all(|requirement| requirement.holds(label))
            && self.fields.iter().all(|requirement| requirement.holds(field))
    }
}

impl Requirement {
    fn holds<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        match self {
            Self::Exists(key) => get(key).is_some(),
            Self::NotExists(key) => get(key).is_none(),
            Self::Equals(key, value) => get(key) == Some(value),
            Self::NotEquals(key, value) => get(key) != Some(value),
        }
    }
}

fn requirement(term: &str) -> Requirement {
    let pair = |(key, value): (&str, &str)| (key.trim().to_owned(), value.trim().to_owned());
    if let Some((key, value)) = term.split_once("!=").map(pair) {
        Requirement::NotEquals(key, value)
    } else if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')).map(pair) {
        Requirement::Equals(key, value)
    } else if let Some(key) = term.trim().strip_prefix('!') {
        Requirement::NotExists(key.to_owned())
    } else {
        Requirement::Exists(term.trim().to_owned())
    }
}
