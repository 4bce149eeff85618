//! Reads single pods. shunt does not watch pods: it needs one only if somebody asks about it.

use std::time::Duration;

use tokio::sync::watch;

use super::{
    failure::{Failure, FailureClass},
    response,
};
use crate::{
    model::{NamespacedName, PodPlace},
    watch::decode::{RawPod, pod_place},
};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a pod cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// Objects come from manifests, or no client exists yet.
    #[error(
        "the pod {0} is no endpoint of a Service, and shunt has no API server to ask: name its address instead"
    )]
    NoServer(NamespacedName),
    /// HTTP 403.
    #[error(
        "the pod {0} is no endpoint of a Service, and shunt may not read it: the ClusterRole shunt lacks the verb get on pods. \
         Set readPods: true in the chart, or name the address of the pod: kubectl --namespace {ns} get pod {pod} --output wide",
        ns = .0.namespace, pod = .0.name
    )]
    Forbidden(NamespacedName),
    /// HTTP 404.
    #[error("there is no pod {0}")]
    NotFound(NamespacedName),
    /// Any other failure.
    #[error("cannot read the pod {0}: {1}")]
    Failed(NamespacedName, String),
}

/// Reads pods with the credentials of the API source, once there is one.
#[derive(Clone, Debug)]
pub struct PodReader {
    client: watch::Sender<Option<Client>>,
}

#[derive(Clone)]
struct Client(kube::Client);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Default for PodReader {
    fn default() -> Self {
        Self { client: watch::Sender::new(None) }
    }
}

impl PodReader {
    /// Sets the client of the API source.
    pub fn set_client(&self, client: &kube::Client) {
        self.client.send_replace(Some(Client(client.clone())));
    }

    /// Reads a pod.
    ///
    /// # Errors
    /// Returns an error if there is no such pod, or if it cannot be read. It says what to do
    /// instead.
    pub async fn read(&self, name: NamespacedName) -> Result<PodPlace, PodError> {
        let client = self.client.borrow().clone();
        let Some(Client(client)) = client else { return Err(PodError::NoServer(name)) };
        match request(&client, &name).await {
            Ok(raw) => Ok(pod_place(name, raw)),
            Err(failure) => Err(match failure.class {
                FailureClass::Forbidden => PodError::Forbidden(name),
                FailureClass::Status(404) => PodError::NotFound(name),
                _ => PodError::Failed(name, failure.to_string()),
            }),
        }
    }
}

async fn request(client: &kube::Client, name: &NamespacedName) -> Result<RawPod<'static>, Failure> {
    let NamespacedName { namespace, name } = name;
    let request = http::Request::get(format!("/api/v1/namespaces/{namespace}/pods/{name}"));
    let request = request.body(Vec::new()).map_err(Failure::invalid)?;
    response::request(client, request, RESPONSE_TIMEOUT).await
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, net::IpAddr};

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// Asks a server that answers with this status and body.
    async fn asked(status: u16, body: Value) -> Result<PodPlace, PodError> {
        let service = tower::service_fn(move |request: http::Request<Body>| {
            assert_eq!(request.uri().path(), "/api/v1/namespaces/shop/pods/web-0");
            let answer =
                http::Response::builder().status(status).body(Body::from(body.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer.expect("a response")) }
        });
        let reader = PodReader::default();
        reader.set_client(&kube::Client::new(service, "default"));
        reader.read(NamespacedName::new("shop", "web-0")).await
    }

    fn failure(code: u16, reason: &str) -> Value {
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "no"})
    }

    #[tokio::test]
    async fn a_pod_has_addresses_and_a_node() {
        let pod = json!({
            "metadata": {"name": "web-0", "namespace": "shop"},
            "spec": {"nodeName": "n1", "hostNetwork": true},
            "status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]},
        });
        let place = asked(200, pod).await.expect("a pod");
        let expected = ["10.0.0.1", "fd00::1"].map(|text| text.parse::<IpAddr>().expect(text));
        assert_eq!(place.addresses, expected);
        assert_eq!((place.node_name.as_deref(), place.host_network), (Some("n1"), true));
        let pending = asked(200, json!({"spec": {}})).await.expect("a pod without a node");
        assert_eq!((pending.addresses.len(), pending.node_name, pending.host_network), (0, None, false));
    }

    #[tokio::test]
    async fn what_is_missing_is_named() {
        let error = asked(403, failure(403, "Forbidden")).await.expect_err("forbidden").to_string();
        for part in ["lacks the verb get on pods", "readPods: true", "kubectl --namespace shop get pod web-0"]
        {
            assert!(error.contains(part), "{error}");
        }
        let error = asked(404, failure(404, "NotFound")).await.expect_err("not there").to_string();
        assert_eq!(error, "there is no pod shop/web-0");
        let error = asked(500, failure(500, "InternalError")).await.expect_err("broken").to_string();
        assert!(
            error.contains("cannot read the pod shop/web-0: the API server returned an error (500)"),
            "{error}"
        );
        let error =
            PodReader::default().read(NamespacedName::new("shop", "web-0")).await.expect_err("no server");
        assert!(error.to_string().contains("name its address instead"), "{error}");
    }
}
