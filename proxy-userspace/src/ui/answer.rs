//! Makes answers of pages: the headers that keep a browser from doing what the pages do not need,
//! and errors.

use std::sync::LazyLock;

use axum::{
    extract::Request,
    http::{HeaderName, StatusCode, header, uri::Authority},
    middleware::Next,
    response::{Html, IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use maud::{Markup, html};
use ring::digest::{SHA256, digest};

use super::layout::{SCRIPT, STYLE, Section, frame};
use crate::sync::NoAnswer;

/// Only the style and the script of the pages themselves, which their hashes name.
static CONTENT_SECURITY_POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |text: &str| BASE64_STANDARD.encode(digest(&SHA256, text.as_bytes()));
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:; form-action 'self'; base-uri \
         'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    )
});

const HEADERS: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Answers with a page.
pub(super) fn answer(section: Section, content: &Markup) -> Response {
    with_status(StatusCode::OK, section, content)
}

/// Answers that something is not there.
pub(super) fn missing(what: &str) -> Response {
    with_status(StatusCode::NOT_FOUND, Section::Error, &html! { h1 { "Not found" } p { (what) } })
}

/// Answers that the sync loop does not answer.
pub(super) fn unavailable(section: Section, error: NoAnswer) -> Response {
    let content = html! { h1 { (section.title()) } p.trouble role="status" { (error) "." } };
    with_status(StatusCode::SERVICE_UNAVAILABLE, section, &content)
}

fn with_status(status: StatusCode, section: Section, content: &Markup) -> Response {
    let policy = [(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY.as_str())];
    (status, HEADERS, policy, Html(frame(section, content).into_string())).into_response()
}

/// Refuses requests that name this server by a DNS name other than `localhost`. A page of somebody
/// else could have such a name, which leads here (DNS rebinding), and read these pages in the
/// browser of whoever may.
pub(super) async fn by_address(request: Request, next: Next) -> Response {
    let header = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if header.or_else(|| request.uri().host()).is_some_and(is_address) {
        return next.run(request).await;
    }
    let content = html! {
        h1 { "Open this page by an address" }
        p { "For safety, these pages answer only requests to an IP address or to " code { "localhost" } "." }
    };
    with_status(StatusCode::FORBIDDEN, Section::Error, &content)
}

/// Returns true for an IP address or `localhost`, with or without a port.
fn is_address(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || bare.parse::<std::net::IpAddr>().is_ok()
}
