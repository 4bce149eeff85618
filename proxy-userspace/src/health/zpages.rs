//! What `/statusz` and `/flagz` have in common: which format a client gets, as upstream negotiates
//! it (`apiserver/pkg/server/statusz` and `flagz`, 1.36), and the head of the text.

use std::cmp::Reverse;

use axum::{
    Json,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::routes::NO_SNIFF;

/// The name of this component on the pages.
pub(super) const COMPONENT: &str = "shunt";
const GROUP: &str = "config.k8s.io";
/// The versions of the JSON, the newest first: that of 1.36, and that of 1.35 with the same fields.
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

/// The format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    /// JSON of this version of the group `config.k8s.io`.
    Json(&'static str),
}

/// One media range of a header `Accept`.
#[derive(Debug, Default)]
struct Clause<'a> {
    main_type: &'a str,
    subtype: &'a str,
    quality: f32,
    /// The parameters `g`, `v` and `as`.
    group: Option<&'a str>,
    version: Option<&'a str>,
    kind: Option<&'a str>,
    /// A parameter asks for what these pages do not have: a stream, or a version of the server.
    is_unusable: bool,
}

/// Returns the text at the start of a page.
pub(super) fn head(page: &str) -> String {
    format!(
        "\n{COMPONENT} {page}\nWarning: This page is for people who debug. Its format can change in every \
         version. Programs should ask for JSON, or read /metrics.\n"
    )
}

/// Returns the head of a page in JSON: `kind`, `apiVersion` and `metadata`.
pub(super) fn object(kind: &str, version: &str) -> serde_json::Value {
    json!({ "kind": kind, "apiVersion": format!("{GROUP}/{version}"), "metadata": { "name": COMPONENT } })
}

/// Returns the format for a page of this kind, or the answer with status 406 if there is none.
pub(super) fn negotiate(kind: &str, headers: &HeaderMap) -> Result<Format, Box<Response>> {
    let values = headers.get_all(header::ACCEPT).iter();
    let accept: Vec<&str> = values.filter_map(|value| value.to_str().ok()).collect();
    format_for(kind, &accept.join(",")).ok_or_else(|| Box::new(not_acceptable(kind)))
}

/// Without a header the format is text. Otherwise the first range counts that one of the formats
/// matches, by quality. JSON needs the group, a version and the kind; text must not have them.
fn format_for(kind: &str, accept: &str) -> Option<Format> {
    if accept.trim().is_empty() {
        return Some(Format::Text);
    }
    let mut clauses: Vec<_> = accept.split(',').filter_map(Clause::parse).collect();
    clauses.sort_by_key(|clause| {
        // Qualities are from 0 to 1 with three digits.
        #[expect(clippy::cast_possible_truncation, reason = "a saturating cast is right for any number")]
        let quality = (clause.quality * 1000.0) as i32;
        (Reverse(quality), clause.main_type == "*", clause.subtype == "*")
    });
    clauses.iter().filter(|clause| !clause.is_unusable).find_map(|clause| clause.format(kind))
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (main_type, subtype) = parts.next()?.split_once('/')?;
        let mut clause = Self { main_type, subtype, quality: 1.0, ..Self::default() };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.trim() {
                "q" => clause.quality = value.parse().unwrap_or_default(),
                "g" => clause.group = Some(value),
                "v" => clause.version = Some(value),
                "as" => clause.kind = Some(value),
                "stream" | "sv" => clause.is_unusable |= !value.is_empty(),
                _ => {}
            }
        }
        Some(clause)
    }

    fn format(&self, kind: &str) -> Option<Format> {
        if self.matches("application", "json") && self.group == Some(GROUP) && self.kind == Some(kind) {
            let version = VERSIONS.into_iter().find(|version| self.version == Some(version));
            return version.map(Format::Json);
        }
        let is_plain = (self.group, self.version, self.kind) == (None, None, None);
        (is_plain && self.matches("text", "plain")).then_some(Format::Text)
    }

    fn matches(&self, main_type: &str, subtype: &str) -> bool {
        let same = |range: &str, name: &str| range == "*" || range.eq_ignore_ascii_case(name);
        same(self.main_type, main_type) && same(self.subtype, subtype)
    }
}

/// As upstream, the body is a `Status` of the API, whatever the client accepts.
fn not_acceptable(kind: &str) -> Response {
    let json = VERSIONS.map(|version| format!("application/json;v={version};g={GROUP};as={kind}"));
    let message = format!("only the following media types are accepted: text/plain, {}", json.join(", "));
    let code = StatusCode::NOT_ACCEPTABLE;
    let body = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": "NotAcceptable",
        "code": code.as_u16(),
    });
    (code, [NO_SNIFF], Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = "application/json;v=v1beta1;g=config.k8s.io;as=Statusz";

    #[test]
    fn text_is_the_format_without_a_header_and_for_ranges_that_contain_it() {
        for accept in ["", " ", "*/*", "text/*;q=0.5", "text/plain; charset=utf-8", "text/html, Text/Plain"] {
            assert_eq!(format_for("Statusz", accept), Some(Format::Text), "{accept:?}");
        }
        for accept in
            ["text/html", "application/xml", "text/plain;sv=v1", "text/plain;as=Statusz", "nonsense"]
        {
            assert_eq!(format_for("Statusz", accept), None, "{accept:?}");
        }
    }

    #[test]
    fn json_needs_the_group_a_known_version_and_the_kind_of_the_page() {
        assert_eq!(format_for("Statusz", JSON), Some(Format::Json("v1beta1")));
        let of_1_35 = JSON.replace("v1beta1", "v1alpha1");
        assert_eq!(format_for("Statusz", &of_1_35), Some(Format::Json("v1alpha1")));
        assert_eq!(format_for("Flagz", JSON), None);
        for accept in [
            "application/json",
            "application/json;v=v1beta1;g=config.k8s.io",
            "application/json;v=v1beta1;as=Statusz",
            "application/json;v=v9;g=config.k8s.io;as=Statusz",
            "application/yaml;v=v1beta1;g=config.k8s.io;as=Statusz",
        ] {
            assert_eq!(format_for("Statusz", accept), None, "{accept}");
        }
    }

    #[test]
    fn the_range_with_the_highest_quality_counts_and_wildcards_come_last() {
        let first = |accept: &str| format_for("Statusz", accept);
        assert_eq!(first(&format!("*/*,{JSON}")), Some(Format::Json("v1beta1")));
        assert_eq!(first(&format!("{JSON};q=0.4,text/plain;q=0.5")), Some(Format::Text));
        assert_eq!(first(&format!("{},*/*", JSON.replace("v1beta1", "foo"))), Some(Format::Text));
    }

    #[test]
    fn a_header_that_comes_twice_counts_as_one() {
        let headers = ["text/html", "text/plain"].map(|value| (header::ACCEPT, value.parse().expect("text")));
        assert_eq!(negotiate("Statusz", &headers.into_iter().collect()).ok(), Some(Format::Text));
    }
}
