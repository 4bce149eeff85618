//! The daemon's side: answers questions on the local socket.

use std::{io, path::PathBuf};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use tokio::task;

use super::{
    AffinityFilter, FlowFilter, PodFinder, Resource, Row, ServiceFinder, affinity, connections,
    drift::Drift,
    explained, flows,
    gather::{self, Filter, Part},
    load::{self, Destinations, ServiceName},
    unserved,
};
use crate::{
    causes::with_causes,
    dataplane::Mode,
    health::{NodeReport, ProxyHealth, Status},
    metrics::Metrics,
    model::ServicePortKey,
    sync::{Inspected, Inspector, NoAnswer},
};

/// What the answers are made of.
#[derive(Clone, Debug)]
pub struct NodeInspector {
    /// Reads the sync loop.
    pub inspector: Inspector,
    /// Counts.
    pub metrics: Metrics,
    /// What the process reports about itself.
    pub status: Status,
    /// Health.
    pub health: ProxyHealth,
    /// The directory of pins.
    pub pin_directory: PathBuf,
    /// Finds pods that are no endpoints.
    pub pods: PodFinder,
    /// Finds out why Services are not served.
    pub services: ServiceFinder,
}

#[cfg(test)]
impl NodeInspector {
    /// Returns one for a process whose sync loop does not run.
    pub(crate) fn without_loop() -> Self {
        Self {
            inspector: Inspector::default(),
            metrics: Metrics::default(),
            status: Status::default(),
            health: ProxyHealth::new(std::time::Duration::from_secs(1)),
            pin_directory: PathBuf::new(),
            pods: PodFinder::new(|_| async { Err("nobody knows".to_owned()) }),
            services: ServiceFinder::new(|_| async { None }),
        }
    }
}

/// One JSON document a line.
const LINES: &str = "application/x-ndjson";

/// Returns the paths of the socket: `/v1/get/RESOURCE`, `/v1/explain`, `/v1/unserved`, `/v1/node`,
/// and those of `shunt top`: `/v1/counts`, `/v1/maps` and `/v1/open-flows`.
pub fn routes(node: NodeInspector) -> Router {
    Router::new()
        .route("/v1/get/flows", get(flows))
        .route("/v1/get/connections", get(connections))
        .route("/v1/get/affinity", get(affinity))
        .route("/v1/get/{resource}", get(list))
        .route("/v1/explain", get(explained::answer))
        .route("/v1/unserved", get(unserved::answer))
        .route("/v1/node", get(reported))
        .route("/v1/counts", get(counted))
        .route("/v1/maps", get(maps))
        .route("/v1/open-flows", get(open_flows))
        .with_state(node)
}

/// Does not ask the sync loop, so it also answers while that is busy or not there.
async fn reported(State(node): State<NodeInspector>) -> Json<NodeReport> {
    Json(node.report())
}

/// Does not ask the sync loop either.
async fn counted(State(node): State<NodeInspector>) -> Response {
    let read = task::spawn_blocking(move || {
        let (counted, counts_failures) = node.metrics.service_counts();
        load::counted(counted, counts_failures)
    });
    match read.await {
        Ok(counted) => Json(counted).into_response(),
        Err(panic) => failed(&panic),
    }
}

async fn maps(State(node): State<NodeInspector>) -> Response {
    node.inspector.read(load::maps).await.map(Json).into_response()
}

async fn open_flows(State(node): State<NodeInspector>, Query(service): Query<ServiceName>) -> Response {
    let found = node.inspector.read(move |inspected| Destinations::of(inspected, &service)).await;
    let destinations = match found {
        Ok(destinations) => destinations,
        Err(error) => return error.into_response(),
    };
    match task::spawn_blocking(move || destinations.open_flows(&node.pin_directory)).await {
        Ok(Ok(flows)) => Json(flows).into_response(),
        Ok(Err(error)) => failed(&error),
        Err(panic) => failed(&panic),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, with_causes(error)).into_response()
}

impl IntoResponse for NoAnswer {
    fn into_response(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, self.to_string()).into_response()
    }
}

