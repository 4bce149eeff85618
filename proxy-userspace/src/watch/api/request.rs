//! The list and watch requests for one kind.

use http::header::ACCEPT;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::failure::{Failure, FailureClass};
use crate::watch::decode::Kind;

/// client-go's page size.
pub(super) const PAGE_SIZE: u32 = 500;

/// The characters that Go's `url.QueryEscape` encodes. It writes a blank as `+`, but no query has
/// one.
pub(super) const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Which objects of a kind the server sends, and how it writes them.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestOptions {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
    /// The header `Accept`.
    pub(super) accept: String,
}

impl RequestOptions {
    /// Removes a field selector that the server does not know, if it only leaves out what is not
    /// needed. Returns true if it was removed. `failure` is the answer of the server.
    ///
    /// Servers before 1.31 do not know `spec.clusterIP` of Services.
    pub(super) fn remove_unknown_field(&mut self, failure: &Failure) -> bool {
        let is_unknown = |selector: &mut String| {
            selector.split_once("!=").is_some_and(|(field, _)| {
                // The first error is that of a kind without fields of its own.
                failure.class == FailureClass::Status(400)
                    && (failure.message.contains(&format!("{field:?} is not a known field selector"))
                        || failure.message.contains(&format!("field label not supported: {field}")))
            })
        };
        self.fields.take_if(is_unknown).is_some()
    }
}

/// How new the data of a list must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Freshness {
    /// The server may answer from its cache, however old that is.
    Any,
    /// The server may answer from its cache, once that has at least this version.
    NotOlderThan(String),
    /// The newest data. Servers before 1.31 read them from etcd.
    Newest,
}

pub(super) type HttpRequest = http::Request<Vec<u8>>;

/// Requests a list, or its first page if there is a limit.
pub(super) fn list<K: Kind>(
    options: &RequestOptions,
    freshness: &Freshness,
    limit: Option<u32>,
) -> Result<HttpRequest, Failure> {
    let version = match freshness {
        Freshness::Any => Some("0"),
        Freshness::NotOlderThan(version) => Some(&**version),
        Freshness::Newest => None,
    };
    let limit = limit.map(|limit| limit.to_string());
    get::<K>(options, &[("limit", limit.as_deref()), ("resourceVersion", version)])
}

/// Requests a further page of a list. The server refuses a resource version here.
pub(super) fn next_page<K: Kind>(
    options: &RequestOptions,
    limit: Option<u32>,
    token: &str,
) -> Result<HttpRequest, Failure> {
    let limit = limit.map(|limit| limit.to_string());
    get::<K>(options, &[("continue", Some(token)), ("limit", limit.as_deref())])
}

/// Requests a watch of at most `seconds` that starts after `version`.
pub(super) fn watch<K: Kind>(
    options: &RequestOptions,
    version: &str,
    seconds: u32,
) -> Result<HttpRequest, Failure> {
    let seconds = seconds.to_string();
    get::<K>(
        options,
        &[
            ("allowWatchBookmarks", Some("true")),
            ("resourceVersion", Some(version)),
            ("timeoutSeconds", Some(&seconds)),
            ("watch", Some("true")),
        ],
    )
}

/// Requests a streaming list (KEP-3157): the present objects, a bookmark that ends them, and then
/// their changes. The server answers from its cache, once that is fresh enough.
pub(super) fn streaming_list<K: Kind>(
    options: &RequestOptions,
    freshness: &Freshness,
    seconds: u32,
) -> Result<HttpRequest, Failure> {
    let seconds = seconds.to_string();
    let version = match freshness {
        Freshness::NotOlderThan(version) => Some(&**version),
        Freshness::Any | Freshness::Newest => None,
    };
    get::<K>(
        options,
        &[
            ("allowWatchBookmarks", Some("true")),
            ("resourceVersion", version),
            ("resourceVersionMatch", Some("NotOlderThan")),
            ("sendInitialEvents", Some("true")),
            ("timeoutSeconds", Some(&seconds)),
            ("watch", Some("true")),
        ],
    )
}

