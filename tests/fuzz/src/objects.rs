//! Lists and watches of Services, EndpointSlices, Nodes and ServiceCIDRs, as the API server sends
//! them in JSON and in protobuf, down to the model.

use std::convert::Infallible;

use http::{HeaderValue, Request, Response, header::CONTENT_TYPE};
use http_body_util::Full;
use kube::client::Body;
use proxy_userspace::{
    model::{Delta, Model, ModelSettings, NodeFacts, WatchEvent},
    net::ContentType,
    watch::ApiSource,
};
use tokio::{runtime::Builder, sync::mpsc, task::yield_now};
use tower::service_fn;

/// The name of the node in recorded answers.
const NODE: &str = "node1";
/// How often the source gets its turn without sending an event, until it waits for something.
const TURNS: u32 = 64;

pub(crate) fn run(input: &[u8]) {
    apply(input, ContentType::Json);
}

pub(crate) fn run_protobuf(input: &[u8]) {
    apply(input, ContentType::Protobuf);
}

/// Makes a model of what the API server answers.
fn apply(answer: &[u8], content_type: ContentType) {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    let mut model = model();
    for event in runtime.block_on(events(answer, content_type)) {
        model.apply(event);
        model.resolve();
    }
    model.take_trigger_times();
}

/// Returns a model of a cluster without objects.
pub(crate) fn model() -> Model {
    let mut model = Model::new(ModelSettings { node_name: NODE.into(), ..ModelSettings::default() });
    model.set_node_facts(NodeFacts::default());
    model.apply(WatchEvent::Services(Delta::Replace(Vec::new())));
    model.apply(WatchEvent::EndpointSlices(Delta::Replace(Vec::new())));
    model.apply(WatchEvent::Nodes(Delta::Replace(Vec::new())));
    model
}

/// Returns what the API source makes of a server that gives this answer to every request.
async fn events(answer: &[u8], content_type: ContentType) -> Vec<WatchEvent> {
    let answer = Full::from(answer.to_vec());
    let server = service_fn(move |_: Request<Body>| {
        let mut answer = Response::new(answer.clone());
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type.name()));
        async move { Ok::<_, Infallible>(answer) }
    });
    let source = ApiSource::new(kube::Client::new(server, "default"), NODE).with_service_cidrs();
    let (to, mut from) = mpsc::channel(TURNS as usize);
    let source = tokio::spawn(source.run(to));
    let mut events = Vec::new();
    let mut idle = 0;
    while idle < TURNS {
        idle += 1;
        yield_now().await;
        while let Ok(event) = from.try_recv() {
            events.push(event);
            idle = 0;
        }
    }
    source.abort();
    events
}
