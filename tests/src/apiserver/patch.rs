//! Patches of Nodes: merge patches (RFC 7396), as `kubectl annotate` and shunt send them.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::{Path, State},
    response::Response,
};
use http::{HeaderMap, StatusCode, Uri, header::CONTENT_TYPE};
use serde_json::{Map, Value};

use super::{Encoding, Query, Request, Resource, Shared, Verb, lock, responses, routes::status_of};

/// The only type of patch that is supported.
const MERGE_PATCH: &str = "application/merge-patch+json";

/// Patches a Node. `Request` is what faults and tests see of it.
pub(super) async fn patch_node(
    State(shared): State<Arc<Shared>>,
    Path(name): Path<String>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Some(resource) = Resource::ALL.iter().find(|resource| resource.plural == "nodes") else {
        return responses::not_found(Encoding::of(&headers));
    };
    let request = Request { verb: Verb::Patch, ..Request::new(resource, &uri, &headers, Query::default()) };
    let encoding = request.encoding();
    lock(&shared.requests).push(request.clone());
    if !shared.accepts_token(&request) {
        return responses::failure(encoding, responses::unauthorized());
    }
    if let Some(status) = shared.fault(&request).and_then(|fault| status_of(fault, resource, Verb::Patch)) {
        return responses::failure(encoding, status);
    }
    if headers.get(CONTENT_TYPE).is_none_or(|given| given != MERGE_PATCH) {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {MERGE_PATCH}"
        );
        return responses::failure(encoding, responses::status(415, "UnsupportedMediaType", message));
    }
    match serde_json::from_slice(&body) {
        Ok(patch) => answer(&shared, resource, &name, &patch, encoding),
        Err(error) => responses::failure(encoding, responses::status(400, "BadRequest", error.to_string())),
    }
}

/// Changes the object and returns it. As in the real server, a patch that changes nothing makes no
/// new version.
fn answer(
    shared: &Shared,
    resource: &'static Resource,
    name: &str,
    patch: &Value,
    encoding: Encoding,
) -> Response {
    let patched = shared.change_store(|store| {
        let Some(old) = store.get(resource.plural, format!("/{name}")).cloned() else { return Ok(None) };
        let mut new = old.value().clone();
        merge(&mut new, patch);
        if new != *old.value() {
            store.put(new)?;
        }
        anyhow::Ok(store.get(resource.plural, format!("/{name}")).cloned())
    });
    match patched {
        Ok(Some(object)) => responses::whole(encoding, StatusCode::OK, &object),
        Ok(None) => responses::failure(
            encoding,
            responses::status(404, "NotFound", format!("nodes {name:?} not found")),
        ),
        Err(error) => responses::failure(encoding, responses::status(422, "Invalid", format!("{error:#}"))),
    }
}

/// Applies a merge patch: null removes a field, an object is merged, and anything else replaces.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (name, value) in patch {
        if value.is_null() {
            target.remove(name);
        } else {
            merge(target.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_merge_patch_removes_merges_and_replaces() {
        let mut object =
            json!({"metadata": {"name": "n", "annotations": {"a": "1", "b": "2"}}, "list": [1, 2]});
        merge(&mut object, &json!({"metadata": {"annotations": {"a": null, "c": "3"}}, "list": [3]}));
        assert_eq!(
            object,
            json!({"metadata": {"name": "n", "annotations": {"b": "2", "c": "3"}}, "list": [3]})
        );
        merge(&mut object, &json!({"metadata": {"annotations": null}, "new": {"gone": null, "here": {}}}));
        assert_eq!(object, json!({"metadata": {"name": "n"}, "list": [3], "new": {"here": {}}}));
    }
}