/// Builds a request with these parameters and the selectors, sorted as client-go does.
fn get<K: Kind>(
    options: &RequestOptions,
    parameters: &[(&str, Option<&str>)],
) -> Result<HttpRequest, Failure> {
    let filters =
        [("fieldSelector", options.fields.as_deref()), ("labelSelector", options.labels.as_deref())];
    let parameters = parameters.iter().chain(&filters);
    let mut parameters: Vec<_> = parameters.filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    parameters.sort_unstable();
    let mut target = path::<K>();
    for (index, (name, value)) in parameters.into_iter().enumerate() {
        target.push(if index == 0 { '?' } else { '&' });
        target.push_str(name);
        target.push('=');
        target.extend(utf8_percent_encode(value, ESCAPED));
    }
    http::Request::get(target).header(ACCEPT, &options.accept).body(Vec::new()).map_err(Failure::invalid)
}

fn path<K: Kind>() -> String {
    match K::GROUP {
        "" => format!("/api/{}/{}", K::VERSION, K::PLURAL),
        group => format!("/apis/{group}/{}/{}", K::VERSION, K::PLURAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Service;

    fn target(request: Result<HttpRequest, Failure>) -> String {
        request.expect("a request").uri().to_string()
    }

    #[test]
    fn only_an_unknown_field_that_leaves_objects_out_is_removed() {
        let refused = |code, message: &str| Failure::status(code, message);
        let unknown = refused(
            400,
            "\"spec.clusterIP\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
        );
        let unsupported = refused(400, "field label not supported: spec.clusterIP");
        let fields =
            |text: &str| RequestOptions { fields: Some(text.to_owned()), ..RequestOptions::default() };
        assert!(fields("spec.clusterIP!=None").remove_unknown_field(&unknown));
        assert!(fields("spec.clusterIP!=None").remove_unknown_field(&unsupported));
        assert!(!fields("spec.clusterIP=None").remove_unknown_field(&unknown));
        assert!(!fields("metadata.name=node1").remove_unknown_field(&unknown));
        for other in [refused(400, "Invalid value: \"x\""), refused(422, &unknown.message)] {
            assert!(!fields("spec.clusterIP!=None").remove_unknown_field(&other), "{other}");
        }
    }

    #[test]
    fn parameters_are_those_of_client_go() {
        let options = RequestOptions {
            labels: Some("!service.kubernetes.io/service-proxy-name".to_owned()),
            fields: Some("spec.clusterIP!=None".to_owned()),
            accept: String::new(),
        };
        let both = "fieldSelector=spec.clusterIP%21%3DNone\
                    &labelSelector=%21service.kubernetes.io%2Fservice-proxy-name";
        let since = Freshness::NotOlderThan("7".to_owned());
        let cases = [
            (
                list::<Service>(&options, &Freshness::Any, Some(500)),
                format!("{both}&limit=500&resourceVersion=0"),
            ),
            (list::<Service>(&options, &since, None), format!("{both}&resourceVersion=7")),
            (list::<Service>(&options, &Freshness::Newest, Some(500)), format!("{both}&limit=500")),
            (next_page::<Service>(&options, Some(500), "a=="), format!("continue=a%3D%3D&{both}&limit=500")),
            (
                watch::<Service>(&options, "7", 400),
                format!("allowWatchBookmarks=true&{both}&resourceVersion=7&timeoutSeconds=400&watch=true"),
            ),
            (
                streaming_list::<Service>(&options, &Freshness::Any, 400),
                format!(
                    "allowWatchBookmarks=true&{both}&resourceVersionMatch=NotOlderThan\
                     &sendInitialEvents=true&timeoutSeconds=400&watch=true"
                ),
            ),
            (
                streaming_list::<Service>(&RequestOptions::default(), &since, 400),
                "allowWatchBookmarks=true&resourceVersion=7&resourceVersionMatch=NotOlderThan\
                 &sendInitialEvents=true&timeoutSeconds=400&watch=true"
                    .to_owned(),
            ),
        ];
        for (request, query) in cases {
            assert_eq!(target(request), format!("/api/v1/services?{query}"));
        }
    }
}
