//! Requests to the health server and to the metrics server, as they come on a connection.

use std::{cell::OnceCell, path::PathBuf, sync::Arc, time::Duration};

use axum::Router;
use proxy_userspace::{
    health::{
        Debugging, Introspection, ProxyHealth, Status, answer_bytes, healthz_routes, introspection_routes,
        metrics_routes,
    },
    inspect::{NodeInspector, PodFinder, ServiceFinder},
    metrics::Metrics,
    node::NodeEvents,
    sync::Inspector,
    ui::{self, Pages},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

thread_local! {
    static SERVER: OnceCell<(Runtime, [Router; 2])> = const { OnceCell::new() };
}

pub(crate) fn run(input: &[u8]) {
    SERVER.with(|server| {
        let (runtime, routes) = server.get_or_init(start);
        for routes in routes {
            let answers = runtime.block_on(answer_bytes(input, routes.clone()));
            assert!(answers.is_empty() || answers.starts_with(b"HTTP/1."), "{answers:?}");
        }
    });
}

fn start() -> (Runtime, [Router; 2]) {
    let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
    let (metrics, status) = (Metrics::default(), Status::default());
    let health = ProxyHealth::new(Duration::from_mins(1));
    let (_, config) = watch::channel(serde_json::Value::Null);
    let introspection = Introspection {
        status: status.clone(),
        health: health.clone(),
        config,
        flags: Some([("v", "2".to_owned())].into()),
        statusz: true,
        ui: true,
        debugging: Some(Debugging { set_verbosity: Arc::new(|_| {}) }),
    };
    let pages = pages(&metrics, &status, &health);
    let of_metrics = metrics_routes(&metrics).merge(introspection_routes(introspection)).merge(pages);
    (runtime.expect("a runtime"), [healthz_routes(health, metrics, status), of_metrics])
}

/// Returns the pages of a process whose sync loop does not run.
fn pages(metrics: &Metrics, status: &Status, health: &ProxyHealth) -> Router {
    let node = NodeInspector {
        inspector: Inspector::default(),
        metrics: metrics.clone(),
        status: status.clone(),
        health: health.clone(),
        pin_directory: PathBuf::new(),
        pods: PodFinder::new(|_| async { Err("no API server".to_owned()) }),
        services: ServiceFinder::new(|_| async { None }),
    };
    ui::routes(Pages::new(node, NodeEvents::default()))
}
