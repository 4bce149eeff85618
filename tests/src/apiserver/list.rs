//! Answers list requests, by pages if the client asks for them.

use anyhow::{Context as _, Result};
use axum::{body::Body, response::Response};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use serde_json::{Value, json};

use super::{Query, Resource, responses, selectors::Selectors, store::Store};

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

/// Answers a list request. Without `has_cache`, a list from version 0 has pages too.
pub(super) fn answer(
    store: &Store,
    resource: &'static Resource,
    query: &Query,
    has_cache: bool,
    accepts_gzip: bool,
) -> Response {
    let least: u64 =
        query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
    if least > store.version() {
        return responses::failure(&responses::too_large(least, store.version()));
    }
    let from = match query.get("continue").filter(|token| !token.is_empty()).map(ContinueToken::decode) {
        None => ContinueToken { version: store.version(), start: String::new() },
        Some(Ok(from)) => from,
        Some(Err(error)) => {
            let message = format!("continue key is not valid: {error}");
            return responses::failure(&responses::status(400, "BadRequest", message));
        }
    };
    if from.version < store.compacted() {
        return responses::failure(&responses::continue_expired());
    }
    let page = page(store, resource, query, &from, has_cache);
    let text = format!("{page}\n");
    if accepts_gzip && text.len() > GZIP_THRESHOLD {
        responses::compressed(Body::from(responses::gzip(text.as_bytes())))
    } else {
        responses::whole(StatusCode::OK, &page)
    }
}

fn page(
    store: &Store,
    resource: &'static Resource,
    query: &Query,
    from: &ContinueToken,
    has_cache: bool,
) -> Value {
    let selectors = query.selectors();
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
    // The cache ignores the limit (`shouldDelegateList` in `storage/cacher`).
    let limit = limit.filter(|_| !has_cache || query.get("resourceVersion") != Some("0"));
    let objects = store.list(resource.plural, from.version);
    let mut rest = objects.range(from.start.clone()..).filter(|(_, object)| selectors.matches(object));
    let items: Vec<_> = rest.by_ref().take(limit.unwrap_or(usize::MAX)).collect();
    let remaining = rest.count();
    let mut metadata = json!({"resourceVersion": from.version.to_string()});
    if let (Some((last, _)), true) = (items.last(), remaining > 0) {
        metadata["continue"] = json!(ContinueToken::after(from.version, last));
        // With selectors, the server does not know the number of remaining items.
        if selectors.is_empty() {
            metadata["remainingItemCount"] = json!(remaining);
        }
    }
    let items: Vec<Value> = items.into_iter().map(|(_, object)| item(object)).collect();
    json!({
        "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version(),
        "metadata": metadata, "items": items,
    })
}

/// Returns an item of a list, which has no `kind` and no `apiVersion`.
fn item(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("kind");
        fields.remove("apiVersion");
    }
    object
}

impl Query {
    /// Returns the selectors of the request.
    pub(super) fn selectors(&self) -> Selectors {
        let text = |key| self.get(key).unwrap_or_default();
        Selectors::parse(text("labelSelector"), text("fieldSelector"))
    }
}
