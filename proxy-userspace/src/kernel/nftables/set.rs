//! Sets and maps: their types, and the user data from which nft shows them readably.

use std::time::Duration;

use libc::{NFT_DATA_VERDICT, NFT_META_L4PROTO, NFT_SET_EVAL, NFT_SET_MAP, NFT_SET_TIMEOUT, c_int};

use super::{IpFamily, element::FieldType, statement::Name, uapi::*};
use crate::kernel::netlink::{Attributes, MessageBuffer};

/// A set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The name.
    pub name: Name,
    /// The fields of a key.
    pub key: &'static [FieldType],
    /// What the set has for a key.
    pub kind: SetKind,
    /// The comment; may be empty.
    pub comment: &'static str,
}

/// The kind of a set or map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetKind {
    /// A plain set.
    Plain,
    /// A set to which rules add elements. It has a timeout for each element, and a maximum size.
    Dynamic(Duration, u32),
    /// A map to verdicts.
    VerdictMap,
    /// A map to these fields.
    DataMap(&'static [FieldType]),
}

/// The properties that a set keeps for its lifetime. To change one, the set must be deleted and
/// added again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetSpec {
    pub(super) flags: c_int,
    key_type: u32,
    key_length: u32,
    /// 0 for a plain set.
    data_type: u32,
    /// In milliseconds; 0 for none.
    timeout: u64,
}

impl SetSpec {
    pub(super) fn read(set: Attributes<'_>) -> Self {
        let number = |kind| set.be32(kind).unwrap_or(0);
        Self {
            flags: set.be_int(NFTA_SET_FLAGS).unwrap_or(0),
            key_type: number(NFTA_SET_KEY_TYPE),
            key_length: number(NFTA_SET_KEY_LEN),
            data_type: number(NFTA_SET_DATA_TYPE),
            timeout: set.be64(NFTA_SET_TIMEOUT).unwrap_or(0),
        }
    }
}

impl Set {
    /// Returns the properties that the set keeps for its lifetime.
    pub fn spec(&self, family: IpFamily) -> SetSpec {
        let (flags, data_type, timeout) = match self.kind {
            SetKind::Plain => (0, 0, Duration::ZERO),
            SetKind::Dynamic(timeout, _) => (NFT_SET_TIMEOUT | NFT_SET_EVAL, 0, timeout),
            SetKind::VerdictMap => (NFT_SET_MAP, NFT_DATA_VERDICT, Duration::ZERO),
            SetKind::DataMap(fields) => (NFT_SET_MAP, concatenated_type(fields, family), Duration::ZERO),
        };
        SetSpec {
            flags,
            key_type: concatenated_type(self.key, family),
            key_length: length(self.key, family),
            data_type,
            timeout: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Writes the attributes, without the table's name. `id` identifies the set within the
    /// transaction.
    pub(super) fn write(&self, family: IpFamily, id: u32, to: &mut MessageBuffer) {
        let spec = self.spec(family);
        to.string(NFTA_SET_NAME, &self.name);
        to.be_int(NFTA_SET_FLAGS, spec.flags);
        to.be32(NFTA_SET_KEY_TYPE, spec.key_type);
        to.be32(NFTA_SET_KEY_LEN, spec.key_length);
        if spec.data_type != 0 {
            to.be32(NFTA_SET_DATA_TYPE, spec.data_type);
        }
        if let SetKind::DataMap(fields) = self.kind {
            to.be32(NFTA_SET_DATA_LEN, length(fields, family));
        }
        to.be32(NFTA_SET_ID, id);
        if let SetKind::Dynamic(_, size) = self.kind {
            to.nested(NFTA_SET_DESC, |to| to.be32(NFTA_SET_DESC_SIZE, size));
            to.be64(NFTA_SET_TIMEOUT, spec.timeout);
        }
        to.bytes(NFTA_SET_USERDATA, &self.user_data(family));
    }

    /// Returns the user data, which only nft reads (`enum nftnl_udata_set_types` of libnftnl). It
    /// has the types that have no number, and the comment.
    fn user_data(&self, family: IpFamily) -> Vec<u8> {
        const KEY_BYTE_ORDER: u8 = 0;
        const DATA_BYTE_ORDER: u8 = 1;
        const KEY_TYPEOF: u8 = 3;
        const DATA_TYPEOF: u8 = 4;
        const COMMENT: u8 = 7;
        let mut data = Vec::new();
        push_user_data(&mut data, KEY_BYTE_ORDER, &byte_order(self.key).to_ne_bytes());
        match self.kind {
            SetKind::DataMap(fields) => {
                push_user_data(&mut data, DATA_BYTE_ORDER, &byte_order(fields).to_ne_bytes());
                if self.has_typeof() {
                    push_user_data(&mut data, KEY_TYPEOF, &type_of(self.key, family));
                    push_user_data(&mut data, DATA_TYPEOF, &type_of(fields, family));
                }
            }
            SetKind::VerdictMap => push_user_data(&mut data, DATA_BYTE_ORDER, &0_u32.to_ne_bytes()),
            SetKind::Plain | SetKind::Dynamic(..) => {}
        }
        if !self.comment.is_empty() {
            push_user_data(&mut data, COMMENT, &[self.comment.as_bytes(), &[0]].concat());
        }
        data
    }

    /// nft has no type name for numbers, so that such a set is declared with `typeof`.
    fn has_typeof(&self) -> bool {
        self.key.contains(&FieldType::Number)
    }

    /// Returns the definition in nft's syntax.
    pub(super) fn display(&self, family: IpFamily) -> String {
        let types = |fields: &[FieldType]| {
            let names = if self.has_typeof() { expression_name } else { type_name };
            fields.iter().map(|field| names(*field, family)).collect::<Vec<_>>().join(" . ")
        };
        let keyword = if self.has_typeof() { "typeof" } else { "type" };
        let key = types(self.key);
        let rest = match self.kind {
            SetKind::Plain => String::new(),
            SetKind::Dynamic(timeout, size) => {
                format!("; size {size}; flags dynamic,timeout; timeout {}s", timeout.as_secs())
            }
            SetKind::VerdictMap => " : verdict".into(),
            SetKind::DataMap(fields) => format!(" : {}", types(fields)),
        };
        let comment =
            if self.comment.is_empty() { String::new() } else { format!("; comment \"{}\"", self.comment) };
        format!("{{ {keyword} {key}{rest}{comment}; }}")
    }

    /// Returns `map` or `set`.
    pub(super) const fn keyword(&self) -> &'static str {
        match self.kind {
            SetKind::Plain | SetKind::Dynamic(..) => "set",
            SetKind::VerdictMap | SetKind::DataMap(_) => "map",
        }
    }
}

fn length(fields: &[FieldType], family: IpFamily) -> u32 {
    fields.iter().map(|field| field.length(family)).sum()
}

/// Returns nft's type (`enum datatypes`). A concatenation has six bits for each field.
///
/// A number is a `mark` (19), four bytes in the byte order of the host. The type `integer` (4) has
/// no length: nft before 1.0.6 does not read the user data for elements, and ends with a failed
/// assertion when it sorts keys with such a field.
fn concatenated_type(fields: &[FieldType], family: IpFamily) -> u32 {
    fields.iter().fold(0, |concatenation, field| {
        let field = match (field, family) {
            (FieldType::Number, _) => 19,
            (FieldType::Address, IpFamily::V4) => 7,
            (FieldType::Address, IpFamily::V6) => 8,
            (FieldType::Protocol, _) => 12,
            (FieldType::Port, _) => 13,
        };
        concatenation << 6 | field
    })
}

/// Returns nft's byte order: 0 (`BYTEORDER_INVALID`) for concatenations, or 2
/// (`BYTEORDER_BIG_ENDIAN`).
fn byte_order(fields: &[FieldType]) -> u32 {
    match fields {
        [FieldType::Address | FieldType::Port] => 2,
        _ => 0,
    }
}

fn type_name(field: FieldType, family: IpFamily) -> &'static str {
    match (field, family) {
        (FieldType::Address, IpFamily::V4) => "ipv4_addr",
        (FieldType::Address, IpFamily::V6) => "ipv6_addr",
        (FieldType::Protocol, _) => "inet_proto",
        (FieldType::Port, _) => "inet_service",
        (FieldType::Number, _) => "integer",
    }
}

