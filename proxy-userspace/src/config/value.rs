//! What a setting may hold, checked the same way whether it came from a flag or from the file.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use glob::Pattern;
use ipnet::IpNet;
use serde_yaml_ng::Value as Yaml;

use super::duration;

/// What a field holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Any text.
    Text,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// true or false.
    Bool,
    /// true or false, where false differs from unset.
    BoolPointer,
    /// A whole number within bounds.
    Integer {
        /// The least.
        min: i64,
        /// The greatest.
        max: i64,
    },
    /// Any number.
    Number,
    /// A duration in Go's syntax, not negative.
    Duration,
    /// An IP address.
    Address,
    /// IP and port; an IP alone gets the default port.
    BindAddress {
        /// The port of an address that has none.
        default_port: u16,
    },
    /// A list of CIDRs.
    Cidrs,
    /// CIDRs in one text, with commas between.
    CommaCidrs,
    /// A list of CIDRs and the word `primary`.
    NodePortAddresses,
    /// A list of patterns of interface names.
    InterfaceGlobs,
    /// Whatever: the field is not looked into.
    Anything,
}

/// A value that was checked against its [`Kind`].
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Text and words.
    Text(String),
    /// true or false.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// A duration.
    Duration(Duration),
    /// An IP address.
    Address(IpAddr),
    /// An address to listen on.
    BindAddress(SocketAddr),
    /// CIDRs, and whether `primary` was among them.
    Cidrs {
        /// The ranges, without host bits.
        cidrs: Vec<IpNet>,
        /// The word `primary` was there.
        primary: bool,
    },
    /// Patterns of interface names.
    Globs(Vec<Pattern>),
    /// Checked, and of no further use.
    Unread,
}

impl Kind {
    /// What the field may hold, to end a sentence that starts with "must be".
    pub(super) fn allowed(self) -> String {
        match self {
            Self::Text => "a text".into(),
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::Bool | Self::BoolPointer => "true or false".into(),
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Number => "a number".into(),
            Self::Duration => "a duration that is not negative, such as 30s or 1m30s".into(),
            Self::Address => "an IP address".into(),
            Self::BindAddress { default_port } => {
                format!("IP:port with a port from 1 to 65535, or an IP alone for port {default_port}")
            }
            Self::Cidrs => "a list of CIDRs such as 10.0.0.0/8 or fd00::/8".into(),
            Self::CommaCidrs => "CIDRs such as 10.244.0.0/16 or 10.244.0.0/16,fd44::/16".into(),
            Self::NodePortAddresses => "a list of CIDRs such as 192.168.0.0/16, or primary".into(),
            Self::InterfaceGlobs => "a list of interface names or globs, such as eth0 or cali*".into(),
            Self::Anything => "anything".into(),
        }
    }

    /// Reads a value of the file. `Ok(None)` where it stands for "unset": null, and the zero values that Go writes for
    /// fields nobody set. `Err` where it is none of what is allowed.
    pub(super) fn read_yaml(self, yaml: &Yaml) -> Result<Option<Value>, ()> {
        if yaml.is_null() {
            return Ok(None);
        }
        match (self, yaml) {
            (Self::Anything, _) => Ok((!is_zero(yaml)).then_some(Value::Unread)),
            (Self::Bool, Yaml::Bool(value)) => Ok(value.then_some(Value::Bool(true))),
            (Self::BoolPointer, Yaml::Bool(value)) => Ok(Some(Value::Bool(*value))),
            (Self::Integer { .. }, Yaml::Number(number)) => number
                .as_i64()
                .filter(|value| self.holds(*value))
                .map(|value| Some(Value::Integer(value)))
                .ok_or(()),
            (Self::Number, Yaml::Number(number)) => {
                Ok((number.as_f64() != Some(0.0)).then_some(Value::Unread))
            }
            (Self::Duration, Yaml::Number(number)) if number.as_i64() == Some(0) => {
                Ok(Some(Value::Duration(Duration::ZERO)))
            }
            (Self::Cidrs | Self::NodePortAddresses | Self::InterfaceGlobs, Yaml::Sequence(items)) => {
                let texts: Option<Vec<_>> = items.iter().map(Yaml::as_str).collect();
                self.read_list(&texts.ok_or(())?)
            }
            (kind, Yaml::String(text)) if kind.is_written_as_text() => self.read_text(text),
            _ => Err(()),
        }
    }

