//! The fields of Kubernetes objects that are decoded, from JSON, YAML or protobuf.

use prost::Message;
use serde::{Deserialize, Deserializer};

pub(in crate::watch) use super::metadata::RawMetadata;

/// Defines structs of fields with camelCase names, and with the numbers that they have in protobuf
/// (`generated.proto` of each API group). All fields may be absent: `null` and an absent field mean
/// the same to the API server. In protobuf it writes most fields even if they are empty. So code
/// that reads a field must take empty text and 0 for an absent field too. Numbers are wider than
/// the API's, so that a number out of range is reported as such.
macro_rules! raw {
    ($($(#[$attribute:meta])* $name:ident {
        $($(#[$rename:meta])* $field:ident: $shape:ident<$type:ty> = $encoding:ident $label:ident $tag:tt),* $(,)?
    })*) => {$(
        $(#[$attribute])*
        #[derive(Deserialize, Message)]
        #[serde(rename_all = "camelCase", default)]
        pub(in crate::watch) struct $name {
            $(
                $(#[$rename])*
                #[serde(deserialize_with = "null_is_absent")]
                #[prost($encoding, $label, tag = $tag)]
                pub(in crate::watch) $field: $shape<$type>,
            )*
        }
    )*};
}

raw! {
    /// Any object, of which only the metadata is decoded.
    RawObject { metadata: Option<RawMetadata> = message optional "1" }

    RawService {
        metadata: Option<RawMetadata> = message optional "1",
        spec: Option<RawServiceSpec> = message optional "2",
        status: Option<RawServiceStatus> = message optional "3",
    }
    RawServiceSpec {
        #[serde(rename = "type")]
        service_type: Option<String> = string optional "4",
        #[serde(rename = "clusterIP")]
        cluster_ip: Option<String> = string optional "3",
        #[serde(rename = "clusterIPs")]
        cluster_ips: Vec<String> = string repeated "18",
        #[serde(rename = "externalIPs")]
        external_ips: Vec<String> = string repeated "5",
        load_balancer_source_ranges: Vec<String> = string repeated "9",
        ports: Vec<RawServicePort> = message repeated "1",
        session_affinity: Option<String> = string optional "7",
        session_affinity_config: Option<RawSessionAffinityConfig> = message optional "14",
        internal_traffic_policy: Option<String> = string optional "22",
        external_traffic_policy: Option<String> = string optional "11",
        health_check_node_port: Option<i64> = int64 optional "12",
    }
    RawServicePort {
        name: Option<String> = string optional "1",
        protocol: Option<String> = string optional "2",
        port: Option<i64> = int64 optional "3",
        node_port: Option<i64> = int64 optional "5",
    }
    RawSessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: Option<RawClientIpConfig> = message optional "1",
    }
    RawClientIpConfig { timeout_seconds: Option<i64> = int64 optional "1" }
    RawServiceStatus { load_balancer: Option<RawLoadBalancerStatus> = message optional "1" }
    RawLoadBalancerStatus { ingress: Vec<RawLoadBalancerIngress> = message repeated "1" }
    RawLoadBalancerIngress {
        ip: Option<String> = string optional "1",
        ip_mode: Option<String> = string optional "3",
    }

    RawEndpointSlice {
        metadata: Option<RawMetadata> = message optional "1",
        address_type: Option<String> = string optional "4",
        endpoints: Vec<RawEndpoint> = message repeated "2",
        ports: Vec<RawEndpointPort> = message repeated "3",
    }
    RawEndpoint {
        addresses: Vec<String> = string repeated "1",
        conditions: Option<RawEndpointConditions> = message optional "2",
        node_name: Option<String> = string optional "6",
        hints: Option<RawEndpointHints> = message optional "8",
        target_ref: Option<RawTargetRef> = message optional "4",
    }
    RawEndpointConditions {
        ready: Option<bool> = bool optional "1",
        serving: Option<bool> = bool optional "2",
        terminating: Option<bool> = bool optional "3",
    }
    RawEndpointHints {
        for_zones: Vec<RawHint> = message repeated "1",
        for_nodes: Vec<RawHint> = message repeated "2",
    }
    RawHint { name: Option<String> = string optional "1" }
    RawTargetRef {
        kind: Option<String> = string optional "1",
        namespace: Option<String> = string optional "2",
        name: Option<String> = string optional "3",
    }
    RawEndpointPort {
        name: Option<String> = string optional "1",
        protocol: Option<String> = string optional "2",
        port: Option<i64> = int64 optional "3",
    }

    RawNode {
        metadata: Option<RawMetadata> = message optional "1",
        spec: Option<RawNodeSpec> = message optional "2",
        status: Option<RawNodeStatus> = message optional "3",
    }
    RawNodeSpec {
        #[serde(rename = "podCIDR")]
        pod_cidr: Option<String> = string optional "1",
        #[serde(rename = "podCIDRs")]
        pod_cidrs: Vec<String> = string repeated "7",
        taints: Vec<RawTaint> = message repeated "5",
    }
    RawTaint { key: Option<String> = string optional "1" }
    RawNodeStatus { addresses: Vec<RawNodeAddress> = message repeated "5" }
    RawNodeAddress {
        #[serde(rename = "type")]
        address_type: Option<String> = string optional "1",
        address: Option<String> = string optional "2",
    }

    RawPod {
        metadata: Option<RawMetadata> = message optional "1",
        spec: Option<RawPodSpec> = message optional "2",
        status: Option<RawPodStatus> = message optional "3",
    }
    RawPodSpec {
        node_name: Option<String> = string optional "10",
        host_network: Option<bool> = bool optional "11",
    }
    RawPodStatus {
        #[serde(rename = "podIP")]
        pod_ip: Option<String> = string optional "6",
        #[serde(rename = "podIPs")]
        pod_ips: Vec<RawPodIp> = message repeated "12",
    }
    RawPodIp { ip: Option<String> = string optional "1" }

    RawServiceCidr {
        metadata: Option<RawMetadata> = message optional "1",
        spec: Option<RawServiceCidrSpec> = message optional "2",
    }
    RawServiceCidrSpec { cidrs: Vec<String> = string repeated "1" }
}

/// Decodes a field of JSON or YAML; `null` as if the field were absent.
fn null_is_absent<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}
