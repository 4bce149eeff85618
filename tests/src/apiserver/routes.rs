//! Serves the paths of the API server, and chooses between a correct answer and a fault.

use std::{io, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query as QueryParameters, State},
    middleware::{from_fn_with_state, map_response},
    response::Response,
    routing::{get, post},
};
use futures::{StreamExt as _, stream};
use http::{HeaderMap, StatusCode, Uri, header::DATE};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinHandle};

use super::{
    Encoding, Fault, Query, Request, Resource, Shared, Verb, faults::BREAK_DELAY, list, lock, patch,
    responses, rights, stored::Stored, watch,
};

/// The path at which Events are created.
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/{namespace}/events";
/// The namespace of Events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";
/// The delay of a slow answer.
const SLOW_ANSWER_DELAY: Duration = Duration::from_secs(3);

/// Serves until the server is down.
pub(super) fn serve(listener: TcpListener, shared: Arc<Shared>) -> JoinHandle<()> {
    let mut router = Router::new();
    for resource in &Resource::ALL {
        let answer = move |State(shared): State<Arc<Shared>>,
                           uri: Uri,
                           headers: HeaderMap,
                           QueryParameters(query)| async move {
            answer_to(&shared, resource, Request::new(resource, &uri, &headers, Query(query))).await
        };
        router = router.route(&resource.path(), get(answer));
        let of_namespace = move |State(shared): State<Arc<Shared>>,
                                 Path(namespace): Path<String>,
                                 uri: Uri,
                                 headers: HeaderMap,
                                 QueryParameters(query)| async move {
            let query = Query(query).in_namespace(&namespace);
            answer_to(&shared, resource, Request::new(resource, &uri, &headers, query)).await
        };
        if let Some(path) = resource.namespace_path() {
            router = router.route(&path, get(of_namespace));
        }
        let object = move |State(shared): State<Arc<Shared>>,
                           Path(names): Path<Vec<(String, String)>>,
                           headers: HeaderMap| {
            std::future::ready(object(&shared, resource, &names, Encoding::of(&headers)))
        };
        let of_object = get(object);
        let of_object =
            if resource.plural == "nodes" { of_object.patch(patch::patch_node) } else { of_object };
        router = router.route(&resource.object_path(), of_object);
    }
    let mut down = shared.down.subscribe();
    router = router.route(EVENTS, post(create_event));
    let service = router.fallback(not_found).with_state(Arc::clone(&shared));
    let service = service.layer(from_fn_with_state(Arc::clone(&shared), rights::authorize));
    let service = service.layer(map_response(move |mut response: Response| {
        if let Some(date) = &*lock(&shared.date) {
            response.headers_mut().insert(DATE, date.clone());
        }
        std::future::ready(response)
    }));
    tokio::spawn(async move {
        let shutdown = async move {
            // If the sender is gone, the server is gone too.
            let _ = down.wait_for(|down| *down).await;
        };
        // `serve` does not fail. An error of a connection ends that connection only.
        let _ = axum::serve(listener, service).with_graceful_shutdown(shutdown).await;
    })
}

/// Creates an Event. Like the real server, it requires the namespace of the object that the Event
/// is about (`ValidateEventCreate`). The answer is JSON, also to clients that prefer protobuf.
async fn create_event(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    Json(event): Json<Value>,
) -> Response {
    let about = event["regarding"]["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    if event["metadata"]["namespace"] != *namespace || about != namespace {
        let status = responses::status(422, "Invalid", "the namespaces do not match");
        return responses::failure(Encoding::Json, status);
    }
    lock(&shared.events).push(event.clone());
    responses::whole(Encoding::Json, StatusCode::CREATED, &Stored::new(event))
}

async fn not_found(headers: HeaderMap) -> Response {
    responses::not_found(Encoding::of(&headers))
}

/// Returns one object. `names` has its namespace, if it has one, and its name.
fn object(shared: &Shared, resource: &Resource, names: &[(String, String)], encoding: Encoding) -> Response {
    let key = names.iter().fold(String::new(), |key, (_, name)| key + "/" + name);
    match shared.store().get(resource.plural, key) {
        Some(object) => responses::whole(encoding, StatusCode::OK, object),
        None => responses::not_found(encoding),
    }
}

