//! Reads single objects that shunt does not watch: it needs one only if somebody asks about it.

use std::{collections::BTreeMap, time::Duration};

use serde::Deserialize;
use tokio::sync::watch;

use super::{
    failure::{Failure, FailureClass},
    response,
};
use crate::{
    model::{NamespacedName, PodPlace, UnservedReason},
    watch::decode::{RawPod, SERVICE_PROXY_NAME, pod_place},
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

/// Reads objects with the credentials of the API source, once there is one.
#[derive(Clone, Debug)]
pub struct ObjectReader {
    client: watch::Sender<Option<Client>>,
}

#[derive(Clone)]
struct Client(kube::Client);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Default for ObjectReader {
    fn default() -> Self {
        Self { client: watch::Sender::new(None) }
    }
}

impl ObjectReader {
    /// Sets the client of the API source.
    pub fn set_client(&self, client: &kube::Client) {
        self.client.send_replace(Some(Client(client.clone())));
    }

    /// Returns the client of the API source.
    pub fn client(&self) -> Option<kube::Client> {
        self.client.borrow().as_ref().map(|Client(client)| client.clone())
    }

    /// Returns why a Service is not served, which needs the right to list Services. `None` if the
    /// server does not say.
    pub async fn unserved_reason(&self, name: &NamespacedName) -> Option<UnservedReason> {
        let Client(client) = self.client.borrow().clone()?;
        let list: ServiceList = match request_services(&client, name).await {
            Ok(list) => list,
            Err(failure) => {
                tracing::debug!(service = %name, error = %failure, "cannot read the Service");
                return None;
            }
        };
        Some(list.items.first().map_or(UnservedReason::NotThere, ListedService::unserved_reason))
    }

    /// Reads a pod.
    ///
    /// # Errors
    /// Returns an error if there is no such pod, or if it cannot be read. It says what to do
    /// instead.
    pub async fn read_pod(&self, name: NamespacedName) -> Result<PodPlace, PodError> {
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

/// A list of Services, with what decides whether a proxy serves them.
#[derive(Deserialize)]
struct ServiceList {
    items: Vec<ListedService>,
}

#[derive(Deserialize)]
struct ListedService {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(rename = "type", default)]
    service_type: String,
    #[serde(rename = "clusterIP", default)]
    cluster_ip: String,
}

impl ListedService {
    fn unserved_reason(&self) -> UnservedReason {
        if self.metadata.labels.contains_key(SERVICE_PROXY_NAME) {
            UnservedReason::OtherProxy
        } else if self.spec.service_type == "ExternalName" {
            UnservedReason::ExternalName
        } else if matches!(&*self.spec.cluster_ip, "" | "None") {
            UnservedReason::Headless
        } else {
            UnservedReason::NotReceived
        }
    }
}

/// Lists the Services of a name. The role has no right to get one.
async fn request_services(client: &kube::Client, name: &NamespacedName) -> Result<ServiceList, Failure> {
    let NamespacedName { namespace, name } = name;
    let path = format!("/api/v1/namespaces/{namespace}/services?fieldSelector=metadata.name%3D{name}");
    let request = http::Request::get(path).body(Vec::new()).map_err(Failure::invalid)?;
    response::request(client, request, RESPONSE_TIMEOUT).await
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
        let reader = ObjectReader::default();
        reader.set_client(&kube::Client::new(service, "default"));
        reader.read_pod(NamespacedName::new("shop", "web-0")).await
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

    /// Asks a server that lists these Services about one of them.
    async fn unserved(items: Value) -> Option<UnservedReason> {
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let uri = request.uri().to_string();
            assert!(uri.ends_with("/namespaces/shop/services?fieldSelector=metadata.name%3Dweb"), "{uri}");
            let list = json!({"kind": "ServiceList", "apiVersion": "v1", "metadata": {}, "items": items});
            let answer = http::Response::new(Body::from(list.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer) }
        });
        let reader = ObjectReader::default();
        reader.set_client(&kube::Client::new(service, "default"));
        reader.unserved_reason(&NamespacedName::new("shop", "web")).await
    }

    #[tokio::test]
    async fn the_server_tells_why_a_service_is_not_served() {
        assert_eq!(unserved(json!([])).await, Some(UnservedReason::NotThere));
        for (spec, expected) in [
            (json!({"clusterIP": "None"}), Some(UnservedReason::Headless)),
            (
                json!({"type": "ExternalName", "externalName": "a.example"}),
                Some(UnservedReason::ExternalName),
            ),
            (json!({"type": "ClusterIP", "clusterIP": "10.96.0.1"}), Some(UnservedReason::NotReceived)),
        ] {
            let items = json!([{"metadata": {"name": "web", "namespace": "shop"}, "spec": spec}]);
            assert_eq!(unserved(items).await, expected, "{spec}");
        }
        let labels = json!({SERVICE_PROXY_NAME: "other"});
        let items = json!([{"metadata": {"labels": labels}, "spec": {"clusterIP": "10.96.0.1"}}]);
        assert_eq!(unserved(items).await, Some(UnservedReason::OtherProxy));
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
        let error = ObjectReader::default()
            .read_pod(NamespacedName::new("shop", "web-0"))
            .await
            .expect_err("no server");
        assert!(error.to_string().contains("name its address instead"), "{error}");
    }
}
