//! Writes `/flagz`: the command line flags and their values (KEP-4828).

use std::{collections::BTreeMap, fmt::Write as _};

use axum::{
    Json,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::{
    routes::NO_SNIFF,
    zpages::{self, Format},
};

/// Answers with the flags in the format that the client accepts.
pub(super) fn answer(flags: &BTreeMap<&'static str, String>, headers: &HeaderMap) -> Response {
    match zpages::negotiate("Flagz", headers) {
        Ok(Format::Text) => ([NO_SNIFF], text(flags)).into_response(),
        Ok(Format::Json(version)) => {
            let mut page = zpages::object("Flagz", version);
            page["flags"] = json!(flags);
            ([NO_SNIFF], Json(page)).into_response()
        }
        Err(response) => *response,
    }
}

fn text(flags: &BTreeMap<&'static str, String>) -> String {
    let mut text = zpages::head("flagz");
    for (name, value) in flags {
        // Text on the command line can contain line breaks, which must not look like other flags.
        let _infallible = writeln!(text, "{name}={}", value.replace(char::is_control, " "));
    }
    text
}
