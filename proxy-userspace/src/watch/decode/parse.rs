//! Parses the values of fields: ports, addresses, CIDRs, words of a fixed set, names and times.

use std::{fmt::Display, net::IpAddr, num::NonZeroU16};

use ipnet::IpNet;

use super::{Problems, message::Text};
use crate::model::{Interner, InvalidName, Name, Protocol, UnixNanos, parse_cidr_sloppy, parse_ip_sloppy};

/// Parses a port number, 1 to 65,535.
pub(super) fn port(field: impl Display, value: i64, problems: &mut Problems) -> Option<NonZeroU16> {
    let port = u16::try_from(value).ok().and_then(NonZeroU16::new);
    if port.is_none() {
        problems.not(field, value, "a port number, 1 to 65535");
    }
    port
}

/// Parses a port number. If it is absent or 0, there is none.
pub(super) fn optional_port(
    field: impl Display,
    value: Option<i64>,
    problems: &mut Problems,
) -> Option<NonZeroU16> {
    value.filter(|&value| value != 0).and_then(|value| port(field, value, problems))
}

/// Parses a `protocol`. The default is TCP.
pub(super) fn protocol(
    field: impl Display,
    value: Option<&str>,
    problems: &mut Problems,
) -> Option<Protocol> {
    let words = [("TCP", Protocol::Tcp), ("UDP", Protocol::Udp), ("SCTP", Protocol::Sctp)];
    word(field, value, Protocol::Tcp, &words, problems)
}

/// Parses one of a fixed set of words. If it is absent or empty, returns `default`.
pub(super) fn word<T: Copy>(
    field: impl Display,
    value: Option<&str>,
    default: T,
    words: &[(&str, T)],
    problems: &mut Problems,
) -> Option<T> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Some(default);
    };
    let found = words.iter().find(|(word, _)| *word == value).map(|(_, meaning)| *meaning);
    if found.is_none() {
        let allowed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        problems.not(field, value, format_args!("one of {}", allowed.join(", ")));
    }
    found
}

/// Parses an IP address like kube-proxy (`netutils.ParseIPSloppy`): leading zeros of IPv4 are
/// ignored (`10.0.0.011` is 10.0.0.11), and IPv4-mapped IPv6 becomes IPv4.
pub(super) fn ip(field: impl Display, value: &str, problems: &mut Problems) -> Option<IpAddr> {
    let address = parse_ip_sloppy(value);
    if address.is_none() {
        problems.not(field, value, "an IP address");
    }
    address
}

/// Parses a CIDR and clears its host bits. Surrounding blanks are ignored: the API server accepts
/// them in `loadBalancerSourceRanges`.
pub(super) fn cidr(field: impl Display, value: &str, problems: &mut Problems) -> Option<IpNet> {
    let range = parse_cidr_sloppy(value.trim());
    if range.is_none() {
        problems.not(field, value, "a range in CIDR notation, like 10.0.0.0/8 or fd00::/64");
    }
    range
}

/// Parses a list with `parse`. Invalid values are left out.
pub(super) fn list<T>(
    field: &str,
    values: &[Text<'_>],
    problems: &mut Problems,
    parse: fn(String, &str, &mut Problems) -> Option<T>,
) -> Vec<T> {
    let values = values.iter().enumerate();
    values.filter_map(|(i, value)| parse(format!("{field}[{i}]"), value, problems)).collect()
}

/// Parses a name with `parse`.
pub(super) fn name(
    field: impl Display,
    value: &str,
    parse: impl FnOnce(&str) -> Result<Name, InvalidName>,
    problems: &mut Problems,
) -> Option<Name> {
    parse(value).map_err(|allowed| problems.not(field, value, allowed)).ok()
}

/// Parses the name of a port. It may be absent or empty.
pub(super) fn port_name(
    field: impl Display,
    value: Option<&str>,
    strings: &mut Interner<str>,
    problems: &mut Problems,
) -> Option<Name> {
    match value.unwrap_or_default() {
        "" => Some(Name::default()),
        value => name(field, value, |value| Name::shared_label(value, strings), problems),
    }
}

/// Parses an RFC 3339 time.
pub(super) fn time(field: impl Display, value: &str, problems: &mut Problems) -> Option<UnixNanos> {
    let time: Option<jiff::Timestamp> = value.parse().ok();
    let nanos = time.and_then(|time| u64::try_from(time.as_nanosecond()).ok());
    if nanos.is_none() {
        problems.not(field, value, "an RFC 3339 time since 1970, like 2026-01-02T15:04:05.678Z");
    }
    nanos.map(UnixNanos)
}
