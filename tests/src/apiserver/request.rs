//! The requests for lists, watches and patches, as tests see them.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderValue, Uri};

use super::{Encoding, Resource, Verb};

/// A request that the server received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The resource's name in URLs.
    pub plural: &'static str,
    /// The kind of the request.
    pub verb: Verb,
    /// The path and the query, as they were sent.
    pub target: String,
    /// The query, decoded.
    pub query: Query,
    /// The headers. Values that are not ASCII are left out.
    pub headers: BTreeMap<String, String>,
}

/// The decoded query of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query(pub(super) BTreeMap<String, String>);

impl Request {
    pub(super) fn new(resource: &Resource, uri: &Uri, headers: &HeaderMap, query: Query) -> Self {
        let text = |value: &HeaderValue| Some(value.to_str().ok()?.to_owned());
        Self {
            plural: resource.plural,
            verb: query.verb(),
            target: uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            query,
            headers: headers
                .iter()
                .filter_map(|(name, value)| Some((name.to_string(), text(value)?)))
                .collect(),
        }
    }

    /// The encoding of the answer.
    pub fn encoding(&self) -> Encoding {
        Encoding::negotiate(self.accept()).unwrap_or_default()
    }

    /// Returns true if the client accepts an encoding that the server has.
    pub(super) fn is_acceptable(&self) -> bool {
        Encoding::negotiate(self.accept()).is_some()
    }

    fn accept(&self) -> Option<&str> {
        self.headers.get("accept").map(String::as_str)
    }

    pub(super) fn accepts_gzip(&self) -> bool {
        self.headers.get("accept-encoding").is_some_and(|value| value.contains("gzip"))
    }
}

impl Query {
    /// The value of a parameter.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Returns the query that selects only objects of a namespace, in addition.
    pub(super) fn in_namespace(mut self, namespace: &str) -> Self {
        let fields = self.0.entry("fieldSelector".to_owned()).or_default();
        *fields = format!("{fields},metadata.namespace={namespace}");
        self
    }

    pub(super) fn is(&self, key: &str) -> bool {
        matches!(self.get(key), Some("true" | "1"))
    }

    fn verb(&self) -> Verb {
        match (self.is("watch"), self.is("sendInitialEvents")) {
            (true, true) => Verb::WatchList,
            (true, false) => Verb::Watch,
            (false, _) => Verb::List,
        }
    }
}
