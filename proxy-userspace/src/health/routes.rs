//! Defines the routes of the health server and of the metrics server.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Query, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use tokio::{sync::Mutex, task};

use super::{ProxyHealth, Status, proxy_health::Report};
use crate::metrics::{Exposition, Metrics};

pub(super) const NO_SNIFF: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");

/// `/healthz` and `/livez`.
pub fn healthz_routes(health: ProxyHealth, metrics: Metrics, status: Status) -> Router {
    type Sources = (ProxyHealth, Metrics, Status);
    async fn healthz(State((health, metrics, status)): State<Sources>) -> Response {
        let mut report = health.healthz();
        report.displaced_links = status.displaced_links();
        report.unreadable_manifests = status.unreadable_manifests();
        metrics.healthz_answered(report.ok);
        answer(report)
    }
    async fn livez(State((health, metrics, _)): State<Sources>) -> Response {
        let report = health.livez();
        metrics.livez_answered(report.ok);
        answer(report)
    }
    // Upstream answers every method in the same way.
    let routes = Router::new().route("/healthz", any(healthz)).route("/livez", any(livez));
    routes.with_state((health, metrics, status))
}

pub(super) fn status(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn answer(report: Report) -> Response {
    (status(report.ok), [NO_SNIFF], Json(report)).into_response()
}

/// The answer of the metrics server's `/healthz` to a query with `verbose`.
const EACH_CHECK: &str = "[+]ping ok\nhealthz check passed\n";

/// Returns the routes of the metrics server: [`scrape_routes`], and a `/healthz` that only shows
/// that this server answers, as upstream has it (`InstallHandler` in
/// `apiserver/pkg/server/healthz`).
pub fn metrics_routes(metrics: &Metrics) -> Router {
    let ping_metrics = metrics.clone();
    let ping = move |Query(query): Query<Vec<(String, String)>>| async move {
        ping_metrics.ping_answered();
        let is_verbose = query.iter().any(|(name, _)| name == "verbose");
        ([NO_SNIFF], if is_verbose { EACH_CHECK } else { "ok" })
    };
    scrape_routes(metrics).route("/healthz", any(ping)).route("/healthz/ping", any(|| async { "ok" }))
}

/// Returns `/metrics`, `/metrics/slis` and `/proxyMode`.
pub fn scrape_routes(metrics: &Metrics) -> Router {
    let scrape_route = |path, exposition| {
        Router::new().route(path, get(scrape)).with_state(Arc::new(Mutex::new(exposition)))
    };
    let mode_metrics = metrics.clone();
    scrape_route("/metrics", metrics.exposition())
        .merge(scrape_route("/metrics/slis", metrics.indicators()))
        .route("/proxyMode", get(move || async move { ([NO_SNIFF], mode_metrics.mode()) }))
}

/// Answers a scrape. Scrapes run one at a time, even if the client of an earlier scrape has gone.
/// They run on a blocking thread, because reading the kernel's counters can take a while.
async fn scrape(State(exposition): State<Arc<Mutex<Exposition>>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).map(String::from);
    let exposition = exposition.lock_owned().await;
    let encoded = task::spawn_blocking(move || exposition.answer(accept.as_deref())).await;
    let error = match encoded {
        Ok(Ok((content_type, body))) => {
            return ([(header::CONTENT_TYPE, content_type)], body).into_response();
        }
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::error!(error, "cannot write the metrics; the scrape fails with status 500");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

#[cfg(test)]
mod tests {
    use std::{sync, time::Duration};

    use axum::body::to_bytes;

    use super::*;
    use crate::dataplane::{KernelCounts, ProgramErrorCount, ServiceCount};

    /// A counter source that signals when it is read, and then waits.
    struct BlockingCounts {
        read_started: tokio::sync::mpsc::UnboundedSender<()>,
        may_continue: sync::Mutex<sync::mpsc::Receiver<()>>,
    }

    impl KernelCounts for BlockingCounts {
        fn packets(&self) -> Vec<(&'static str, u64)> {
            self.read_started.send(()).expect("the test waits");
            let signal =
                self.may_continue.lock().expect("one at a time").recv_timeout(Duration::from_mins(1));
            vec![(if signal.is_ok() { "in-time" } else { "too-late" }, 1)]
        }

        fn errors(&self) -> Vec<ProgramErrorCount> {
            Vec::new()
        }

        fn services(&self) -> Vec<ServiceCount> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn a_scrape_does_not_block_the_runtime_thread() {
        let (read_started, mut started) = tokio::sync::mpsc::unbounded_channel();
        let (resume, may_continue) = sync::mpsc::channel();
        let metrics = Metrics::default();
        metrics.set_kernel_counts(Some(Box::new(BlockingCounts {
            read_started,
            may_continue: may_continue.into(),
        })));
        let exposition = Arc::new(Mutex::new(metrics.exposition()));
        let scrape = tokio::spawn(scrape(State(exposition), HeaderMap::new()));
        started.recv().await.expect("the counters are read");
        resume.send(()).expect("the reader waits");
        let body = scrape.await.expect("no panic").into_body();
        let text = to_bytes(body, usize::MAX).await.expect("the whole body");
        assert!(String::from_utf8_lossy(&text).contains("in-time"), "{text:?}");
    }
}
