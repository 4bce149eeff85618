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
use tokio::{sync::mpsc, time::sleep};

use super::{
    failure::{Failure, FailureClass},
    response,
};
use crate::{model::NamespacedName, node::NodeEvent};

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
/// after some attempts, that is logged, and the Event is lost.
pub async fn record_events(client: &kube::Client, node_name: &str, events: &mut mpsc::Receiver<NodeEvent>) {
    while let Some(event) = events.recv().await {
        let body = body(node_name, &event, Timestamp::now());
        if let Err(failure) = write(client, &body).await {
            tracing::info!(reason = event.reason, error = %failure, "cannot write an Event; it is lost");
        }
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
    !matches!(failure.class, FailureClass::Forbidden | FailureClass::Status(400..=499))
}

async fn post(client: &kube::Client, body: &Value) -> Result<(), Failure> {
    /// The created Event, whose content is not needed.
    #[derive(Deserialize)]
    struct Created {}

    let namespace = body["metadata"]["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    let request = http::Request::post(format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(Failure::invalid)?;
    response::request(client, request, RESPONSE_TIMEOUT).await.map(|Created {}| ())
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
    use super::*;

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
