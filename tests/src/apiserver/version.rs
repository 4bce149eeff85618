//! What the API servers of different Kubernetes versions answer to shunt, with their default
//! feature gates.

use axum::response::Response;
use serde_json::Value;

use super::{Request, Resource, faults::Verb, responses};

/// The minor version of Kubernetes 1 as which the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion(pub u32);

impl Default for KubernetesVersion {
    /// The version of the recordings.
    fn default() -> Self {
        Self(36)
    }
}

/// Fields by which every version selects objects of every kind.
const COMMON_FIELDS: [&str; 2] = ["metadata.name", "metadata.namespace"];

impl KubernetesVersion {
    /// Returns true if lists are streamed: the gate `WatchList`, which 1.33 turned off again.
    fn streams_lists(self) -> bool {
        self.0 == 32 || self.0 >= 34
    }

    /// Returns true if streaming lists are compressed: the gate `WatchListCompression`.
    pub(super) fn compresses_streams(self) -> bool {
        self.0 >= 37
    }

    /// Returns true if the resource is served. `networking.k8s.io/v1` has ServiceCIDRs from 1.33
    /// on. The alpha and beta versions before it are off by default.
    fn serves(self, resource: &Resource) -> bool {
        resource.plural != "servicecidrs" || self.0 >= 33
    }

    /// Returns true if objects can be selected by this field (pull request 123905 for Services).
    fn selects_by(self, resource: &Resource, field: &str) -> bool {
        COMMON_FIELDS.contains(&field)
            || resource.plural == "services"
                && ["spec.clusterIP", "spec.type"].contains(&field)
                && self.0 >= 31
    }

    /// Returns the answer to a request that this version refuses.
    pub(super) fn refusal(self, resource: &Resource, request: &Request) -> Option<Response> {
        let encoding = request.encoding();
        if !self.serves(resource) {
            return Some(responses::not_found(encoding));
        }
        if request.verb == Verb::WatchList && !self.streams_lists() {
            return Some(responses::failure(encoding, responses::streaming_refused()));
        }
        let selector = request.query.get("fieldSelector").unwrap_or_default();
        let mut fields = selector.split(',').filter_map(|term| term.split(['!', '=']).next());
        let unknown = fields.find(|field| !field.is_empty() && !self.selects_by(resource, field))?;
        let [name, namespace] = COMMON_FIELDS;
        let message =
            format!("\"{unknown}\" is not a known field selector: only \"{name}\", \"{namespace}\"");
        Some(responses::failure(encoding, responses::status(400, "BadRequest", message)))
    }

    /// Removes the fields that this version does not have, or whose feature gate is off.
    pub(super) fn drop_fields(self, object: &mut Value) {
        if self.0 < 30 {
            remove(object, "/status/loadBalancer/ingress", "", "ipMode");
        }
        if self.0 < 34 {
            remove(object, "/endpoints", "/hints", "forNodes");
        }
    }
}

/// Removes a field from the objects at `inner` of the items of the list at `list` (JSON pointers).
fn remove(object: &mut Value, list: &str, inner: &str, field: &str) {
    let items = object.pointer_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
    for fields in items.filter_map(|item| item.pointer_mut(inner)?.as_object_mut()) {
        fields.remove(field);
    }
}
