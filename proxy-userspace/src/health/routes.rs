//! The routes of the health and the metrics server.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::{ProxyHealth, proxy_health::Report};
use crate::metrics::{Exposition, Metrics};

pub(super) const NO_SNIFF: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");

/// `/healthz` and `/livez`.
pub fn healthz_routes(health: ProxyHealth, metrics: Metrics) -> Router {
    async fn healthz(State((health, metrics)): State<(ProxyHealth, Metrics)>) -> Response {
        let report = health.healthz();
        metrics.healthz_answered(report.ok);
        answer(report)
    }
    async fn livez(State((health, metrics)): State<(ProxyHealth, Metrics)>) -> Response {
        let report = health.livez();
        metrics.livez_answered(report.ok);
        answer(report)
    }
    Router::new().route("/healthz", get(healthz)).route("/livez", get(livez)).with_state((health, metrics))
}

pub(super) fn status(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn answer(report: Report) -> Response {
    (status(report.ok), [NO_SNIFF], Json(report)).into_response()
}

/// `/metrics`, `/proxyMode`, and a `/healthz` that only says that this server answers, as upstream has it there too.
pub fn metrics_routes(metrics: &Metrics) -> Router {
    let running = metrics.clone();
    Router::new()
        .route("/metrics", get(scrape))
        .with_state(Arc::new(metrics.exposition()))
        .route("/proxyMode", get(move || async move { ([NO_SNIFF], running.mode()) }))
        .route("/healthz", get(|| async { ([NO_SNIFF], "ok") }))
}

async fn scrape(State(exposition): State<Arc<Exposition>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    match exposition.encode(accept) {
        Ok((content_type, text)) => ([(header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot write metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
