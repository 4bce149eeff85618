//! Starts the servers of this process: health, metrics, pages, and the local socket.

use std::{net::SocketAddr, sync::Arc};

use axum::Router;
use proxy_userspace::{
    config::{FeatureGate, log_filter_at},
    health::{self, Debugging, HttpServer, Introspection, LocalListener, PortFailureEvents},
    inspect::{self, NodeInspector, PodFinder, ServiceFinder},
    sync::{Inspector, Outputs},
    trace::{Tracer, routes as trace_routes},
    ui::{self, Pages},
};
use tokio::sync::watch;

use super::{ModeChoice, SetLogFilter, Tasks, dataplane};

/// Returns what the metrics server reports about this process.
pub(super) fn introspection(
    ModeChoice { config, flags, .. }: &ModeChoice,
    Outputs { status, health, .. }: &Outputs,
    effective: watch::Receiver<serde_json::Value>,
    set_log_filter: SetLogFilter,
) -> Introspection {
    let of_programs = config.ebpf.log;
    let set_verbosity = Arc::new(move |level| set_log_filter(&log_filter_at(level, of_programs)));
    Introspection {
        status: status.clone(),
        health: health.clone(),
        config: effective,
        flags: config.feature_gates.is_on(FeatureGate::ComponentFlagz).then(|| flags.values()),
        ui: config.ui,
        statusz: config.feature_gates.is_on(FeatureGate::ComponentStatusz),
        debugging: config.profiling.then_some(Debugging { set_verbosity }),
    }
}

/// Returns what reads this node, for commands and pages.
fn node_inspector(ModeChoice { config, reader, .. }: &ModeChoice, outputs: &Outputs) -> NodeInspector {
    let Outputs { metrics, status, health, .. } = outputs.clone();
    let pin_directory = config.ebpf.pin_dir.clone();
    let of_pods = reader.clone();
    let pods = PodFinder::new(move |name| {
        let reader = of_pods.clone();
        async move { reader.read_pod(name).await.map_err(|error| error.to_string()) }
    });
    let of_services = reader.clone();
    let services = ServiceFinder::new(move |name| {
        let reader = of_services.clone();
        async move { reader.unserved_reason(&name).await }
    });
    NodeInspector { inspector: Inspector::default(), metrics, status, health, pin_directory, pods, services }
}

/// Answers the subcommands that ask the daemon.
fn start_local_endpoint(
    ModeChoice { config, launcher, .. }: &ModeChoice,
    local: Option<LocalListener>,
    node: NodeInspector,
    outputs: &Outputs,
    introspection: Introspection,
    tasks: &mut Tasks,
) {
    let tracer = Tracer::new(node.inspector.clone(), dataplane::load_tracing(config, launcher));
    let second_shunt = health::second_shunt_routes(outputs.status.clone(), outputs.events.clone());
    let routes = inspect::routes(node).merge(trace_routes(tracer)).merge(second_shunt);
    let routes = routes.nest("/v1/pages", local_pages(outputs, introspection));
    tasks.spawn(async move { match health::serve_local(local, inspect::SOCKET, routes).await {} });
}

/// Returns the pages of the HTTP servers for bug reports, whatever the servers serve.
fn local_pages(Outputs { metrics, status, health, .. }: &Outputs, introspection: Introspection) -> Router {
    let introspection = Introspection { statusz: true, debugging: None, ..introspection };
    health::scrape_routes(metrics)
        .merge(health::introspection_routes(introspection))
        .merge(health::healthz_routes(health.clone(), metrics.clone(), status.clone()))
}

/// Starts all servers. Returns what reads the sync loop for them.
pub(super) fn start(
    choice: &ModeChoice,
    local: Option<LocalListener>,
    outputs: &Outputs,
    introspection: Introspection,
    tasks: &mut Tasks,
) -> Inspector {
    let config = &choice.config;
    let node = node_inspector(choice, outputs);
    start_local_endpoint(choice, local, node.clone(), outputs, introspection.clone(), tasks);
    let Outputs { metrics, health, health_checks, status, events, .. } = outputs;
    let hard_fail = config.bind_address_hard_fail;
    let mut serve = |server: HttpServer, address: Option<SocketAddr>, routes: Router| {
        if let Some(address) = address {
            let events = events.clone();
            tasks.spawn(async move {
                health::serve(server, address, routes, hard_fail, &events)
                    .await
                    .map(|never| match never {})
                    .map_err(Into::into)
            });
        }
    };
    serve(
        HttpServer::Healthz,
        config.healthz_bind_address,
        health::healthz_routes(health.clone(), metrics.clone(), status.clone()),
    );
    let mut routes = health::metrics_routes(metrics).merge(health::introspection_routes(introspection));
    if config.ui {
        routes = routes.merge(ui::routes(Pages::new(node.clone(), events.clone())));
    }
    serve(HttpServer::Metrics, config.metrics_bind_address, routes);
    let port_failures =
        PortFailureEvents { events: events.clone(), node_name: config.model.node_name.clone() };
    let answering = health::serve_health_checks(health_checks.subscribe(), health.clone(), port_failures);
    tasks.spawn(async move {
        answering.await;
        Ok(())
    });
    node.inspector
}
