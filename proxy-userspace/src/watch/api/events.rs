//! Writes Events about this node's proxy (`events.k8s.io/v1`), like upstream's recorder. An Event
//! is in the namespace of its object.
//!
//! `kubectl describe` looks for the UID of an object. For a Node it also takes the name as the UID,
//! which is what kubelets and upstream write (`NodeRef` in `cmd/kube-proxy/app/server.go`). The
//! UIDs of Services are not known here.

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    failure::{Failure, FailureClass},
    response,
};
use crate::{
    model::NamespacedName,
    node::{NodeEvent, PendingEvents},
};

/// The namespace of Events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";
/// The reporting controller, by which users may select Events.
const CONTROLLER: &str = "kube-proxy";
/// The limit of a note in bytes (`NoteLengthLimit` in `pkg/apis/core/validation/events.go`).
const MAX_NOTE: usize = 1024;
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes all events that come, until all senders are gone. If the server does not accept an Event
/// after some attempts, that is logged, and the Event is lost. If this is dropped while it writes
/// an Event, the next call writes that one again.
pub async fn record_events(client: &kube::Client, node_name: &str, events: &mut PendingEvents) {
    while let Some((event, time)) = events.next().await {
        if let Err(failure) = write(client, &body(node_name, event, time)).await {
            tracing::info!(reason = event.reason, error = %failure, "cannot write an Event; it is lost");
        }
        events.is_written();
    }
}

async fn write(client: &kube::Client, body: &Value) -> Result<(), Failure> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..ATTEMPTS {
        match post(client, body).await {
            Err(failure) if is_temporary(&failure) => sleep(pause).await,
            result => return result,
        }
        pause *= 2;
    }
    post(client, body).await
}

/// Returns true if a later attempt may succeed.
fn is_temporary(failure: &Failure) -> bool {
    !matches!(failure.class, FailureClass::Forbidden | FailureClass::Status(400..=428 | 430..=499))
}

