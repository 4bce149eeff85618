//! The routes of the health and the metrics server.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use serde_json::json;
use tokio::{
    sync::{Mutex, watch},
    task,
};

use super::{ProxyHealth, proxy_health::Report};
use crate::{
    kernel::{KernelError, own_process},
    metrics::{Exposition, Metrics},
};

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
    // Upstream answers any method alike.
    Router::new().route("/healthz", any(healthz)).route("/livez", any(livez)).with_state((health, metrics))
}

pub(super) fn status(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn answer(report: Report) -> Response {
    (status(report.ok), [NO_SNIFF], Json(report)).into_response()
}

/// What is told of the process itself, where metrics are.
#[derive(Clone, Debug)]
pub struct Introspection {
    /// The configuration in effect, for `/configz`.
    pub config: watch::Receiver<serde_json::Value>,
    /// Whether `/debug/pprof/` answers: what its threads cost and where its memory is. The profiles that upstream has there are
    /// those of Go's runtime; for this program, `perf record -g -p PID` makes them.
    pub profiling: bool,
}

/// The name that upstream's configuration has in `/configz`.
const CONFIG_NAME: &str = "kubeproxy.config.k8s.io";
const PROFILES: &str = "cmdline: the command line\nmemory: where the memory is, in kB\nthreads: each thread, and the seconds it has \
                        run\n\nCPU and heap profiles are those of Go's runtime; use perf record -g -p PID\n";

/// `/configz`, and `/debug/pprof/` where that is wanted.
pub fn introspection_routes(of: Introspection) -> Router {
    let Introspection { config, profiling } = of;
    let configz = move || async move { ([NO_SNIFF], Json(json!({ CONFIG_NAME: *config.borrow() }))) };
    let routes = Router::new().route("/configz", get(configz));
    if !profiling {
        return routes;
    }
    let command_line = || async { std::env::args().collect::<Vec<_>>().join("\0") };
    routes
        .route("/debug/pprof/", get(|| async { PROFILES }))
        .route("/debug/pprof/cmdline", get(command_line))
        .route("/debug/pprof/memory", get(|| async { told(own_process::memory()) }))
        .route("/debug/pprof/threads", get(|| async { told(own_process::threads()) }))
}

fn told(read: Result<String, KernelError>) -> Response {
    match read {
        Ok(text) => text.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// `/metrics`, `/metrics/slis`, `/proxyMode`, and a `/healthz` that only says that this server answers, as upstream has it there too.
pub fn metrics_routes(metrics: &Metrics) -> Router {
    let scraped = |path, exposition| {
        Router::new().route(path, get(scrape)).with_state(Arc::new(Mutex::new(exposition)))
    };
    let (running, pinged) = (metrics.clone(), metrics.clone());
    scraped("/metrics", metrics.exposition())
        .merge(scraped("/metrics/slis", metrics.indicators()))
        .route("/proxyMode", get(move || async move { ([NO_SNIFF], running.mode()) }))
        .route(
            "/healthz",
            get(move || async move {
                pinged.ping_answered();
                ([NO_SNIFF], "ok")
            }),
        )
}

/// One at a time, whether or not the one before is still waited for; and on a thread of its own, since the kernel is asked for what it
/// counts, which may take a while.
async fn scrape(State(exposition): State<Arc<Mutex<Exposition>>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).map(String::from);
    let exposition = exposition.lock_owned().await;
    let encoded = task::spawn_blocking(move || exposition.encode(accept.as_deref())).await;
    let error = match encoded {
        Ok(Ok((content_type, text))) => {
            return ([(header::CONTENT_TYPE, content_type)], text).into_response();
        }
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::error!(error, "cannot write metrics");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

#[cfg(test)]
mod tests {
    use std::{sync, time::Duration};

    use super::*;
    use crate::dataplane::{KernelCounts, ProgramErrorCount, ServiceCount};

    /// Says when it is read, and then waits until it may go on.
    struct Slow {
        read: tokio::sync::mpsc::UnboundedSender<()>,
        go_on: sync::Mutex<sync::mpsc::Receiver<()>>,
    }

    impl KernelCounts for Slow {
        fn packets(&self) -> Vec<(&'static str, u64)> {
            self.read.send(()).expect("the test waits");
            let told = self.go_on.lock().expect("one at a time").recv_timeout(Duration::from_mins(1));
            vec![(if told.is_ok() { "in-time" } else { "too-late" }, 1)]
        }

        fn errors(&self) -> Vec<ProgramErrorCount> {
            Vec::new()
        }

        fn services(&self) -> Vec<ServiceCount> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn while_the_kernel_is_asked_for_counts_the_thread_does_something_else() {
        let (read, mut is_read) = tokio::sync::mpsc::unbounded_channel();
        let (tell, told) = sync::mpsc::channel();
        let metrics = Metrics::default();
        metrics.set_kernel_counts(Some(Box::new(Slow { read, go_on: told.into() })));
        let exposition = Arc::new(Mutex::new(metrics.exposition()));
        let scraped = tokio::spawn(scrape(State(exposition), HeaderMap::new()));
        is_read.recv().await.expect("it is read");
        tell.send(()).expect("it waits");
        let body = scraped.await.expect("no panic").into_body();
        let text = axum::body::to_bytes(body, usize::MAX).await.expect("all of it");
        assert!(String::from_utf8_lossy(&text).contains("in-time"), "{text:?}");
    }
}
