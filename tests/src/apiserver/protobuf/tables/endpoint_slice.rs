//! The messages of an `EndpointSlice`.

use super::{
    super::table::{
        API_VERSION, KIND, Table,
        Type::{Flag, Message, Number, Text},
        map, optional, repeated, required,
    },
    meta::OBJECT_META,
};

pub(super) const ENDPOINT_SLICE: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(OBJECT_META)),
    repeated(2, "endpoints", Message(ENDPOINT)),
    repeated(3, "ports", Message(PORT)),
    required(4, "addressType", Text),
];

const ENDPOINT: Table = &[
    repeated(1, "addresses", Text),
    required(2, "conditions", Message(CONDITIONS)),
    optional(3, "hostname", Text),
    optional(4, "targetRef", Message(OBJECT_REFERENCE)),
    map(5, "deprecatedTopology", Text),
    optional(6, "nodeName", Text),
    optional(7, "zone", Text),
    optional(8, "hints", Message(HINTS)),
];

const CONDITIONS: Table =
    &[optional(1, "ready", Flag), optional(2, "serving", Flag), optional(3, "terminating", Flag)];

const OBJECT_REFERENCE: Table = &[
    required(1, "kind", Text),
    required(2, "namespace", Text),
    required(3, "name", Text),
    required(4, "uid", Text),
    required(5, "apiVersion", Text),
    required(6, "resourceVersion", Text),
    required(7, "fieldPath", Text),
];

const HINTS: Table = &[repeated(1, "forZones", Message(NAMED)), repeated(2, "forNodes", Message(NAMED))];

/// `ForZone` and `ForNode`.
const NAMED: Table = &[required(1, "name", Text)];

const PORT: Table = &[
    optional(1, "name", Text),
    optional(2, "protocol", Text),
    optional(3, "port", Number),
    optional(4, "appProtocol", Text),
];
