//! The messages of `k8s.io/apimachinery/pkg/apis/meta/v1` that objects and answers have.

use super::super::table::{
    API_VERSION, KIND, Table,
    Type::{Flag, Message, Number, RawJson, Text, Time},
    map, optional, repeated, required,
};

pub(super) const OBJECT_META: Table = &[
    required(1, "name", Text),
    required(2, "generateName", Text),
    required(3, "namespace", Text),
    required(4, "selfLink", Text),
    required(5, "uid", Text),
    required(6, "resourceVersion", Text),
    required(7, "generation", Number),
    required(8, "creationTimestamp", Time),
    optional(9, "deletionTimestamp", Time),
    optional(10, "deletionGracePeriodSeconds", Number),
    map(11, "labels", Text),
    map(12, "annotations", Text),
    repeated(13, "ownerReferences", Message(OWNER_REFERENCE)),
    repeated(14, "finalizers", Text),
    repeated(17, "managedFields", Message(MANAGED_FIELDS_ENTRY)),
];

const OWNER_REFERENCE: Table = &[
    required(1, "kind", Text),
    required(3, "name", Text),
    required(4, "uid", Text),
    required(5, "apiVersion", Text),
    optional(6, "controller", Flag),
    optional(7, "blockOwnerDeletion", Flag),
];

const MANAGED_FIELDS_ENTRY: Table = &[
    required(1, "manager", Text),
    required(2, "operation", Text),
    required(3, "apiVersion", Text),
    optional(4, "time", Time),
    required(6, "fieldsType", Text),
    optional(7, "fieldsV1", RawJson),
    required(8, "subresource", Text),
];

pub(super) const CONDITION: Table = &[
    required(1, "type", Text),
    required(2, "status", Text),
    required(3, "observedGeneration", Number),
    required(4, "lastTransitionTime", Time),
    required(5, "reason", Text),
    required(6, "message", Text),
];

/// Without `shardInfo`, because the server has no sharded lists.
pub(in super::super) const LIST_META: Table = &[
    required(1, "selfLink", Text),
    required(2, "resourceVersion", Text),
    required(3, "continue", Text),
    optional(4, "remainingItemCount", Number),
];

pub(super) const STATUS: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(LIST_META)),
    required(2, "status", Text),
    required(3, "message", Text),
    required(4, "reason", Text),
    optional(5, "details", Message(STATUS_DETAILS)),
    required(6, "code", Number),
];

const STATUS_DETAILS: Table = &[
    required(1, "name", Text),
    required(2, "group", Text),
    required(3, "kind", Text),
    repeated(4, "causes", Message(STATUS_CAUSE)),
    required(5, "retryAfterSeconds", Number),
    required(6, "uid", Text),
];

const STATUS_CAUSE: Table =
    &[required(1, "reason", Text), required(2, "message", Text), required(3, "field", Text)];
