//! Types and values of settings. Values of flags and of the file are checked in the same way.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use glob::Pattern;
use ipnet::IpNet;
use serde_json::{Value as Json, json};
use serde_yaml_ng::Value as Yaml;

use super::{go, lists};
use crate::{
    duration,
    model::{parse_cidr_sloppy, parse_ip_sloppy},
};

/// What the words `localhost` and `all` of `nodePortAddresses` mean (KEP-6032).
const LOCALHOST: [&str; 2] = ["127.0.0.0/8", "::1/128"];
const ALL_ADDRESSES: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// The type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Any text.
    Text,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// true or false.
    Bool,
    /// A whole number from `min` to `max`.
    Integer { min: i64, max: i64 },
    /// Any number.
    Number,
    /// A duration in Go's syntax, not negative.
    Duration,
    /// A duration above zero. As with upstream, zero in the file means the default.
    Period,
    /// A duration above zero, or a number of nanoseconds. Zero in the file means the default.
    FlushFrequency,
    /// An IP address.
    Address,
    /// An IP address with a port. An IP address alone gets the default port.
    BindAddress { default_port: u16 },
    /// A list of CIDRs.
    Cidrs,
    /// A list of CIDRs and the words `primary`, `localhost` and `all`.
    NodePortAddresses,
    /// A list of patterns of interface names.
    InterfaceGlobs,
    /// Names with true or false.
    FeatureGates,
    /// Patterns of file names with a verbosity each.
    VModule,
    /// A number of bytes, such as `512`, `4Ki` or `1M`.
    Quantity,
}

/// A value of a setting, already checked against its [`Kind`].
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Text(String),
    Bool(bool),
    Integer(i64),
    Number(f64),
    Duration(Duration),
    Address(IpAddr),
    BindAddress(SocketAddr),
    /// Ranges without host bits, and whether the list has the word `primary`.
    Cidrs {
        cidrs: Vec<IpNet>,
        primary: bool,
    },
    Globs(Vec<Pattern>),
    Gates(BTreeMap<String, bool>),
    Levels(Vec<(String, u32)>),
}

/// The word of a setting that turns something off.
const OFF: &str = "off";

impl Kind {
    /// Returns the allowed values, as the end of a sentence that starts with "must be".
    pub(super) fn allowed(self) -> String {
        match self {
            Self::Text => "text".into(),
            Self::OneOf([word]) => (*word).into(),
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::Bool => "true or false".into(),
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Number => "a number".into(),
            Self::Duration => "a duration that is not negative, such as 30s or 1m30s".into(),
            Self::Period => "a duration above zero, such as 30s or 1m30s".into(),
            Self::FlushFrequency => "a duration above zero, such as 5s, or a number of nanoseconds".into(),
            Self::Address => "an IP address".into(),
            Self::BindAddress { default_port } => {
                format!("IP:port with a port from 1 to 65535, or an IP alone for port {default_port}")
            }
            Self::Cidrs => "a list of CIDRs such as 10.0.0.0/8 or fd00::/8".into(),
            Self::NodePortAddresses => {
                "a list of CIDRs such as 192.168.0.0/16 and of the words primary, localhost and all".into()
            }
            Self::InterfaceGlobs => "a list of interface names or globs, such as eth0 or cali*".into(),
            Self::FeatureGates => {
                "names of feature gates with true or false, such as AllowServiceExternalIPs: false".into()
            }
            Self::VModule => {
                "a list of items with a filePattern (without = and commas) and a verbosity".into()
            }
            Self::Quantity => "a number of bytes, such as 512 or 4Ki".into(),
        }
    }

    /// Returns the same for a flag with this value.
    pub(super) fn allowed_in_flag(self, text: &str) -> String {
        match self {
            Self::FeatureGates => {
                "names of feature gates with true or false, such as AllowServiceExternalIPs=false".into()
            }
            Self::VModule => "a list of PATTERN=VERBOSITY, such as conntrack=4,proxy*=2".into(),
            _ => self.allowed_instead_of(text),
        }
    }

    /// Returns the same for a field with this value.
    pub(super) fn allowed_instead_of(self, text: &str) -> String {
        let is_too_long = (self == Self::Duration || self.is_period()) && duration::is_too_long(text);
        if is_too_long { format!("at most {}", duration::MAX) } else { self.allowed() }
    }

