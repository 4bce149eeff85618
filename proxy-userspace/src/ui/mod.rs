//! The daemon's pages for browsers, at `/ui/` of the metrics address. They only read, work without
//! scripts, and load nothing from elsewhere.
#![forbid(unsafe_code)]

mod answer;
mod events;
mod layout;
mod maps;
mod node;
mod service;
mod services;

#[cfg(test)]
mod tests;

use axum::{
    Router,
    extract::{Path, Query, State},
    middleware,
    response::{Redirect, Response},
    routing::get,
};

use self::{
    answer::{answer, by_address, missing, unavailable},
    layout::Section,
    service::Question,
    services::SearchForm,
};
use crate::{
    inspect::{NodeInspector, PodFinder},
    model::NamespacedName,
    node::NodeEvents,
};

/// What the pages show.
#[derive(Clone, Debug)]
pub struct Pages {
    node: NodeInspector,
    events: NodeEvents,
}

impl Pages {
    /// Returns the pages of a node, with the events that shunt reported. Whoever reaches the pages
    /// must not use shunt's right to read pods, so that they find only pods that are endpoints.
    pub fn new(node: NodeInspector, events: NodeEvents) -> Self {
        let pods = PodFinder::new(|_| async {
            Err("the pages do not ask the API server for pods; name the pod by its address, or use shunt explain".to_owned())
        });
        Self { node: NodeInspector { pods, ..node }, events }
    }
}

/// Returns the pages. They answer GET and HEAD.
pub fn routes(pages: Pages) -> Router {
    Router::new()
        .route("/ui", get(|| async { Redirect::permanent("/ui/") }))
        .route("/ui/", get(node_page))
        .route("/ui/services", get(services_page))
        .route("/ui/services/{namespace}/{name}", get(service_page))
        .route("/ui/maps", get(maps_page))
        .route("/ui/events", get(events_page))
        .route("/ui/{*other}", get(|| async { missing("There is no such page.") }))
        .layer(middleware::from_fn(by_address))
        .with_state(pages)
}

async fn node_page(State(Pages { node, .. }): State<Pages>) -> Response {
    let (report, details) = (node.report(), node.details().await);
    answer(Section::Node, &node::page(&report, details.as_ref()))
}

async fn services_page(State(Pages { node, .. }): State<Pages>, Query(form): Query<SearchForm>) -> Response {
    match node.find(&form.search(), form.index()).await {
        Ok(found) => answer(Section::Services, &services::page(&form, &found)),
        Err(error) => unavailable(Section::Services, error),
    }
}

async fn service_page(
    State(Pages { node, .. }): State<Pages>,
    Path((namespace, name)): Path<(String, String)>,
    Query(question): Query<Question>,
) -> Response {
    let details = match node.service(&namespace, &name).await {
        Ok(Some(details)) => details,
        Ok(None) => return missing(&no_service(&node, &namespace, &name).await),
        Err(error) => return unavailable(Section::Service, error),
    };
    let explained = match question.request() {
        Some(Ok(request)) => Some(node.explain(request, false).await.map_err(|error| error.to_string())),
        Some(Err(error)) => Some(Err(error)),
        None => None,
    };
    let explained = explained.as_ref().map(|explained| explained.as_ref().map_err(String::as_str));
    answer(Section::Service, &service::page(&namespace, &name, &details, &question, explained))
}

/// Says why a Service has no page.
async fn no_service(node: &NodeInspector, namespace: &str, name: &str) -> String {
    let why = match NamespacedName::parse(namespace, name) {
        Ok(service) => node.unserved(&service).await.map(|why| format!(" Reason: {why}.")),
        Err(_) => None,
    };
    format!("No Service {namespace}/{name} has addresses on this node.{}", why.unwrap_or_default())
}

async fn maps_page(State(Pages { node, .. }): State<Pages>) -> Response {
    match node.maps().await {
        Ok(maps) => answer(Section::Maps, &maps::page(&maps, node.report().mode.as_deref())),
        Err(error) => unavailable(Section::Maps, error),
    }
}

async fn events_page(State(Pages { events, .. }): State<Pages>) -> Response {
    answer(Section::Events, &events::page(&events.recent()))
}