    /// Reads a value given as text. `Ok(None)` where it is empty.
    pub(super) fn read_text(self, text: &str) -> Result<Option<Value>, ()> {
        if text.is_empty() {
            return Ok(None);
        }
        let value = match self {
            Self::Text => Value::Text(text.into()),
            Self::OneOf(words) => Value::Text((*words.iter().find(|word| **word == text).ok_or(())?).into()),
            Self::Bool | Self::BoolPointer => Value::Bool(text.parse().map_err(drop)?),
            Self::Integer { .. } => {
                Value::Integer(text.parse().ok().filter(|value| self.holds(*value)).ok_or(())?)
            }
            Self::Number => text.parse::<f64>().map(|_| Value::Unread).map_err(drop)?,
            Self::Duration => Value::Duration(duration::parse(text).ok_or(())?),
            Self::Address => Value::Address(text.parse().map_err(drop)?),
            Self::BindAddress { default_port } => {
                Value::BindAddress(bind_address(text, default_port).ok_or(())?)
            }
            Self::Cidrs | Self::CommaCidrs | Self::NodePortAddresses | Self::InterfaceGlobs => {
                return self.read_list(&text.split(',').map(str::trim).collect::<Vec<_>>());
            }
            Self::Anything => Value::Unread,
        };
        Ok(Some(value))
    }

    fn read_list(self, texts: &[&str]) -> Result<Option<Value>, ()> {
        if texts.is_empty() {
            return Ok(None);
        }
        if matches!(self, Self::InterfaceGlobs) {
            let globs = texts.iter().map(|text| glob(text)).collect::<Option<_>>().ok_or(())?;
            return Ok(Some(Value::Globs(globs)));
        }
        let is_primary = |text: &&str| matches!(self, Self::NodePortAddresses) && **text == *"primary";
        let primary = texts.iter().any(is_primary);
        let cidrs = texts
            .iter()
            .filter(|text| !is_primary(text))
            .map(|text| text.parse::<IpNet>().map(|cidr| cidr.trunc()))
            .collect::<Result<_, _>>()
            .map_err(drop)?;
        Ok(Some(Value::Cidrs { cidrs, primary }))
    }

    /// Whether it is a list in the file, so that its flag may be repeated.
    pub(super) const fn is_list(self) -> bool {
        matches!(self, Self::Cidrs | Self::NodePortAddresses | Self::InterfaceGlobs)
    }

    /// Whether YAML holds it as a string.
    fn is_written_as_text(self) -> bool {
        matches!(
            self,
            Self::Text
                | Self::OneOf(_)
                | Self::Duration
                | Self::Address
                | Self::BindAddress { .. }
                | Self::CommaCidrs
        )
    }

    fn holds(self, value: i64) -> bool {
        matches!(self, Self::Integer { min, max } if (min..=max).contains(&value))
    }
}

fn glob(text: &str) -> Option<Pattern> {
    Pattern::new(text).ok().filter(|_| !text.is_empty())
}

/// Upstream's `AppendPortIfNeeded` and `validateHostPort` in one.
fn bind_address(text: &str, default_port: u16) -> Option<SocketAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(SocketAddr::new(address, default_port));
    }
    // Go splits ":10256" into no host and a port, and upstream then refuses the host.
    let address = text.parse::<SocketAddr>().ok()?;
    (address.port() != 0).then_some(address)
}

/// Go's zero values: what a marshalled configuration holds where nobody set anything.
fn is_zero(yaml: &Yaml) -> bool {
    match yaml {
        Yaml::Null => true,
        Yaml::Bool(value) => !value,
        Yaml::Number(number) => number.as_f64() == Some(0.0),
        Yaml::String(text) => matches!(text.as_str(), "" | "0" | "0s"),
        Yaml::Sequence(items) => items.iter().all(is_zero),
        Yaml::Mapping(entries) => entries.values().all(is_zero),
        Yaml::Tagged(_) => false,
    }
}

/// Whether a value that nothing reads says more than "unset" or upstream's default, so that it is worth a warning.
pub(super) fn is_worth_a_warning(value: &Value) -> bool {
    match value {
        Value::Duration(duration) => !duration.is_zero(),
        Value::Integer(value) => *value != 0,
        _ => true,
    }
}

/// The wildcard address that upstream derives its default listeners from.
pub(super) const DEFAULT_BIND_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
