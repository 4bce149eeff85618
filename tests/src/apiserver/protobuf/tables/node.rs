//! The messages of a Node.

use super::{
    super::table::{
        API_VERSION, KIND, Table,
        Type::{Flag, Message, Number, Quantity, Text, Time},
        map, optional, repeated, required,
    },
    meta::OBJECT_META,
};

pub(super) const NODE: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(OBJECT_META)),
    required(2, "spec", Message(SPEC)),
    required(3, "status", Message(STATUS)),
];

/// Without `configSource` and `podPreemptionPolicy`, which no test uses.
const SPEC: Table = &[
    required(1, "podCIDR", Text),
    required(2, "externalID", Text),
    required(3, "providerID", Text),
    required(4, "unschedulable", Flag),
    repeated(5, "taints", Message(TAINT)),
    repeated(7, "podCIDRs", Text),
];

const TAINT: Table = &[
    required(1, "key", Text),
    required(2, "value", Text),
    required(3, "effect", Text),
    optional(4, "timeAdded", Time),
];

/// Without `config`, which no test uses.
const STATUS: Table = &[
    map(1, "capacity", Quantity),
    map(2, "allocatable", Quantity),
    required(3, "phase", Text),
    repeated(4, "conditions", Message(CONDITION)),
    repeated(5, "addresses", Message(ADDRESS)),
    required(6, "daemonEndpoints", Message(DAEMON_ENDPOINTS)),
    required(7, "nodeInfo", Message(SYSTEM_INFO)),
    repeated(8, "images", Message(CONTAINER_IMAGE)),
    repeated(9, "volumesInUse", Text),
    repeated(10, "volumesAttached", Message(ATTACHED_VOLUME)),
    repeated(12, "runtimeHandlers", Message(RUNTIME_HANDLER)),
    optional(13, "features", Message(FEATURES)),
    repeated(14, "declaredFeatures", Text),
];

const CONDITION: Table = &[
    required(1, "type", Text),
    required(2, "status", Text),
    required(3, "lastHeartbeatTime", Time),
    required(4, "lastTransitionTime", Time),
    required(5, "reason", Text),
    required(6, "message", Text),
];

const ADDRESS: Table = &[required(1, "type", Text), required(2, "address", Text)];

const DAEMON_ENDPOINTS: Table = &[required(1, "kubeletEndpoint", Message(DAEMON_ENDPOINT))];

/// The name begins with a capital letter in JSON too.
const DAEMON_ENDPOINT: Table = &[required(1, "Port", Number)];

const SYSTEM_INFO: Table = &[
    required(1, "machineID", Text),
    required(2, "systemUUID", Text),
    required(3, "bootID", Text),
    required(4, "kernelVersion", Text),
    required(5, "osImage", Text),
    required(6, "containerRuntimeVersion", Text),
    required(7, "kubeletVersion", Text),
    required(8, "kubeProxyVersion", Text),
    required(9, "operatingSystem", Text),
    required(10, "architecture", Text),
    optional(11, "swap", Message(SWAP)),
];

const SWAP: Table = &[optional(1, "capacity", Number)];

const CONTAINER_IMAGE: Table = &[repeated(1, "names", Text), required(2, "sizeBytes", Number)];

const ATTACHED_VOLUME: Table = &[required(1, "name", Text), required(2, "devicePath", Text)];

const RUNTIME_HANDLER: Table =
    &[required(1, "name", Text), optional(2, "features", Message(RUNTIME_HANDLER_FEATURES))];

const RUNTIME_HANDLER_FEATURES: Table =
    &[optional(1, "recursiveReadOnlyMounts", Flag), optional(2, "userNamespaces", Flag)];

const FEATURES: Table = &[optional(1, "supplementalGroupsPolicy", Flag)];
