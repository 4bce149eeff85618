//! The decoded fields of Kubernetes objects: no managedFields, and only the used labels and
//! annotation.
//!
//! All fields are optional, because `null` and an absent field mean the same to the API server.
//! Numbers are wider than the API's, so that a number out of range is reported as such.

use serde::Deserialize;

use crate::model::NamespacedName;

/// Any object, of which only the metadata is decoded.
#[derive(Deserialize)]
pub(in crate::watch) struct RawObject {
    pub(super) metadata: Option<RawMetadata>,
}

/// `metadata`.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::watch) struct RawMetadata {
    pub(super) name: Option<String>,
    pub(super) namespace: Option<String>,
    pub(in crate::watch) resource_version: Option<String>,
    pub(super) deletion_timestamp: Option<String>,
    pub(super) labels: Option<RawLabels>,
    pub(super) annotations: Option<RawAnnotations>,
}

impl RawMetadata {
    /// Returns true if kube-proxy's label selectors, `!service.kubernetes.io/service-proxy-name`
    /// and `!service.kubernetes.io/headless`, select the object.
    pub(super) fn selected(&self) -> bool {
        self.labels
            .as_ref()
            .is_none_or(|labels| labels.service_proxy_name.is_none() && labels.headless.is_none())
    }

    /// Returns the name of a namespaced object. The default namespace is `default`, as with
    /// kubectl.
    pub(in crate::watch) fn namespaced_name(&self) -> Option<NamespacedName> {
        let namespace =
            self.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or("default");
        Some(NamespacedName::new(namespace, self.non_empty_name()?))
    }

    /// Returns the name of a cluster-scoped object.
    pub(in crate::watch) fn cluster_scoped_name(&self) -> Option<NamespacedName> {
        Some(NamespacedName::new("", self.non_empty_name()?))
    }

    fn non_empty_name(&self) -> Option<&str> {
        self.name.as_deref().filter(|name| !name.is_empty())
    }
}

/// The used labels.
#[derive(Default, Deserialize)]
pub(super) struct RawLabels {
    #[serde(rename = "service.kubernetes.io/service-proxy-name")]
    pub(super) service_proxy_name: Option<String>,
    #[serde(rename = "service.kubernetes.io/headless")]
    pub(super) headless: Option<String>,
    #[serde(rename = "kubernetes.io/service-name")]
    pub(super) service_name: Option<String>,
    #[serde(rename = "topology.kubernetes.io/zone")]
    pub(super) zone: Option<String>,
}

/// The used annotation.
#[derive(Default, Deserialize)]
pub(super) struct RawAnnotations {
    #[serde(rename = "endpoints.kubernetes.io/last-change-trigger-time")]
    pub(super) last_change_trigger_time: Option<String>,
}

#[derive(Deserialize)]
pub(in crate::watch) struct RawService {
    pub(super) metadata: Option<RawMetadata>,
    pub(super) spec: Option<RawServiceSpec>,
    pub(super) status: Option<RawServiceStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawServiceSpec {
    #[serde(rename = "type")]
    pub(super) service_type: Option<String>,
    #[serde(rename = "clusterIP")]
    pub(super) cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub(super) cluster_ips: Option<Vec<String>>,
    #[serde(rename = "externalIPs")]
    pub(super) external_ips: Option<Vec<String>>,
    pub(super) load_balancer_source_ranges: Option<Vec<String>>,
    pub(super) ports: Option<Vec<RawServicePort>>,
    pub(super) session_affinity: Option<String>,
    pub(super) session_affinity_config: Option<RawSessionAffinityConfig>,
    pub(super) internal_traffic_policy: Option<String>,
    pub(super) external_traffic_policy: Option<String>,
    pub(super) health_check_node_port: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawServicePort {
    pub(super) name: Option<String>,
    pub(super) protocol: Option<String>,
    pub(super) port: Option<i64>,
    pub(super) node_port: Option<i64>,
}

#[derive(Deserialize)]
pub(super) struct RawSessionAffinityConfig {
    #[serde(rename = "clientIP")]
    pub(super) client_ip: Option<RawClientIpConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawClientIpConfig {
    pub(super) timeout_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawServiceStatus {
    pub(super) load_balancer: Option<RawLoadBalancerStatus>,
}

#[derive(Deserialize)]
pub(super) struct RawLoadBalancerStatus {
    pub(super) ingress: Option<Vec<RawLoadBalancerIngress>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawLoadBalancerIngress {
    pub(super) ip: Option<String>,
    pub(super) ip_mode: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::watch) struct RawEndpointSlice {
    pub(super) metadata: Option<RawMetadata>,
    pub(super) address_type: Option<String>,
    pub(super) endpoints: Option<Vec<RawEndpoint>>,
    pub(super) ports: Option<Vec<RawEndpointPort>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawEndpoint {
    pub(super) addresses: Option<Vec<String>>,
    pub(super) conditions: Option<RawEndpointConditions>,
    pub(super) node_name: Option<String>,
    pub(super) hints: Option<RawEndpointHints>,
}

#[derive(Default, Deserialize)]
pub(super) struct RawEndpointConditions {
    pub(super) ready: Option<bool>,
    pub(super) serving: Option<bool>,
    pub(super) terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawEndpointHints {
    pub(super) for_zones: Option<Vec<RawHint>>,
    pub(super) for_nodes: Option<Vec<RawHint>>,
}

#[derive(Deserialize)]
pub(super) struct RawHint {
    pub(super) name: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct RawEndpointPort {
    pub(super) name: Option<String>,
    pub(super) protocol: Option<String>,
    pub(super) port: Option<i64>,
}

#[derive(Deserialize)]
pub(in crate::watch) struct RawNode {
    pub(super) metadata: Option<RawMetadata>,
    pub(super) spec: Option<RawNodeSpec>,
    pub(super) status: Option<RawNodeStatus>,
}

#[derive(Deserialize)]
pub(in crate::watch) struct RawServiceCidr {
    pub(super) metadata: Option<RawMetadata>,
    pub(super) spec: Option<RawServiceCidrSpec>,
}

#[derive(Deserialize)]
pub(super) struct RawServiceCidrSpec {
    pub(super) cidrs: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
pub(super) struct RawNodeSpec {
    #[serde(rename = "podCIDR")]
    pub(super) pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pub(super) pod_cidrs: Option<Vec<String>>,
    pub(super) taints: Option<Vec<RawTaint>>,
}

#[derive(Deserialize)]
pub(super) struct RawTaint {
    pub(super) key: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct RawNodeStatus {
    pub(super) addresses: Option<Vec<RawNodeAddress>>,
}

#[derive(Deserialize)]
pub(super) struct RawNodeAddress {
    #[serde(rename = "type")]
    pub(super) address_type: Option<String>,
    pub(super) address: Option<String>,
}
