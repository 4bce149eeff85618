//! The messages of a Service.

use super::{
    super::table::{
        API_VERSION, KIND, Table,
        Type::{Flag, IntOrString, Message, Number, Text},
        map, optional, repeated, required,
    },
    meta::{CONDITION, OBJECT_META},
};

pub(super) const SERVICE: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(OBJECT_META)),
    required(2, "spec", Message(SPEC)),
    required(3, "status", Message(STATUS)),
];

const SPEC: Table = &[
    repeated(1, "ports", Message(PORT)),
    map(2, "selector", Text),
    required(3, "clusterIP", Text),
    required(4, "type", Text),
    repeated(5, "externalIPs", Text),
    required(7, "sessionAffinity", Text),
    required(8, "loadBalancerIP", Text),
    repeated(9, "loadBalancerSourceRanges", Text),
    required(10, "externalName", Text),
    required(11, "externalTrafficPolicy", Text),
    required(12, "healthCheckNodePort", Number),
    required(13, "publishNotReadyAddresses", Flag),
    optional(14, "sessionAffinityConfig", Message(SESSION_AFFINITY_CONFIG)),
    optional(17, "ipFamilyPolicy", Text),
    repeated(18, "clusterIPs", Text),
    repeated(19, "ipFamilies", Text),
    optional(20, "allocateLoadBalancerNodePorts", Flag),
    optional(21, "loadBalancerClass", Text),
    optional(22, "internalTrafficPolicy", Text),
    optional(23, "trafficDistribution", Text),
];

const PORT: Table = &[
    required(1, "name", Text),
    required(2, "protocol", Text),
    required(3, "port", Number),
    required(4, "targetPort", IntOrString),
    required(5, "nodePort", Number),
    optional(6, "appProtocol", Text),
];

const SESSION_AFFINITY_CONFIG: Table = &[optional(1, "clientIP", Message(CLIENT_IP_CONFIG))];

const CLIENT_IP_CONFIG: Table = &[optional(1, "timeoutSeconds", Number)];

const STATUS: Table = &[
    required(1, "loadBalancer", Message(LOAD_BALANCER_STATUS)),
    repeated(2, "conditions", Message(CONDITION)),
];

const LOAD_BALANCER_STATUS: Table = &[repeated(1, "ingress", Message(LOAD_BALANCER_INGRESS))];

const LOAD_BALANCER_INGRESS: Table = &[
    required(1, "ip", Text),
    required(2, "hostname", Text),
    optional(3, "ipMode", Text),
    repeated(4, "ports", Message(PORT_STATUS)),
];

const PORT_STATUS: Table =
    &[required(1, "port", Number), required(2, "protocol", Text), optional(3, "error", Text)];
