//! Serves the paths of the API server, and chooses between a correct answer and a fault.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

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
    Fault, Query, Request, Resource, Shared, Verb, faults::BREAK_DELAY, list, lock, patch, responses, rights,
    watch,
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
            answer(&shared, resource, Request::new(resource, &uri, &headers, Query(query))).await
        };
        router = router.route(&resource.path(), get(answer));
        let object = move |State(shared): State<Arc<Shared>>, Path(names): Path<Vec<(String, String)>>| {
            std::future::ready(object(&shared, resource, &names))
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
/// is about (`ValidateEventCreate`).
async fn create_event(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    Json(event): Json<Value>,
) -> Response {
    let about = event["regarding"]["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    if event["metadata"]["namespace"] != *namespace || about != namespace {
        return responses::failure(&responses::status(422, "Invalid", "the namespaces do not match"));
    }
    lock(&shared.events).push(event.clone());
    responses::whole(StatusCode::CREATED, &event)
}

async fn not_found() -> Response {
    responses::not_found()
}

/// Returns one object. `names` has its namespace, if it has one, and its name.
fn object(shared: &Shared, resource: &Resource, names: &[(String, String)]) -> Response {
    let key = names.iter().fold(String::new(), |key, (_, name)| key + "/" + name);
    match shared.store().get(resource.plural, key) {
        Some(object) => responses::whole(StatusCode::OK, object),
        None => responses::not_found(),
    }
}

async fn answer(shared: &Arc<Shared>, resource: &'static Resource, request: Request) -> Response {
    let verb = request.verb;
    lock(&shared.requests).push(request.clone());
    if !shared.accepts_token(&request) {
        return responses::failure(&responses::unauthorized());
    }
    if let Some(refusal) = shared.version().refusal(resource, &request) {
        return refusal;
    }
    let query = &request.query;
    let fault = shared.fault(&request);
    if fault == Some(Fault::Slow) {
        tokio::time::sleep(SLOW_ANSWER_DELAY).await;
    }
    if query
        .get("resourceVersion")
        .is_some_and(|version| !version.is_empty() && version.parse::<u64>().is_err())
    {
        let message = format!("resourceVersion: Invalid value: {:?}", query.get("resourceVersion"));
        return responses::failure(&responses::status(422, "Invalid", message));
    }
    match fault {
        Some(Fault::Unauthorized) => responses::failure(&responses::unauthorized()),
        Some(Fault::Forbidden) => responses::failure(&responses::forbidden_list(resource, verb)),
        Some(Fault::Gone | Fault::ExpireContinue) => responses::failure(&responses::continue_expired()),
        Some(Fault::RefuseStreaming) => responses::failure(&responses::streaming_refused()),
        Some(Fault::InternalError) => {
            responses::failure(&responses::status(500, "InternalError", "Internal error occurred"))
        }
        Some(Fault::Hang) => {
            let _ = shared.down.subscribe().wait_for(|down| *down).await;
            let parts = stream::once(async { Err::<bytes::Bytes, _>(connection_aborted()) });
            responses::stream(StatusCode::OK, Body::from_stream(parts))
        }
        fault if verb != Verb::List => watch::answer(shared, resource, &request, fault),
        Some(Fault::BreakMidBody) => broken(br#"{"kind":"List","items":[{"metadata":"#.to_vec()),
        Some(Fault::NotJson) => responses::stream(StatusCode::OK, Body::from("<html>no JSON</html>")),
        Some(Fault::EmptyBody) => responses::stream(StatusCode::OK, Body::empty()),
        Some(Fault::HangAfterHead) => {
            let mut down = shared.down.subscribe();
            let silence =
                async move { down.wait_for(|down| *down).await.map_err(io::Error::other).map(drop) };
            let body = stream::once(async { silence.await.map(|()| bytes::Bytes::new()) });
            responses::stream(StatusCode::OK, Body::from_stream(body))
        }
        _ => {
            let has_cache = !shared.has_no_cache.load(Ordering::Relaxed);
            list::answer(&shared.store(), resource, query, has_cache, request.accepts_gzip())
        }
    }
}

/// Returns a response whose connection breaks after `part` of the body.
fn broken(part: Vec<u8>) -> Response {
    let error = async {
        tokio::time::sleep(BREAK_DELAY).await;
        Err(connection_aborted())
    };
    let parts = stream::once(std::future::ready(Ok(bytes::Bytes::from(part)))).chain(stream::once(error));
    responses::stream(StatusCode::OK, Body::from_stream(parts))
}

fn connection_aborted() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}
