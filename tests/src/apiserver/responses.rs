//! Builds response bodies and headers as a kube-apiserver writes them.

use std::io::Write as _;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use flate2::{Compression, write::GzEncoder};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use super::{Encoding, Resource, faults::Verb, rights::Attributes, stored::Stored};

/// Returns a complete response with an object.
pub(super) fn whole(encoding: Encoding, status: StatusCode, object: &Stored) -> Response {
    match encoding.object(object) {
        Ok(body) => stream(encoding.content_type(), status, Body::from(body)),
        Err(error) => not_encoded(&error),
    }
}

/// Returns the answer if an object has no protobuf encoding here. It is JSON, which each Status
/// has.
pub(super) fn not_encoded(error: &anyhow::Error) -> Response {
    failure(Encoding::Json, internal_error(error))
}

/// Returns the Status of an object that has no encoding here.
pub(super) fn internal_error(error: &anyhow::Error) -> Value {
    status(500, "InternalError", format!("{error:#}"))
}

/// Returns a response with gzip. `body` is compressed already.
pub(super) fn compressed(content_type: &'static str, body: Body) -> Response {
    let mut response = stream(content_type, StatusCode::OK, body);
    response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    response
}

/// Returns a whole gzip member.
pub(super) fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    // Writing to memory does not fail.
    encoder.write_all(text).and_then(|()| encoder.finish()).unwrap_or_default()
}

/// Returns a response with any body.
pub(super) fn stream(content_type: &'static str, status: StatusCode, body: Body) -> Response {
    let head = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache, private"),
        (header::HeaderName::from_static("audit-id"), "00000000-0000-4000-8000-000000000000"),
    ];
    (status, head, body).into_response()
}

/// Returns a `Status` of failure.
pub(super) fn status(code: u16, reason: &str, message: impl Into<String>) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message.into(), "reason": reason, "code": code,
    })
}

/// Returns the answer with a `Status` of failure.
pub(super) fn failure(encoding: Encoding, body: Value) -> Response {
    let code = body["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let code = code.and_then(|code| StatusCode::from_u16(code).ok());
    whole(encoding, code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &Stored::new(body))
}

pub(super) fn not_found(encoding: Encoding) -> Response {
    failure(encoding, status(404, "NotFound", "the server could not find the requested resource"))
}

/// Returns the answer to a request that accepts no encoding of the server.
pub(super) fn not_acceptable() -> Response {
    let message = "only the following media types are accepted: application/json, \
                   application/vnd.kubernetes.protobuf";
    failure(Encoding::Json, status(406, "NotAcceptable", message))
}

pub(super) fn unauthorized() -> Value {
    status(401, "Unauthorized", "Unauthorized")
}

/// Returns the answer to a list or watch that the client has no right to.
pub(super) fn forbidden_list(resource: &Resource, verb: Verb) -> Value {
    forbidden(&Attributes::of_all(resource, verb))
}

/// Returns the answer to a request that the client has no right to.
pub(super) fn forbidden(asked: &Attributes) -> Value {
    let Attributes { verb, group, resource, namespace, name } = asked;
    let kind = if group.is_empty() { resource.clone() } else { format!("{resource}.{group}") };
    let object = name.as_ref().map(|name| format!(" {name:?}")).unwrap_or_default();
    let scope = match namespace {
        Some(namespace) => format!("in the namespace {namespace:?}"),
        None => "at the cluster scope".to_owned(),
    };
    let message = format!(
        "{kind}{object} is forbidden: User \"viewer\" cannot {verb} resource {resource:?} in API group {group:?} {scope}"
    );
    let mut body = status(403, "Forbidden", message);
    body["details"] = json!({"kind": resource});
    if !group.is_empty() {
        body["details"]["group"] = json!(group);
    }
    if let Some(name) = name {
        body["details"]["name"] = json!(name);
    }
    body
}

/// Returns the answer to `sendInitialEvents` if the feature gate is off.
pub(super) fn streaming_refused() -> Value {
    let message = "ListOptions.meta.k8s.io \"\" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden \
                   for watch unless the WatchList feature gate is enabled";
    status(422, "Invalid", message)
}

/// Returns the answer to a continue token whose version is compacted.
pub(super) fn continue_expired() -> Value {
    let message = "The provided continue parameter is too old to display a consistent list result. You can start a new \
                   list without the continue parameter.";
    status(410, "Expired", message)
}

/// Returns the answer to a list that must not be older than a version in the future.
pub(super) fn too_large(version: u64, current: u64) -> Value {
    let message = format!("Timeout: Too large resource version: {version}, current: {current}");
    let mut body = status(504, "Timeout", &message);
    body["details"] = json!({
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    });
    body
}

/// Returns the `ERROR` event of a watch that asks for compacted history.
pub(super) fn too_old(version: u64, compacted: u64) -> Value {
    status(410, "Expired", format!("too old resource version: {version} ({compacted})"))
}

/// Returns the object of a bookmark.
pub(super) fn bookmark(resource: &Resource, version: u64, ends_list: bool) -> Value {
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if ends_list {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    let mut object =
        json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": metadata});
    // The server writes the required fields of these kinds even in empty objects.
    match resource.kind {
        "Service" => {
            object["spec"] = json!({});
            object["status"] = json!({"loadBalancer": {}});
        }
        "EndpointSlice" => {
            object["addressType"] = json!("");
            object["endpoints"] = Value::Null;
            object["ports"] = Value::Null;
        }
        _ => {}
    }
    object
}
