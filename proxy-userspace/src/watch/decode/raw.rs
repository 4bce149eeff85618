//! The fields of Kubernetes objects that are decoded, from JSON, YAML or protobuf.

use serde::{Deserialize, Deserializer};

use super::message::{MostlyOne, Text, message};
pub(in crate::watch) use super::metadata::RawMetadata;

/// Defines structs of fields with camelCase names, and with the numbers that they have in protobuf
/// (`generated.proto` of each API group). All fields may be absent: `null` and an absent field mean
/// the same to the API server. In protobuf it writes most fields even if they are empty. So code
/// that reads a field must take empty text and 0 for an absent field too. Numbers are wider than
/// the API's, so that a number out of range is reported as such.
macro_rules! raw {
    ($($(#[$attribute:meta])* $name:ident $(<$life:lifetime>)? {
        $($(#[$rename:meta])* $field:ident: $shape:ident<$type:ty> = $tag:literal),* $(,)?
    })*) => {$(
        $(#[$attribute])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub(in crate::watch) struct $name $(<$life>)? {
            $(
                $(#[$rename])*
                #[serde(deserialize_with = "null_is_absent")]
                pub(in crate::watch) $field: $shape<$type>,
            )*
        }
        message!($name $(<$life>)? { $($field = $tag),* });
    )*};
}

raw! {
    /// Any object, of which only the metadata is decoded.
    RawObject<'a> { metadata: Option<RawMetadata<'a>> = 1 }

    RawService<'a> {
        metadata: Option<RawMetadata<'a>> = 1,
        spec: Option<RawServiceSpec<'a>> = 2,
        status: Option<RawServiceStatus<'a>> = 3,
    }
    RawServiceSpec<'a> {
        #[serde(rename = "type")]
        service_type: Option<Text<'a>> = 4,
        #[serde(rename = "clusterIP")]
        cluster_ip: Option<Text<'a>> = 3,
        #[serde(rename = "clusterIPs")]
        cluster_ips: MostlyOne<Text<'a>> = 18,
        #[serde(rename = "externalIPs")]
        external_ips: Vec<Text<'a>> = 5,
        load_balancer_source_ranges: Vec<Text<'a>> = 9,
        ports: MostlyOne<RawServicePort<'a>> = 1,
        session_affinity: Option<Text<'a>> = 7,
        session_affinity_config: Option<RawSessionAffinityConfig> = 14,
        internal_traffic_policy: Option<Text<'a>> = 22,
        external_traffic_policy: Option<Text<'a>> = 11,
        health_check_node_port: Option<i64> = 12,
    }
    RawServicePort<'a> {
        name: Option<Text<'a>> = 1,
        protocol: Option<Text<'a>> = 2,
        port: Option<i64> = 3,
        node_port: Option<i64> = 5,
    }
    RawSessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: Option<RawClientIpConfig> = 1,
    }
    RawClientIpConfig { timeout_seconds: Option<i64> = 1 }
    RawServiceStatus<'a> { load_balancer: Option<RawLoadBalancerStatus<'a>> = 1 }
    RawLoadBalancerStatus<'a> { ingress: Vec<RawLoadBalancerIngress<'a>> = 1 }
    RawLoadBalancerIngress<'a> {
        ip: Option<Text<'a>> = 1,
        ip_mode: Option<Text<'a>> = 3,
    }

    RawEndpointSlice<'a> {
        metadata: Option<RawMetadata<'a>> = 1,
        address_type: Option<Text<'a>> = 4,
        endpoints: Vec<RawEndpoint<'a>> = 2,
        ports: MostlyOne<RawEndpointPort<'a>> = 3,
    }
    RawEndpoint<'a> {
        addresses: MostlyOne<Text<'a>> = 1,
        conditions: Option<RawEndpointConditions> = 2,
        node_name: Option<Text<'a>> = 6,
        hints: Option<RawEndpointHints<'a>> = 8,
        target_ref: Option<RawTargetRef<'a>> = 4,
    }
    RawEndpointConditions {
        ready: Option<bool> = 1,
        serving: Option<bool> = 2,
        terminating: Option<bool> = 3,
    }
    RawEndpointHints<'a> {
        for_zones: Vec<RawHint<'a>> = 1,
        for_nodes: Vec<RawHint<'a>> = 2,
    }
    RawHint<'a> { name: Option<Text<'a>> = 1 }
    RawTargetRef<'a> {
        kind: Option<Text<'a>> = 1,
        namespace: Option<Text<'a>> = 2,
        name: Option<Text<'a>> = 3,
    }
    RawEndpointPort<'a> {
        name: Option<Text<'a>> = 1,
        protocol: Option<Text<'a>> = 2,
        port: Option<i64> = 3,
    }

    RawNode<'a> {
        metadata: Option<RawMetadata<'a>> = 1,
        spec: Option<RawNodeSpec<'a>> = 2,
        status: Option<RawNodeStatus<'a>> = 3,
    }
    RawNodeSpec<'a> {
        #[serde(rename = "podCIDR")]
        pod_cidr: Option<Text<'a>> = 1,
        #[serde(rename = "podCIDRs")]
        pod_cidrs: Vec<Text<'a>> = 7,
        taints: Vec<RawTaint<'a>> = 5,
    }
    RawTaint<'a> { key: Option<Text<'a>> = 1 }
    RawNodeStatus<'a> { addresses: Vec<RawNodeAddress<'a>> = 5 }
    RawNodeAddress<'a> {
        #[serde(rename = "type")]
        address_type: Option<Text<'a>> = 1,
        address: Option<Text<'a>> = 2,
    }

    RawPod<'a> {
        metadata: Option<RawMetadata<'a>> = 1,
        spec: Option<RawPodSpec<'a>> = 2,
        status: Option<RawPodStatus<'a>> = 3,
    }
    RawPodSpec<'a> {
        node_name: Option<Text<'a>> = 10,
        host_network: Option<bool> = 11,
    }
    RawPodStatus<'a> {
        #[serde(rename = "podIP")]
        pod_ip: Option<Text<'a>> = 6,
        #[serde(rename = "podIPs")]
        pod_ips: Vec<RawPodIp<'a>> = 12,
    }
    RawPodIp<'a> { ip: Option<Text<'a>> = 1 }

    RawServiceCidr<'a> {
        metadata: Option<RawMetadata<'a>> = 1,
        spec: Option<RawServiceCidrSpec<'a>> = 2,
    }
    RawServiceCidrSpec<'a> { cidrs: Vec<Text<'a>> = 1 }
}

/// Decodes a field of JSON or YAML; `null` as if the field were absent.
fn null_is_absent<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}
