//! The path `/v1/trace` of the local socket: the lines of a trace as JSON lines, until the client
//! closes the connection.

use std::{io, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use futures::stream;
use tokio::time::timeout;

use super::{
    filter::TraceFilter,
    record::TraceRecord,
    tracer::{Subscription, Tracer},
};

/// How often a line comes, so that both sides notice the end of the other one.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Returns the path `/v1/trace`.
pub fn routes(tracer: Tracer) -> Router {
    Router::new().route("/v1/trace", get(trace)).with_state(tracer)
}

async fn trace(State(tracer): State<Tracer>, Query(filter): Query<TraceFilter>) -> Response {
    let subscription = match tracer.subscribe(filter).await {
        Ok(subscription) => subscription,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    let first = Some(vec![TraceRecord::TraceStarted]);
    let lines = stream::unfold((Some(subscription), first), |(subscription, first)| async {
        let mut subscription: Subscription = subscription?;
        let records = match first {
            Some(first) => first,
            None => timeout(ALIVE_EVERY, subscription.next())
                .await
                .unwrap_or_else(|_| vec![TraceRecord::TraceAlive]),
        };
        let is_last = records.iter().any(|record| matches!(record, TraceRecord::TraceEnded { .. }));
        Some((Ok::<_, io::Error>(text(&records)), ((!is_last).then_some(subscription), None)))
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

fn text(records: &[TraceRecord]) -> Bytes {
    let mut text = Vec::new();
    for record in records {
        // Records have only texts and numbers as keys and values, so this cannot fail.
        if serde_json::to_writer(&mut text, record).is_ok() {
            text.push(b'\n');
        }
    }
    text.into()
}
