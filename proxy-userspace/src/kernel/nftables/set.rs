//! Sets and maps: what their keys are made of and what they hold, and how nft is told, so that it lists them readably.

use std::{fmt, time::Duration};

use super::{Family, attributes::Attributes, element::FieldKind, statement::Name};

/// `NFT_SET_MAP`, `NFT_SET_TIMEOUT` and `NFT_SET_EVAL`.
const MAP: u32 = 8;
const TIMEOUT: u32 = 16;
const DYNAMIC: u32 = 32;
/// `NFT_DATA_VERDICT`.
const VERDICT_TYPE: u32 = 0xffff_ff00;

/// A set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: Name,
    /// What its keys are made of.
    pub key: &'static [FieldKind],
    /// What it has for them.
    pub holds: Holds,
    /// What people read of it.
    pub comment: &'static str,
}

/// What a set or map has for its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Nothing: a set.
    Members,
    /// Nothing; packets add members, which go after this time, and there are at most so many.
    MembersFor(Duration, u32),
    /// What becomes of the packet.
    Verdicts,
    /// Something else.
    Data(&'static [FieldKind]),
}

/// What of a set cannot be changed any more once it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub(super) flags: u32,
    pub(super) key_type: u32,
    pub(super) key_length: u32,
    /// 0 where it is no map.
    pub(super) data_type: u32,
    /// In milliseconds; 0 for none.
    pub(super) timeout: u64,
}

impl Set {
    /// What of it cannot be changed.
    pub fn shape(&self, family: Family) -> Shape {
        let length: usize = self.key.iter().map(|kind| kind.length(family)).sum();
        Shape {
            flags: match self.holds {
                Holds::Members => 0,
                Holds::MembersFor(..) => TIMEOUT | DYNAMIC,
                Holds::Verdicts | Holds::Data(_) => MAP,
            },
            key_type: data_type(self.key, family),
            key_length: u32::try_from(length).unwrap_or(u32::MAX),
            data_type: match self.holds {
                Holds::Members | Holds::MembersFor(..) => 0,
                Holds::Verdicts => VERDICT_TYPE,
                Holds::Data(kinds) => data_type(kinds, family),
            },
            timeout: match self.holds {
                Holds::MembersFor(timeout, _) => u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                _ => 0,
            },
        }
    }

    /// The attributes (`NFTA_SET_*`) but for the table; `id` is its number in the transaction.
    pub(super) fn write(&self, family: Family, id: u32, to: &mut Attributes) {
        let shape = self.shape(family);
        to.text(2, &self.name);
        to.number(3, shape.flags);
        to.number(4, shape.key_type);
        to.number(5, shape.key_length);
        if shape.data_type != 0 {
            to.number(6, shape.data_type);
        }
        if let Holds::Data(kinds) = self.holds {
            let length: usize = kinds.iter().map(|kind| kind.length(family)).sum();
            to.number(7, u32::try_from(length).unwrap_or(u32::MAX));
        }
        to.number(10, id);
        if let Holds::MembersFor(_, size) = self.holds {
            to.nested(9, |to| to.number(1, size));
            to.number64(11, shape.timeout);
        }
        to.bytes(13, &self.user_data(family));
    }

    /// What only nft reads: types that have no number, and the comment (`enum nftnl_udata_set_types` of libnftnl).
    fn user_data(&self, family: Family) -> Vec<u8> {
        let mut data = Vec::new();
        tlv(&mut data, 0, &byte_order(self.key).to_ne_bytes());
        match self.holds {
            Holds::Data(kinds) => {
                tlv(&mut data, 1, &byte_order(kinds).to_ne_bytes());
                if self.key.contains(&FieldKind::Number) {
                    tlv(&mut data, 3, &type_of(self.key, family));
                    tlv(&mut data, 4, &type_of(kinds, family));
                }
            }
            Holds::Verdicts => tlv(&mut data, 1, &0_u32.to_ne_bytes()),
            Holds::Members | Holds::MembersFor(..) => {}
        }
        if !self.comment.is_empty() {
            tlv(&mut data, 7, &[self.comment.as_bytes(), &[0]].concat());
        }
        data
    }