async fn list(
    State(node): State<NodeInspector>,
    Path(resource): Path<String>,
    Query(filter): Query<Filter>,
) -> Response {
    let Some(resource) = Resource::of_path(&resource) else { return StatusCode::NOT_FOUND.into_response() };
    let inspector = node.inspector.clone();
    match resource {
        Resource::Services => services(node, filter).await,
        Resource::Drift => differences(inspector, filter).await,
        Resource::Endpoints => parts(inspector, filter, gather::endpoints).await,
        Resource::Flows | Resource::Connections | Resource::Affinity => StatusCode::NOT_FOUND.into_response(),
        Resource::Links => whole(inspector.read(gather::links).await),
        Resource::Exempt => whole(inspector.read(gather::exempt).await),
        Resource::LeftOut => {
            whole(inspector.read(move |inspected| gather::left_out(inspected, &filter).collect()).await)
        }
    }
}

async fn services(node: NodeInspector, filter: Filter) -> Response {
    let drift = if filter.drift { Some(Drift::read(&node.inspector).await) } else { None };
    let drift = match drift.transpose() {
        Ok(drift) => drift,
        Err(error) => return unavailable(error.to_string()),
    };
    let counts = node.counts().await;
    let rows_of = move |inspected: &Inspected<'_>, key: &ServicePortKey| {
        gather::service(inspected, key, &counts, drift.as_ref())
    };
    parts(node.inspector, filter, rows_of).await
}

/// Answers with what the kernel holds otherwise than it was written. What all service ports share
/// comes first, unless the filter names some.
async fn differences(inspector: Inspector, filter: Filter) -> Response {
    let drift = match Drift::read(&inspector).await {
        Ok(drift) => drift,
        Err(error) => return unavailable(error.to_string()),
    };
    let (of_node, is_of_all) = (drift.clone(), filter.namespace.is_none() && filter.name.is_none());
    let shared = move |inspected: &Inspected<'_>| {
        if is_of_all { of_node.rows_of_node(inspected) } else { Vec::new() }
    };
    let shared = match inspector.read(shared).await {
        Ok(rows) => lines(&rows),
        Err(error) => return error.into_response(),
    };
    let rows_of = move |inspected: &Inspected<'_>, key: &ServicePortKey| drift.rows(inspected, key);
    let (head, rest) = parts(inspector, filter, rows_of).await.into_parts();
    let body = stream::once(async { Ok(shared) }).chain(rest.into_data_stream());
    Response::from_parts(head, Body::from_stream(body))
}

/// Answers with the flows that match. Their Services are named as far as they exist.
async fn flows(
    State(NodeInspector { inspector, pin_directory, .. }): State<NodeInspector>,
    Query(filter): Query<FlowFilter>,
) -> Result<Response, NoAnswer> {
    let mode = inspector.read(|inspected| inspected.mode).await?;
    let services = filter.services();
    let parts = flows::read((mode == Some(Mode::Ebpf)).then_some(pin_directory), filter);
    let state = (parts, inspector, services);
    Ok(answer_with(stream::try_unfold(state, |(mut parts, inspector, services)| async move {
        let Some(part) = parts.recv().await else { return Ok(None) };
        let flows = part.map_err(io::Error::other)?;
        let rows = flows::named(&inspector, flows, services.clone()).await.map_err(io::Error::other)?;
        Ok(Some((lines(&rows), (parts, inspector, services))))
    })))
}

/// Answers with the connections that were translated at their sockets.
async fn connections(
    State(NodeInspector { inspector, pin_directory, .. }): State<NodeInspector>,
    Query(filter): Query<FlowFilter>,
) -> Result<Response, NoAnswer> {
    let mode = inspector.read(|inspected| inspected.mode).await?;
    if mode != Some(Mode::Ebpf) {
        let why = "only the ebpf mode translates at sockets: shunt get flows lists what this mode translates";
        return Ok(unavailable(why.to_owned()));
    }
    Ok(match read_kernel(move || connections::read(&pin_directory)).await {
        Ok(found) => whole(connections::named(&inspector, found, filter).await),
        Err(why) => unavailable(why),
    })
}