async fn answer_to(shared: &Arc<Shared>, resource: &'static Resource, request: Request) -> Response {
    lock(&shared.requests).push(request.clone());
    let encoding = request.encoding();
    if !shared.accepts_token(&request) {
        return responses::failure(encoding, responses::unauthorized());
    }
    if !request.is_acceptable() {
        return responses::not_acceptable();
    }
    if let Some(refusal) = shared.version().refusal(resource, &request) {
        return refusal;
    }
    let fault = shared.fault(&request);
    if fault == Some(Fault::Slow) {
        tokio::time::sleep(SLOW_ANSWER_DELAY).await;
    }
    let version = request.query.get("resourceVersion").filter(|version| !version.is_empty());
    if version.is_some_and(|version| version.parse::<u64>().is_err()) {
        let message = format!("resourceVersion: Invalid value: {version:?}");
        return responses::failure(encoding, responses::status(422, "Invalid", message));
    }
    if let Some(status) = fault.and_then(|fault| status_of(fault, resource, request.verb)) {
        return responses::failure(encoding, status);
    }
    match fault {
        Some(Fault::Hang) => {
            let _ = shared.down.subscribe().wait_for(|down| *down).await;
            let parts = stream::once(async { Err::<bytes::Bytes, _>(connection_aborted()) });
            responses::stream(encoding.content_type(), StatusCode::OK, Body::from_stream(parts))
        }
        fault if request.verb != Verb::List => watch::answer(shared, resource, &request, fault),
        Some(fault) => faulty_list(shared, resource, &request, fault),
        None => list::answer(shared, resource, &request),
    }
}

/// Returns the Status that a fault answers with, if it is such a fault.
pub(super) fn status_of(fault: Fault, resource: &Resource, verb: Verb) -> Option<Value> {
    Some(match fault {
        Fault::Unauthorized => responses::unauthorized(),
        Fault::Forbidden => responses::forbidden_list(resource, verb),
        Fault::Gone | Fault::ExpireContinue => responses::continue_expired(),
        Fault::RefuseStreaming => responses::streaming_refused(),
        Fault::InternalError => responses::status(500, "InternalError", "Internal error occurred"),
        Fault::Unavailable => responses::status(503, "ServiceUnavailable", "the server is shutting down"),
        _ => return None,
    })
}

/// Answers a list request with a fault in the body. Faults of watches have no effect.
fn faulty_list(
    shared: &Arc<Shared>,
    resource: &'static Resource,
    request: &Request,
    fault: Fault,
) -> Response {
    let encoding = request.encoding();
    let with_body = |body| responses::stream(encoding.content_type(), StatusCode::OK, body);
    match fault {
        Fault::BreakMidBody => match list::first_half(encoding, resource) {
            Ok(half) => broken(encoding, half),
            Err(error) => responses::not_encoded(&error),
        },
        Fault::NotJson => with_body(Body::from("<html>no JSON</html>")),
        Fault::EmptyBody => with_body(Body::empty()),
        Fault::HangAfterHead => {
            let mut down = shared.down.subscribe();
            let silence =
                async move { down.wait_for(|down| *down).await.map_err(io::Error::other).map(drop) };
            with_body(Body::from_stream(stream::once(async { silence.await.map(|()| bytes::Bytes::new()) })))
        }
        _ => list::answer(shared, resource, request),
    }
}

/// Returns a response whose connection breaks after `part` of the body.
fn broken(encoding: Encoding, part: Vec<u8>) -> Response {
    let error = async {
        tokio::time::sleep(BREAK_DELAY).await;
        Err(connection_aborted())
    };
    let parts = stream::once(std::future::ready(Ok(bytes::Bytes::from(part)))).chain(stream::once(error));
    responses::stream(encoding.content_type(), StatusCode::OK, Body::from_stream(parts))
}

fn connection_aborted() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}