    /// In the words of nft.
    pub(super) fn show(&self, family: Family) -> impl fmt::Display {
        let types = |kinds: &[FieldKind]| {
            let by_expression = self.key.contains(&FieldKind::Number);
            let words = kinds
                .iter()
                .map(|kind| if by_expression { expression(*kind, family) } else { word(*kind, family) });
            words.collect::<Vec<_>>().join(" . ")
        };
        let keyword = if self.key.contains(&FieldKind::Number) { "typeof" } else { "type" };
        let key = types(self.key);
        let rest = match self.holds {
            Holds::Members => String::new(),
            Holds::MembersFor(timeout, size) => {
                format!("; size {size}; flags dynamic,timeout; timeout {}s", timeout.as_secs())
            }
            Holds::Verdicts => " : verdict".into(),
            Holds::Data(kinds) => format!(" : {}", types(kinds)),
        };
        let comment =
            if self.comment.is_empty() { String::new() } else { format!("; comment \"{}\"", self.comment) };
        format!("{{ {keyword} {key}{rest}{comment}; }}")
    }

    /// `map` or `set`.
    pub(super) const fn word(&self) -> &'static str {
        match self.holds {
            Holds::Members | Holds::MembersFor(..) => "set",
            Holds::Verdicts | Holds::Data(_) => "map",
        }
    }
}

/// `enum datatypes` of nft; of concatenations six bits each.
fn data_type(kinds: &[FieldKind], family: Family) -> u32 {
    kinds.iter().fold(0, |all, kind| {
        all << 6
            | match (kind, family) {
                (FieldKind::Number, _) => 4,
                (FieldKind::Address, Family::Ip) => 7,
                (FieldKind::Address, Family::Ip6) => 8,
                (FieldKind::Protocol, _) => 12,
                (FieldKind::Port, _) => 13,
            }
    })
}

/// nft's: 0 for none, as of concatenations, and 2 for that of the network.
fn byte_order(kinds: &[FieldKind]) -> u32 {
    match kinds {
        [FieldKind::Address | FieldKind::Port] => 2,
        _ => 0,
    }
}

fn word(kind: FieldKind, family: Family) -> &'static str {
    match (kind, family) {
        (FieldKind::Address, Family::Ip) => "ipv4_addr",
        (FieldKind::Address, Family::Ip6) => "ipv6_addr",
        (FieldKind::Protocol, _) => "inet_proto",
        (FieldKind::Port, _) => "inet_service",
        (FieldKind::Number, _) => "integer",
    }
}

fn expression(kind: FieldKind, family: Family) -> &'static str {
    match (kind, family) {
        (FieldKind::Address, Family::Ip) => "ip daddr",
        (FieldKind::Address, Family::Ip6) => "ip6 daddr",
        (FieldKind::Protocol, _) => "meta l4proto",
        (FieldKind::Port, _) => "th dport",
        (FieldKind::Number, _) => "numgen random mod 2",
    }
}

/// A part of user data: its type, its length and itself.
fn tlv(to: &mut Vec<u8>, kind: u8, value: &[u8]) {
    to.push(kind);
    to.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
    to.extend_from_slice(value);
}

/// What `typeof` says, as nft keeps it: expressions by their numbers (`enum expr_types` of nft), 13 for a concatenation.
fn type_of(kinds: &[FieldKind], family: Family) -> Vec<u8> {
    let mut parts = Vec::new();
    for (index, kind) in (0..).zip(kinds) {
        tlv(&mut parts, index, &type_of_field(*kind, family));
    }
    tagged(13, &parts)
}

fn type_of_field(kind: FieldKind, family: Family) -> Vec<u8> {
    let numbers = |numbers: &[u32]| {
        let mut data = Vec::new();
        for (index, number) in (0..).zip(numbers) {
            tlv(&mut data, index, &number.to_ne_bytes());
        }
        data
    };
    match (kind, family) {
        // Of a payload: the protocol and the field in nft's tables of both.
        (FieldKind::Address, Family::Ip) => tagged(7, &numbers(&[12, 12])),
        (FieldKind::Address, Family::Ip6) => tagged(7, &numbers(&[13, 9])),
        (FieldKind::Port, _) => tagged(7, &numbers(&[11, 2])),
        // Of meta: NFT_META_L4PROTO.
        (FieldKind::Protocol, _) => tagged(9, &numbers(&[16])),
        // Of numgen: random, below 2, from 0.
        (FieldKind::Number, _) => tagged(23, &numbers(&[1, 2, 0])),
    }
}

fn tagged(expression: u32, data: &[u8]) -> Vec<u8> {
    let mut tagged = Vec::new();
    tlv(&mut tagged, 0, &expression.to_ne_bytes());
    tlv(&mut tagged, 1, data);
    tagged
}