/// Answers with the clients that have affinity, or with the reason why the kernel does not tell
/// them.
async fn affinity(
    State(NodeInspector { inspector, pin_directory, .. }): State<NodeInspector>,
    Query(filter): Query<AffinityFilter>,
) -> Result<Response, NoAnswer> {
    let of = filter.clone();
    let wanted = inspector.read(move |inspected| affinity::wanted(inspected, &of, &pin_directory)).await?;
    let wanted = wanted.ok_or(NoAnswer::NotRunning)?;
    Ok(match read_kernel(move || affinity::read(&wanted, &filter)).await {
        Ok(rows) => whole(Ok(rows)),
        Err(why) => unavailable(why),
    })
}

/// Reads the kernel on a thread that may block. Returns the error as a text.
async fn read_kernel<T: Send + 'static, E: std::error::Error + Send + 'static>(
    read: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, String> {
    match task::spawn_blocking(read).await {
        Ok(read) => read.map_err(|error| with_causes(&error)),
        Err(panic) => Err(panic.to_string()),
    }
}

fn unavailable(why: String) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}

/// Answers with a list that is read at once.
fn whole<T: Row>(rows: Result<Vec<T>, NoAnswer>) -> Response {
    match rows {
        Ok(rows) => ([(CONTENT_TYPE, LINES)], lines(&rows)).into_response(),
        Err(error) => error.into_response(),
    }
}

/// Answers with a list that is read in parts. A change of the kernel waits for one part at most.
async fn parts<T: Row>(
    inspector: Inspector,
    filter: Filter,
    rows_of: impl Fn(&Inspected<'_>, &ServicePortKey) -> Vec<T> + Clone + Send + Sync + 'static,
) -> Response {
    let read = move |after: Option<ServicePortKey>| {
        let (inspector, filter, rows_of) = (inspector.clone(), filter.clone(), rows_of.clone());
        async move {
            let reader = move |inspected: &Inspected<'_>| {
                gather::part(inspected, &filter, after.as_ref(), |inspected, key| rows_of(inspected, key))
            };
            let (rows, last): Part<T> = inspector.read(reader).await?;
            Ok::<_, NoAnswer>((lines(&rows), last))
        }
    };
    // Before the answer begins, so that an error is an answer of its own.
    let (first, last) = match read(None).await {
        Ok(part) => part,
        Err(error) => return error.into_response(),
    };
    let others = stream::try_unfold(last, move |last| {
        let part = last.map(|last| read(Some(last)));
        async move {
            match part {
                Some(part) => part.await.map(Some).map_err(io::Error::other),
                None => Ok(None),
            }
        }
    });
    answer_with(stream::once(async { Ok(first) }).chain(others))
}

fn answer_with(parts: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response {
    ([(CONTENT_TYPE, LINES)], Body::from_stream(parts.into_stream())).into_response()
}

fn lines<T: Serialize>(rows: &[T]) -> Bytes {
    let mut text = Vec::new();
    for row in rows {
        // Rows have only texts and numbers as keys and values, so this cannot fail.
        if serde_json::to_writer(&mut text, row).is_ok() {
            text.push(b'\n');
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use axum::{body::to_bytes, http::Request};
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn while_no_loop_runs_each_answer_says_so() {
        let node = NodeInspector::without_loop();
        let explain = "explain?from=node&client=auto&to=10.0.0.1:80&outsideCgroup=false&check=false";
        for path in [
            "get/services",
            "get/endpoints",
            "get/flows",
            "get/connections",
            "get/affinity",
            "get/drift",
            "get/links",
            "get/left-out",
            explain,
            "maps",
        ] {
            let request = Request::get(format!("/v1/{path}")).body(Body::empty()).expect("a request");
            let answer = routes(node.clone()).oneshot(request).await.expect("an answer");
            assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
            let body = to_bytes(answer.into_body(), 1000).await.expect("a short body");
            assert_eq!(body, NoAnswer::NotRunning.to_string(), "{path}");
        }
    }
}
