//! Reads the expressions of nft: what a match looks at, and which bits of a mark change.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::{super::ruleset::Match, only_member, string, text};

/// Returns what the left side of a match looks at. `op` and `right` are null for verdict maps.
pub(super) fn matches_of(left: &Value, op: &Value, right: &Value) -> Vec<Match> {
    let Some((kind, value)) = only_member(left) else { return vec![unknown(left)] };
    let is_positive = matches!(op.as_str(), Some("==" | "in"));
    let is = |found| vec![found];
    match kind {
        "concat" => {
            let parts = value.as_array().into_iter().flatten();
            parts.flat_map(|part| matches_of(part, &Value::Null, &Value::Null)).collect()
        }
        "&" | "|" | "^" | "<<" | ">>" => masked(kind, value),
        "meta" => is(meta(value)),
        "ct" => is(connection(value)),
        "payload" => is(payload(value, right, is_positive)),
        "fib" => is(route(value, right, is_positive)),
        "tcp option" | "exthdr" | "ip option" | "numgen" => is(Match::Plain),
        _ => is(unknown(left)),
    }
}

fn unknown(expression: &Value) -> Match {
    Match::Unknown(text::of_expression(expression))
}

/// Reads `meta mark & 0x40`. Of other values the mask does not matter.
fn masked(operator: &str, operands: &Value) -> Vec<Match> {
    let mask = operands[1].as_u64().filter(|_| operator == "&").and_then(|mask| u32::try_from(mask).ok());
    let mut matches = matches_of(&operands[0], &Value::Null, &Value::Null);
    if let (Some(mask), [Match::Mark(bits) | Match::ConnectionMark(bits)]) = (mask, &mut *matches) {
        *bits &= mask;
    }
    matches
}

fn meta(value: &Value) -> Match {
    let key = string(&value["key"]);
    match &*key {
        "mark" => Match::Mark(u32::MAX),
        "iif" | "oif" | "iifname" | "oifname" | "iiftype" | "oiftype" | "iifgroup" | "oifgroup"
        | "iifkind" | "oifkind" | "ibrname" | "obrname" | "nfproto" | "l4proto" | "protocol" | "length"
        | "pkttype" | "skuid" | "skgid" | "cpu" | "random" | "time" | "day" | "hour" => Match::Plain,
        _ => Match::Unknown(format!("meta {key}")),
    }
}

/// Reads a field of the connection. The status has bits for translations among others.
fn connection(value: &Value) -> Match {
    let key = string(&value["key"]);
    let is_destination = key.ends_with("daddr") || key == "proto-dst";
    match &*key {
        "state" => Match::ConnectionState,
        "status" => Match::Translation,
        "mark" => Match::ConnectionMark(u32::MAX),
        "direction" | "expiration" | "l3proto" | "protocol" => Match::Plain,
        _ if is_destination && value["dir"] != "reply" => Match::OriginalDestination,
        "saddr" | "ip saddr" | "ip6 saddr" | "proto-src" => Match::ConnectionAddress,
        _ if is_destination => Match::ConnectionAddress,
        _ => Match::Unknown(format!("ct {key}")),
    }
}

fn payload(value: &Value, right: &Value, is_positive: bool) -> Match {
    match value["field"].as_str() {
        Some("saddr" | "sport") => Match::Source,
        Some("dport") if is_positive => ports(right).map_or(Match::Destination, Match::DestinationPorts),
        Some("daddr" | "dport") => Match::Destination,
        // Link programs change them with the addresses.
        Some("checksum" | "csum") => Match::Unknown("checksum".into()),
        Some(_) if value["protocol"].is_string() => Match::Plain,
        _ => Match::Unknown("payload".into()),
    }
}

/// Returns the ports of `80`, `90-99` and `{ 80, 90-99 }`. Of a named set they are not known.
fn ports(right: &Value) -> Option<Vec<RangeInclusive<u16>>> {
    let port = |value: &Value| value.as_u64().and_then(|port| u16::try_from(port).ok());
    let range = |value: &Value| match value.get("range") {
        Some(range) => Some(port(&range[0])?..=port(&range[1])?),
        None => port(value).map(|port| port..=port),
    };
    match right.get("set") {
        Some(set) => set.as_array()?.iter().map(range).collect(),
        None => range(right).map(|range| vec![range]),
    }
}

fn route(value: &Value, right: &Value, is_positive: bool) -> Match {
    let flags = value["flags"].as_array().map(Vec::as_slice).unwrap_or_default();
    if flags.iter().any(|flag| flag == "saddr") {
        return Match::ReversePath;
    }
    match value["result"].as_str() {
        Some("type") if is_positive && right == "local" => Match::LocalDestination,
        _ => Match::Destination,
    }
}

/// Returns the bits of a mark that a new value can differ in. `key` is the mark.
pub(super) fn bits_changed(key: &Value, value: &Value) -> u32 {
    if key == value {
        return 0;
    }
    let Some((operator, operands)) = only_member(value) else { return u32::MAX };
    let Some(number) = operands[1].as_u64().and_then(|number| u32::try_from(number).ok()) else {
        return u32::MAX;
    };
    match operator {
        "|" | "^" => bits_changed(key, &operands[0]) | number,
        "&" => bits_changed(key, &operands[0]) | !number,
        _ => u32::MAX,
    }
}
