//! The fields of Kubernetes objects that are decoded: of labels and annotations, only the used
//! ones.

use serde::Deserialize;

use super::Kind;

/// Defines structs of fields with camelCase names. All fields are optional, because `null` and an
/// absent field mean the same to the API server. Numbers are wider than the API's, so that a number
/// out of range is reported as such.
macro_rules! raw {
    ($($(#[$attribute:meta])* $name:ident { $($(#[$rename:meta])* $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$attribute])*
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub(in crate::watch) struct $name {
            $($(#[$rename])* pub(in crate::watch) $field: Option<$type>,)*
        }
    )*};
}

raw! {
    /// Any object, of which only the metadata is decoded.
    RawObject { metadata: RawMetadata }
    /// `metadata`.
    RawMetadata {
        name: String,
        namespace: String,
        resource_version: String,
        deletion_timestamp: String,
        labels: RawLabels,
        annotations: RawAnnotations,
    }
    /// The used labels.
    RawLabels {
        #[serde(rename = "service.kubernetes.io/service-proxy-name")]
        service_proxy_name: String,
        #[serde(rename = "service.kubernetes.io/headless")]
        headless: String,
        #[serde(rename = "kubernetes.io/service-name")]
        service_name: String,
        #[serde(rename = "topology.kubernetes.io/zone")]
        zone: String,
    }
    /// The used annotations.
    RawAnnotations {
        #[serde(rename = "shunt.dev/balance")]
        balance: String,
        #[serde(rename = "shunt.dev/forwarding")]
        forwarding: String,
        #[serde(rename = "shunt.dev/dsr")]
        dsr: String,
        #[serde(rename = "endpoints.kubernetes.io/last-change-trigger-time")]
        last_change_trigger_time: String,
    }

    RawService { metadata: RawMetadata, spec: RawServiceSpec, status: RawServiceStatus }
    RawServiceSpec {
        #[serde(rename = "type")]
        service_type: String,
        #[serde(rename = "clusterIP")]
        cluster_ip: String,
        #[serde(rename = "clusterIPs")]
        cluster_ips: Vec<String>,
        #[serde(rename = "externalIPs")]
        external_ips: Vec<String>,
        load_balancer_source_ranges: Vec<String>,
        ports: Vec<RawServicePort>,
        session_affinity: String,
        session_affinity_config: RawSessionAffinityConfig,
        internal_traffic_policy: String,
        external_traffic_policy: String,
        health_check_node_port: i64,
    }
    RawServicePort { name: String, protocol: String, port: i64, node_port: i64 }
    RawSessionAffinityConfig { #[serde(rename = "clientIP")] client_ip: RawClientIpConfig }
    RawClientIpConfig { timeout_seconds: i64 }
    RawServiceStatus { load_balancer: RawLoadBalancerStatus }
    RawLoadBalancerStatus { ingress: Vec<RawLoadBalancerIngress> }
    RawLoadBalancerIngress { ip: String, ip_mode: String }

    RawEndpointSlice {
        metadata: RawMetadata,
        address_type: String,
        endpoints: Vec<RawEndpoint>,
        ports: Vec<RawEndpointPort>,
    }
    RawEndpoint {
        addresses: Vec<String>,
        conditions: RawEndpointConditions,
        node_name: String,
        hints: RawEndpointHints,
        target_ref: RawTargetRef,
    }
    RawEndpointConditions { ready: bool, serving: bool, terminating: bool }
    RawEndpointHints { for_zones: Vec<RawHint>, for_nodes: Vec<RawHint> }
    RawHint { name: String }
    RawTargetRef { kind: String, namespace: String, name: String }
    RawEndpointPort { name: String, protocol: String, port: i64 }

    RawNode { metadata: RawMetadata, spec: RawNodeSpec, status: RawNodeStatus }
    RawNodeSpec {
        #[serde(rename = "podCIDR")]
        pod_cidr: String,
        #[serde(rename = "podCIDRs")]
        pod_cidrs: Vec<String>,
        taints: Vec<RawTaint>,
    }
    RawTaint { key: String }
    RawNodeStatus { addresses: Vec<RawNodeAddress> }
    RawNodeAddress {
        #[serde(rename = "type")]
        address_type: String,
        address: String,
    }

    RawPod { metadata: RawMetadata, spec: RawPodSpec, status: RawPodStatus }
    RawPodSpec { node_name: String, host_network: bool }
    RawPodStatus {
        #[serde(rename = "podIP")]
        pod_ip: String,
        #[serde(rename = "podIPs")]
        pod_ips: Vec<RawPodIp>,
    }
    RawPodIp { ip: String }

    RawServiceCidr { metadata: RawMetadata, spec: RawServiceCidrSpec }
    RawServiceCidrSpec { cidrs: Vec<String> }
}

impl RawMetadata {
    /// Returns true if kube-proxy does not watch objects of this kind with these labels.
    pub(super) fn is_excluded<K: Kind>(&self) -> bool {
        self.labels.as_ref().is_some_and(K::is_excluded)
    }

    /// Returns the name as it is written.
    pub(in crate::watch) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|name| !name.is_empty())
    }

    /// Returns the namespace as it is written.
    pub(in crate::watch) fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref().filter(|namespace| !namespace.is_empty())
    }

    /// Returns namespace and name for the log. They may be invalid, so that characters without a
    /// glyph are escaped.
    pub(in crate::watch) fn written_name(&self) -> Option<String> {
        let name = self.name()?.escape_debug();
        Some(match self.namespace() {
            Some(namespace) => format!("{}/{name}", namespace.escape_debug()),
            None => name.to_string(),
        })
    }
}