fn expression_name(field: FieldType, family: IpFamily) -> &'static str {
    match (field, family) {
        (FieldType::Address, IpFamily::V4) => "ip daddr",
        (FieldType::Address, IpFamily::V6) => "ip6 daddr",
        (FieldType::Protocol, _) => "meta l4proto",
        (FieldType::Port, _) => "th dport",
        (FieldType::Number, _) => "numgen random mod 2",
    }
}

/// Appends a part of user data: type, length and value.
pub(super) fn push_user_data(to: &mut Vec<u8>, kind: u8, value: &[u8]) {
    to.push(kind);
    to.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
    to.extend_from_slice(value);
}

/// Returns a `typeof` declaration in nft's encoding. Expressions have the numbers of nft's
/// `enum expr_types`.
fn type_of(fields: &[FieldType], family: IpFamily) -> Vec<u8> {
    const CONCATENATION: u32 = 13;
    let mut parts = Vec::new();
    for (index, field) in (0..).zip(fields) {
        push_user_data(&mut parts, index, &type_of_field(*field, family));
    }
    type_of_expression(CONCATENATION, &parts)
}

fn type_of_field(field: FieldType, family: IpFamily) -> Vec<u8> {
    const PAYLOAD: u32 = 7;
    const META: u32 = 9;
    const NUMGEN: u32 = 23;
    let (expression, operands): (_, &[u32]) = match (field, family) {
        // The operands are the numbers of the protocol and of the field in nft's tables.
        (FieldType::Address, IpFamily::V4) => (PAYLOAD, &[12, 12]),
        (FieldType::Address, IpFamily::V6) => (PAYLOAD, &[13, 9]),
        (FieldType::Port, _) => (PAYLOAD, &[11, 2]),
        (FieldType::Protocol, _) => (META, &[NFT_META_L4PROTO.cast_unsigned()]),
        // NFT_NG_RANDOM, modulus 2, offset 0.
        (FieldType::Number, _) => (NUMGEN, &[1, 2, 0]),
    };
    let mut data = Vec::new();
    for (index, operand) in (0..).zip(operands) {
        push_user_data(&mut data, index, &operand.to_ne_bytes());
    }
    type_of_expression(expression, &data)
}

fn type_of_expression(expression: u32, data: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    push_user_data(&mut encoded, 0, &expression.to_ne_bytes());
    push_user_data(&mut encoded, 1, data);
    encoded
}
