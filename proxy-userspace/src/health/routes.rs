//! Defines the routes of the health server and of the metrics server.

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

use super::{
    ProxyHealth, Status,
    proxy_health::Report,
    statusz::{Page, accepts_text},
};
use crate::{
    kernel::{KernelError, own_process},
    metrics::{Exposition, Metrics},
};

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

/// What the metrics server reports about the proxy itself.
#[derive(Clone, Debug)]
pub struct Introspection {
    /// What shunt does on this node, for `/statusz`.
    pub status: Status,
    /// Health, for `/statusz`.
    pub health: ProxyHealth,
    /// The effective configuration, for `/configz`.
    pub config: watch::Receiver<serde_json::Value>,
    /// Enables `/debug/pprof/`, which shows the CPU time of the threads and the memory of the
    /// process. Upstream's profiles there are those of the Go runtime. For this program, `perf
    /// record -g -p PID` makes profiles.
    pub profiling: bool,
}

/// The key of upstream's configuration in `/configz`.
const CONFIG_NAME: &str = "kubeproxy.config.k8s.io";
const PROFILES: &str = "\
cmdline: the command line
memory: resident, proportional and anonymous memory, in kB
threads: each thread with its CPU time in seconds

CPU and heap profiles of the Go runtime do not exist here; use perf record -g -p PID
";

/// The paths of the metrics server, without and with profiling.
const PATHS: [&str; 2] = [
    "/configz /healthz /metrics /proxyMode /statusz",
    "/configz /debug /healthz /metrics /proxyMode /statusz",
];

/// Returns `/configz` and `/statusz`, and with profiling also `/debug/pprof/`.
pub fn introspection_routes(introspection: Introspection) -> Router {
    let Introspection { status, health, config, profiling } = introspection;
    let configz = move || async move { ([NO_SNIFF], Json(json!({ CONFIG_NAME: *config.borrow() }))) };
    let paths = PATHS[usize::from(profiling)];
    let statusz = move |headers: HeaderMap| async move { statusz(&status, &health, paths, &headers) };
    let routes = Router::new().route("/configz", get(configz)).route("/statusz", get(statusz));
    if !profiling {
        return routes;
    }
    let command_line = || async { std::env::args().collect::<Vec<_>>().join("\0") };
    routes
        .route("/debug/pprof/", get(|| async { PROFILES }))
        .route("/debug/pprof/cmdline", get(command_line))
        .route("/debug/pprof/memory", get(|| async { text_or_error(own_process::memory()) }))
        .route("/debug/pprof/threads", get(|| async { text_or_error(own_process::threads()) }))
}

/// Answers with text to a client that accepts text, as upstream does.
fn statusz(status: &Status, health: &ProxyHealth, paths: &str, headers: &HeaderMap) -> Response {
    if !accepts_text(headers) {
        return (StatusCode::NOT_ACCEPTABLE, [NO_SNIFF], "/statusz has text/plain only\n").into_response();
    }
    let (started, up) = (status.started, status.running_since.elapsed());
    let page = Page { started, up, paths, facts: &status.facts(), progress: &health.progress() };
    ([NO_SNIFF], page.to_string()).into_response()
}

fn text_or_error(read: Result<String, KernelError>) -> Response {
    match read {
        Ok(text) => text.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Returns `/metrics`, `/metrics/slis`, `/proxyMode`, and a `/healthz` that only shows that this
/// server answers, as upstream has it.
pub fn metrics_routes(metrics: &Metrics) -> Router {
    let scrape_route = |path, exposition| {
        Router::new().route(path, get(scrape)).with_state(Arc::new(Mutex::new(exposition)))
    };
    let (mode_metrics, ping_metrics) = (metrics.clone(), metrics.clone());
    scrape_route("/metrics", metrics.exposition())
        .merge(scrape_route("/metrics/slis", metrics.indicators()))
        .route("/proxyMode", get(move || async move { ([NO_SNIFF], mode_metrics.mode()) }))
        .route(
            "/healthz",
            get(move || async move {
                ping_metrics.ping_answered();
                ([NO_SNIFF], "ok")
            }),
        )
}

/// Answers a scrape. Scrapes run one at a time, even if the client of an earlier scrape has gone.
/// They run on a blocking thread, because reading the kernel's counters can take a while.
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
    tracing::error!(error, "cannot write the metrics; the scrape fails with status 500");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

#[cfg(test)]
mod tests {
    use std::{sync, time::Duration};

    use axum::{
        body::{Body, to_bytes},
        http::Request,
    };
    use tower::ServiceExt as _;

    use super::*;
    use crate::{
        dataplane::{KernelCounts, Mode, ProgramErrorCount, ServiceCount},
        health::SyncTask,
        model::{IpFamily, LinkPath},
    };

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

    /// Requests `/statusz`. Returns the status code, the content type and the body.
    async fn get_statusz(routes: &Router, accept: &str) -> (StatusCode, String, String) {
        let request = Request::get("/statusz").header(header::ACCEPT, accept).body(Body::empty());
        let Ok(answer) = routes.clone().oneshot(request.expect("a request")).await;
        let (head, body) = answer.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("the whole body");
        let content_type = head.headers[header::CONTENT_TYPE].to_str().expect("text").to_owned();
        (head.status, content_type, String::from_utf8(body.into()).expect("text"))
    }

    #[tokio::test]
    async fn statusz_shows_the_current_facts_as_text_only() {
        let (status, health) = (Status::default(), ProxyHealth::new(Duration::from_mins(1)));
        let (_, config) = watch::channel(serde_json::Value::Null);
        let introspection =
            Introspection { status: status.clone(), health: health.clone(), config, profiling: false };
        let routes = introspection_routes(introspection);
        status.set_mode(Mode::Ebpf, "as configured");
        status.set_link_path(LinkPath::Programs);
        let (code, content_type, body) = get_statusz(&routes, "*/*").await;
        assert_eq!((code, content_type.as_str()), (StatusCode::OK, "text/plain; charset=utf-8"));
        let starting = "Ready: no: the first full sync is not complete\nLast sync: none\n";
        assert!(body.contains(starting), "{body}");
        for line in ["shunt statusz", "Mode: ebpf", "Link path: programs", "Socket scope: not known yet"] {
            assert!(body.lines().any(|shown| shown == line), "{line}: {body}");
        }
        health.updated(&IpFamily::ALL);
        status.set_mode(Mode::Nftables, "auto: the mode ebpf broke");
        status.task_failed(SyncTask::Program, "no memory".into());
        let (_, _, body) = get_statusz(&routes, "text/plain").await;
        assert!(body.contains("Mode: nftables\n") && !body.contains("Link path"), "{body}");
        assert!(body.contains("Ready: yes\n") && body.contains("kernel: no memory\n"), "{body}");
        let (code, ..) = get_statusz(&routes, "application/json").await;
        assert_eq!(code, StatusCode::NOT_ACCEPTABLE, "upstream's JSON does not exist here");
    }
}
