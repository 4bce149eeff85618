//! The messages of a Namespace, and what the server has of a Pod.

use super::{
    super::table::{
        API_VERSION, KIND, Table,
        Type::{Message, Text, Time},
        repeated, required,
    },
    meta::OBJECT_META,
};

pub(super) const NAMESPACE: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(OBJECT_META)),
    required(2, "spec", Message(SPEC)),
    required(3, "status", Message(STATUS)),
];

const SPEC: Table = &[repeated(1, "finalizers", Text)];

const STATUS: Table = &[required(1, "phase", Text), repeated(2, "conditions", Message(CONDITION))];

const CONDITION: Table = &[
    required(1, "type", Text),
    required(2, "status", Text),
    required(4, "lastTransitionTime", Time),
    required(5, "reason", Text),
    required(6, "message", Text),
];

/// Only metadata, for empty lists and bookmarks: no test stores Pods with a `spec`.
pub(super) const POD: Table = &[KIND, API_VERSION, required(1, "metadata", Message(OBJECT_META))];