/// Writes an Event. Its name has its time, so one that is there was written before, and the answer
/// did not come.
async fn post(client: &kube::Client, body: &Value) -> Result<(), Failure> {
    /// The created Event, whose content is not needed.
    #[derive(Deserialize)]
    struct Created {}

    let namespace = body["metadata"]["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    let request = http::Request::post(format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(Failure::invalid)?;
    match response::request(client, request, RESPONSE_TIMEOUT).await {
        Err(Failure { class: FailureClass::Status(409), .. }) => Ok(()),
        created => created.map(|Created {}| ()),
    }
}

fn body(node_name: &str, event: &NodeEvent, now: Timestamp) -> Value {
    let note = &event.note[..event.note.floor_char_boundary(MAX_NOTE)];
    let (namespace, name, regarding) = match &event.service {
        None => {
            let regarding =
                json!({ "apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_name });
            (DEFAULT_NAMESPACE, node_name, regarding)
        }
        Some(NamespacedName { namespace, name }) => {
            let regarding =
                json!({ "apiVersion": "v1", "kind": "Service", "namespace": **namespace, "name": **name });
            (&**namespace, &**name, regarding)
        }
    };
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": { "name": format!("{name}.{:x}", now.as_nanosecond()), "namespace": namespace },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string(),
        "reportingController": CONTROLLER,
        "reportingInstance": format!("{CONTROLLER}-{node_name}"),
        "action": event.action,
        "reason": event.reason,
        "regarding": regarding,
        "note": note,
        "type": if event.is_warning { "Warning" } else { "Normal" },
    })
}

#[cfg(test)]
mod tests {
    use std::{
        future, io,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use http_body_util::BodyExt as _;
    use kube::client::Body;
    use tokio::{sync::mpsc, time::timeout};
    use tower::BoxError;

    use super::*;
    use crate::node::NodeEvents;

    #[tokio::test(start_paused = true)]
    async fn an_event_whose_writing_is_given_up_is_written_by_the_next_recording() {
        let (events, pending) = NodeEvents::channel();
        let mut pending = PendingEvents::new(pending);
        events.normal("Starting", "");
        drop(events);
        let (sender, mut bodies) = mpsc::unbounded_channel();
        let is_first = Arc::new(AtomicBool::new(true));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (sender, is_first) = (sender.clone(), is_first.swap(false, Ordering::Relaxed));
            async move {
                let body = request.into_body().collect().await?.to_bytes();
                sender.send(body).map_err(io::Error::other)?;
                if is_first {
                    future::pending::<()>().await;
                }
                Ok::<_, BoxError>(http::Response::new(Body::from(b"{}".to_vec())))
            }
        });
        let client = kube::Client::new(service, "default");
        let second = Duration::from_secs(1);
        assert!(timeout(second, record_events(&client, "n1", &mut pending)).await.is_err());
        let first = bodies.try_recv().expect("a request");
        timeout(second, record_events(&client, "n1", &mut pending)).await.expect("it ends");
        assert_eq!(bodies.try_recv(), Ok(first), "the server would not write it twice");
        assert!(bodies.try_recv().is_err());
    }

    #[test]
    fn a_refusal_is_final_but_an_overloaded_server_is_asked_again() {
        for (code, expected) in
            [(400, false), (403, false), (404, false), (422, false), (401, true), (429, true), (503, true)]
        {
            assert_eq!(is_temporary(&Failure::status(code, "no")), expected, "{code}");
        }
    }

    #[test]
    fn an_event_about_the_node_is_valid_for_the_server() {
        let event = NodeEvent {
            service: None,
            is_warning: true,
            reason: "Failed",
            action: "StartKubeProxy",
            note: "x".repeat(2000),
        };
        let now = Timestamp::from_microsecond(1_700_000_000_000_042).expect("a time");
        let body = body("n1", &event, now);
        assert_eq!(body["eventTime"], "2023-11-14T22:13:20.000042Z");
        assert_eq!(
            body["metadata"]["name"],
            "n1.1797a0f7cc3a5a10".replace("1797a0f7cc3a5a10", &format!("{:x}", now.as_nanosecond()))
        );
        // `kubectl describe node` shows Events with this UID.
        let regarding = json!({ "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1" });
        assert_eq!(body["regarding"], regarding);
        assert_eq!((&body["type"], &body["reason"]), (&json!("Warning"), &json!("Failed")));
        assert!(body["note"].as_str().is_some_and(|note| note.len() <= MAX_NOTE));
    }

    #[test]
    fn a_note_has_as_many_whole_characters_as_the_server_takes() {
        let note = |text: &str| {
            let event =
                NodeEvent { service: None, is_warning: false, reason: "", action: "", note: text.into() };
            body("n1", &event, Timestamp::UNIX_EPOCH)["note"].as_str().map(str::to_owned)
        };
        let fits = "x".repeat(MAX_NOTE);
        assert_eq!(note(&fits), Some(fits.clone()));
        assert_eq!(note(&format!("{fits}y")), Some(fits.clone()));
        let cut = fits[..MAX_NOTE - 1].to_owned();
        assert_eq!(note(&format!("{cut}é")), Some(cut), "half a character is no text");
    }

    #[test]
    fn an_event_about_a_service_is_in_its_namespace() {
        let service = Some(NamespacedName::new("shop", "web"));
        let event =
            NodeEvent { service, is_warning: true, reason: "Failed", action: "Listen", note: "taken".into() };
        let body = body("n1", &event, Timestamp::UNIX_EPOCH);
        let regarding = json!({ "apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web" });
        assert_eq!(body["regarding"], regarding);
        assert_eq!(body["metadata"]["namespace"], "shop");
        assert!(body["metadata"]["name"].as_str().is_some_and(|name| name.starts_with("web.")));
        assert_eq!(
            (&body["action"], &body["reportingInstance"]),
            (&json!("Listen"), &json!("kube-proxy-n1"))
        );
    }
}
