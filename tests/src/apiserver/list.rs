//! Answers list requests, by pages if the client asks for them.

use std::sync::{Arc, atomic::Ordering};

use anyhow::{Context as _, Result};
use axum::{body::Body, response::Response};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use serde_json::{Value, json};

use super::{
    Encoding, Query, Request, Resource, Shared, responses, selectors::Selectors, store::Store, stored::Stored,
};

/// The position at which a list continues, as the server encodes it.
struct ContinueToken {
    version: u64,
    /// The first key of the page.
    start: String,
}

impl ContinueToken {
    fn decode(token: &str) -> Result<Self> {
        let token: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token)?)?;
        let version = token["rv"].as_u64().context("rv")?;
        Ok(Self { version, start: token["start"].as_str().context("start")?.to_owned() })
    }

    fn after(version: u64, key: &str) -> String {
        // Formatted by hand, to keep the order of the fields.
        let start = json!(format!("{key}\0"));
        URL_SAFE_NO_PAD.encode(format!("{{\"v\":\"meta.k8s.io/v1\",\"rv\":{version},\"start\":{start}}}"))
    }
}

/// The size from which the server compresses (`defaultGzipThresholdBytes`).
const GZIP_THRESHOLD: usize = 128 << 10;

/// What a list or a page of one has.
struct Page {
    metadata: Value,
    items: Vec<Arc<Stored>>,
}

/// Answers a list request.
pub(super) fn answer(shared: &Shared, resource: &'static Resource, request: &Request) -> Response {
    let encoding = request.encoding();
    let has_cache = !shared.has_no_cache.load(Ordering::Relaxed);
    // The lock is free again before the list is encoded.
    let page = page(&shared.store(), resource, &request.query, has_cache);
    match page.map(|page| page.encode(encoding, resource)) {
        Ok(Ok(body)) if request.accepts_gzip() && body.len() > GZIP_THRESHOLD => {
            responses::compressed(encoding.content_type(), Body::from(responses::gzip(&body)))
        }
        Ok(Ok(body)) => responses::stream(encoding.content_type(), StatusCode::OK, Body::from(body)),
        Ok(Err(error)) => responses::not_encoded(&error),
        Err(status) => responses::failure(encoding, status),
    }
}

/// Returns the first half of a list with one object.
pub(super) fn first_half(encoding: Encoding, resource: &'static Resource) -> Result<Vec<u8>> {
    let version = 1;
    let object = Arc::new(Stored::new(responses::bookmark(resource, version, false)));
    let page = Page { metadata: metadata(version), items: vec![object] };
    let mut list = page.encode(encoding, resource)?;
    list.truncate(list.len() / 2);
    Ok(list)
}

/// Returns the page that a request asks for, or the Status of a refusal. Without `has_cache`, a
/// list from version 0 has pages too.
fn page(store: &Store, resource: &'static Resource, query: &Query, has_cache: bool) -> Result<Page, Value> {
    let least: u64 =
        query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
    if least > store.version() {
        return Err(responses::too_large(least, store.version()));
    }
    let from = match query.get("continue").filter(|token| !token.is_empty()).map(ContinueToken::decode) {
        None => ContinueToken { version: store.version(), start: String::new() },
        Some(Ok(from)) => from,
        Some(Err(error)) => {
            let message = format!("continue key is not valid: {error}");
            return Err(responses::status(400, "BadRequest", message));
        }
    };
    if from.version < store.compacted() {
        return Err(responses::continue_expired());
    }
    Ok(page_from(store, resource, query, &from, has_cache))
}

fn page_from(
    store: &Store,
    resource: &'static Resource,
    query: &Query,
    from: &ContinueToken,
    has_cache: bool,
) -> Page {
    let selectors = query.selectors();
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
    // The cache ignores the limit (`shouldDelegateList` in `storage/cacher`).
    let limit = limit.filter(|_| !has_cache || query.get("resourceVersion") != Some("0"));
    let objects = store.list(resource.plural, from.version);
    let mut rest = objects.range(&*from.start..).filter(|(_, object)| selectors.matches(object.value()));
    let items: Vec<_> = rest.by_ref().take(limit.unwrap_or(usize::MAX)).collect();
    let remaining = rest.count();
    let mut metadata = metadata(from.version);
    if let (Some((last, _)), true) = (items.last(), remaining > 0) {
        metadata["continue"] = json!(ContinueToken::after(from.version, last));
        // With selectors, the server does not know the number of remaining items.
        if selectors.is_empty() {
            metadata["remainingItemCount"] = json!(remaining);
        }
    }
    Page { metadata, items: items.into_iter().map(|(_, object)| Arc::clone(object)).collect() }
}

fn metadata(version: u64) -> Value {
    json!({"resourceVersion": version.to_string()})
}

impl Page {
    fn encode(&self, encoding: Encoding, resource: &Resource) -> Result<Vec<u8>> {
        encoding.list(resource, &self.metadata, self.items.iter().map(|item| &**item))
    }
}

impl Query {
    /// Returns the selectors of the request.
    pub(super) fn selectors(&self) -> Selectors {
        let text = |key| self.get(key).unwrap_or_default();
        Selectors::parse(text("labelSelector"), text("fieldSelector"))
    }
}
