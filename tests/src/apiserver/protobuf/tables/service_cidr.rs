//! The messages of a `ServiceCIDR`.

use super::{
    super::table::{
        API_VERSION, KIND, Table,
        Type::{Message, Text},
        repeated, required,
    },
    meta::{CONDITION, OBJECT_META},
};

pub(super) const SERVICE_CIDR: Table = &[
    KIND,
    API_VERSION,
    required(1, "metadata", Message(OBJECT_META)),
    required(2, "spec", Message(SPEC)),
    required(3, "status", Message(STATUS)),
];

const SPEC: Table = &[repeated(1, "cidrs", Text)];

const STATUS: Table = &[repeated(1, "conditions", Message(CONDITION))];