    /// Returns true if Go's decoder takes the value. What it means is checked later.
    pub(super) fn is_decodable(self, yaml: &Yaml) -> bool {
        match (self, yaml) {
            (Self::Integer { .. }, Yaml::Number(number)) => {
                number.as_i64().is_some_and(|number| i32::try_from(number).is_ok())
            }
            (Self::Cidrs, Yaml::Sequence(items)) => items.iter().all(Yaml::is_string),
            (Self::Duration | Self::Period, Yaml::String(text)) => self.is_parsable(text),
            _ => false,
        }
    }

    /// Returns the same for a flag.
    pub(super) fn is_parsable(self, text: &str) -> bool {
        match self {
            Self::Integer { .. } => go::integer(text).is_some_and(|number| i32::try_from(number).is_ok()),
            Self::Cidrs => true,
            Self::Duration | Self::Period => {
                duration::parse(text.strip_prefix('-').unwrap_or(text)).is_some()
            }
            _ => false,
        }
    }

    /// Returns true for a setting with the word `off`.
    pub(super) fn has_off(words: &[&str]) -> bool {
        words.contains(&OFF)
    }

    /// Reads a value of the file. Returns `Ok(None)` for null and empty values, which mean "unset",
    /// and `Err` for a value that is not allowed.
    pub(super) fn read_yaml(self, yaml: &Yaml) -> Result<Option<Value>, ()> {
        if yaml.is_null() {
            return Ok(None);
        }
        match (self, yaml) {
            (Self::Bool, Yaml::Bool(value)) => Ok(Some(Value::Bool(*value))),
            (Self::Integer { .. }, Yaml::Number(number)) => {
                let value = number.as_i64().filter(|value| self.holds(*value)).ok_or(())?;
                Ok(Some(Value::Integer(value)))
            }
            (Self::Number, Yaml::Number(number)) => Ok(Some(Value::Number(number.as_f64().ok_or(())?))),
            (Self::Duration | Self::Period, Yaml::Number(number)) if number.as_i64() == Some(0) => {
                Ok(Some(Value::Duration(Duration::ZERO)))
            }
            (Self::FlushFrequency, Yaml::Number(number)) => {
                Ok(Some(Value::Duration(Duration::from_nanos(number.as_u64().ok_or(())?))))
            }
            (Self::Period | Self::FlushFrequency, Yaml::String(text)) => Self::Duration.read_text(text),
            (Self::Quantity, Yaml::Number(number)) => self.read_text(&number.to_string()),
            (Self::Cidrs | Self::NodePortAddresses | Self::InterfaceGlobs, Yaml::Sequence(items)) => {
                let texts: Option<Vec<_>> = items.iter().map(Yaml::as_str).collect();
                self.read_list(&texts.ok_or(())?)
            }
            (Self::FeatureGates, Yaml::Mapping(gates)) => {
                lists::gates_of_file(gates).map(|gates| Some(Value::Gates(gates))).ok_or(())
            }
            (Self::VModule, Yaml::Sequence(items)) => {
                lists::levels_of_file(items).map(|levels| Some(Value::Levels(levels))).ok_or(())
            }
            // What `off` without quotes is in YAML 1.1, and so for kubectl and Helm.
            (Self::OneOf(words), Yaml::Bool(false)) if Self::has_off(words) => self.read_text(OFF),
            (kind, Yaml::String(text)) if kind.is_written_as_text() => self.read_text(text),
            _ => Err(()),
        }
    }

    /// Reads a value of a flag. Returns `Ok(None)` if it is empty.
    pub(super) fn read_text(self, text: &str) -> Result<Option<Value>, ()> {
        if text.is_empty() {
            return Ok(None);
        }
        let value = match self {
            Self::Text => Some(Value::Text(text.into())),
            Self::OneOf(words) => words.contains(&text).then(|| Value::Text(text.into())),
            Self::Bool => go::bool(text).map(Value::Bool),
            Self::Integer { .. } => go::integer(text).filter(|value| self.holds(*value)).map(Value::Integer),
            Self::Number => text.parse().ok().map(Value::Number),
            Self::Duration => duration::parse(text).map(Value::Duration),
            Self::Period | Self::FlushFrequency => {
                duration::parse(text).filter(|duration| !duration.is_zero()).map(Value::Duration)
            }
            Self::Address => parse_ip_sloppy(text).map(Value::Address),
            Self::BindAddress { default_port } => bind_address(text, default_port).map(Value::BindAddress),
            Self::Cidrs | Self::NodePortAddresses | Self::InterfaceGlobs => {
                return self.read_list(&text.split(',').map(str::trim).collect::<Vec<_>>());
            }
            Self::FeatureGates => lists::gates_of_flag(text).map(Value::Gates),
            Self::VModule => lists::levels_of_flag(text).map(Value::Levels),
            Self::Quantity => lists::is_quantity(text).then(|| Value::Text(text.into())),
        };
        value.map(Some).ok_or(())
    }

