//! Writes Events about this node's proxy (`events.k8s.io/v1`), as upstream's recorder does. Each is kept in the namespace of what it is
//! about.

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::failure::{Failure, FailureClass};
use crate::{model::NamespacedName, node::NodeEvent};

/// Where Events about objects without a namespace are kept.
const DEFAULT_NAMESPACE: &str = "default";
/// Who reports, for those who select by it.
const CONTROLLER: &str = "kube-proxy";
/// What a note may hold (`NoteLengthLimit` in `pkg/apis/core/validation/events.go`).
const LONGEST_NOTE: usize = 1024;
const TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Writes all events that come, until nobody can send any more. One that the server does not take after some tries is told in the
/// log and lost.
pub async fn record_events(client: &kube::Client, node_name: &str, events: &mut mpsc::Receiver<NodeEvent>) {
    while let Some(event) = events.recv().await {
        let body = body(node_name, &event, Timestamp::now());
        if let Err(failure) = write(client, &body).await {
            tracing::info!(reason = event.reason, error = %failure, "an Event was not written");
        }
    }
}

async fn write(client: &kube::Client, body: &Value) -> Result<(), Failure> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..TRIES {
        match try_to_write(client, body).await {
            Err(failure) if may_pass(&failure) => sleep(pause).await,
            ended => return ended,
        }
        pause *= 2;
    }
    try_to_write(client, body).await
}

/// What forbids it now will forbid it in a moment.
fn may_pass(failure: &Failure) -> bool {
    !matches!(failure.class, FailureClass::Forbidden | FailureClass::Status(400..=499))
}

async fn try_to_write(client: &kube::Client, body: &Value) -> Result<(), Failure> {
    /// What is created says nothing new.
    #[derive(Deserialize)]
    struct Created {}

    let namespace = body["metadata"]["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE);
    let request = http::Request::post(format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(Failure::garbled)?;
    match timeout(ANSWERED_WITHIN, client.request::<Created>(request)).await {
        Ok(Ok(Created {})) => Ok(()),
        Ok(Err(error)) => Err(Failure::request(&error)),
        Err(_) => Err(Failure::slow(ANSWERED_WITHIN)),
    }
}

fn body(node_name: &str, event: &NodeEvent, now: Timestamp) -> Value {
    let note: String = event.note.chars().take(LONGEST_NOTE / 4).collect();
    // Actions are upstream's: of `NewProxyServer` and of `SyncServices`.
    let (namespace, name, action, regarding) = match &event.service {
        None => {
            let regarding = json!({ "apiVersion": "v1", "kind": "Node", "name": node_name });
            (DEFAULT_NAMESPACE, node_name, "StartKubeProxy", regarding)
        }
        Some(NamespacedName { namespace, name }) => {
            let about = (&**namespace, &**name);
            let regarding =
                json!({ "apiVersion": "v1", "kind": "Service", "namespace": about.0, "name": about.1 });
            (about.0, about.1, "Listen", regarding)
        }
    };
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": { "name": format!("{name}.{:x}", now.as_nanosecond()), "namespace": namespace },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string(),
        "reportingController": CONTROLLER,
        "reportingInstance": format!("{CONTROLLER}-{node_name}"),
        "action": action,
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
    fn an_event_is_about_the_node_and_as_the_server_takes_it() {
        let event = NodeEvent { service: None, is_warning: true, reason: "Failed", note: "x".repeat(2000) };
        let now = Timestamp::from_microsecond(1_700_000_000_000_042).expect("a time");
        let body = body("n1", &event, now);
        assert_eq!(body["eventTime"], "2023-11-14T22:13:20.000042Z");
        assert_eq!(
            body["metadata"]["name"],
            "n1.1797a0f7cc3a5a10".replace("1797a0f7cc3a5a10", &format!("{:x}", now.as_nanosecond()))
        );
        assert_eq!(body["regarding"], json!({ "apiVersion": "v1", "kind": "Node", "name": "n1" }));
        assert_eq!((&body["type"], &body["reason"]), (&json!("Warning"), &json!("Failed")));
        assert!(body["note"].as_str().is_some_and(|note| note.len() <= LONGEST_NOTE));
    }

    #[test]
    fn an_event_about_a_service_is_kept_in_its_namespace() {
        let service = Some(NamespacedName::new("shop", "web"));
        let event = NodeEvent { service, is_warning: true, reason: "Failed", note: "taken".into() };
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