    fn read_list(self, texts: &[&str]) -> Result<Option<Value>, ()> {
        if texts.is_empty() {
            return Ok(None);
        }
        if matches!(self, Self::InterfaceGlobs) {
            let globs = texts.iter().map(|text| glob(text)).collect::<Option<_>>().ok_or(())?;
            return Ok(Some(Value::Globs(globs)));
        }
        let (mut cidrs, mut primary) = (Vec::new(), false);
        for text in texts {
            match (self, *text) {
                (Self::NodePortAddresses, "primary") => primary = true,
                (Self::NodePortAddresses, "localhost") => cidrs.extend(LOCALHOST.map(parse_cidr_sloppy)),
                (Self::NodePortAddresses, "all") => cidrs.extend(ALL_ADDRESSES.map(parse_cidr_sloppy)),
                (_, text) => cidrs.push(parse_cidr_sloppy(text)),
            }
        }
        let cidrs = cidrs.into_iter().collect::<Option<_>>().ok_or(())?;
        Ok(Some(Value::Cidrs { cidrs, primary }))
    }

    /// Returns true if a repeated flag adds to the value.
    pub(super) const fn is_list(self) -> bool {
        matches!(self, Self::Cidrs | Self::NodePortAddresses | Self::InterfaceGlobs | Self::FeatureGates)
    }

    /// Returns true for a duration that must be above zero.
    pub(super) const fn is_period(self) -> bool {
        matches!(self, Self::Period | Self::FlushFrequency)
    }

    /// Returns true if YAML holds the value as a string.
    fn is_written_as_text(self) -> bool {
        let is_other = matches!(self, Self::Bool | Self::Integer { .. } | Self::Number);
        let is_list = matches!(self, Self::FeatureGates | Self::VModule) || self.is_list();
        !is_other && !is_list
    }

    fn holds(self, value: i64) -> bool {
        matches!(self, Self::Integer { min, max } if (min..=max).contains(&value))
    }

    /// Returns what a written configuration holds for an unset field.
    pub(super) fn unset(self) -> Json {
        match self {
            Self::FeatureGates => json!({}),
            kind if kind.is_written_as_text() => json!(""),
            _ => Json::Null,
        }
    }
}

impl Value {
    /// Returns the value as the file holds it.
    pub(super) fn to_json(&self) -> Json {
        match self {
            Self::Text(text) => json!(text),
            Self::Bool(value) => json!(value),
            Self::Integer(value) => json!(value),
            Self::Number(value) if value.fract() == 0.0 && value.abs() < 1e9 => {
                #[expect(clippy::cast_possible_truncation, reason = "whole and small")]
                let whole = *value as i64;
                json!(whole)
            }
            Self::Number(value) => json!(value),
            Self::Duration(value) => json!(duration::format(*value)),
            Self::Address(value) => json!(value.to_string()),
            Self::BindAddress(value) => json!(value.to_string()),
            Self::Cidrs { cidrs, primary } => {
                let keyword = primary.then(|| "primary".to_owned());
                keyword.into_iter().chain(cidrs.iter().map(ToString::to_string)).collect()
            }
            Self::Globs(globs) => globs.iter().map(|glob| json!(glob.as_str())).collect(),
            Self::Gates(gates) => json!(gates),
            Self::Levels(levels) => levels
                .iter()
                .map(|(pattern, level)| json!({"filePattern": pattern, "verbosity": level}))
                .collect(),
        }
    }

    /// Returns true for Go's zero value.
    pub(super) fn is_zero(&self) -> bool {
        match self {
            Self::Integer(value) => *value == 0,
            Self::Number(value) => *value == 0.0,
            Self::Duration(value) => value.is_zero(),
            _ => false,
        }
    }
}

fn glob(text: &str) -> Option<Pattern> {
    Pattern::new(text).ok().filter(|_| !text.is_empty())
}

/// Combines upstream's `AppendPortIfNeeded` and `validateHostPort`.
fn bind_address(text: &str, default_port: u16) -> Option<SocketAddr> {
    if let Some(address) = parse_ip_sloppy(text) {
        return Some(SocketAddr::new(address, default_port));
    }
    // Go splits ":10256" into an empty host and a port, and upstream then rejects the host.
    let (host, port) = text.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|port| *port != 0)?;
    // An IPv6 address needs its brackets.
    let is_bare_v6 = host.contains(':') && !text.starts_with('[');
    Some(SocketAddr::new(parse_ip_sloppy(host).filter(|_| !is_bare_v6)?, port))
}
