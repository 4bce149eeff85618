//! Clients and destinations as people name them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
};

use crate::model::{NamespacedName, Protocol};

/// The namespace of names without one, as with kubectl.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientName {
    /// `node`: a process of this node.
    Node,
    /// An address.
    Address(IpAddr),
    /// `NAME`, `pod/NAME` or `NAMESPACE/NAME`.
    Pod(ObjectName),
}

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DestinationName {
    /// Of whom the port is.
    pub host: HostName,
    /// `None` for the only port.
    pub port: Option<PortName>,
    /// `None` for TCP, or for the only protocol of a Service's port.
    pub protocol: Option<Protocol>,
}

/// An address, or who has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostName {
    /// An address.
    Address(IpAddr),
    /// `NAMESPACE/NAME`, `svc/NAME`, `NAME`, `NAME.NAMESPACE`, or `NAME.NAMESPACE.svc` with any
    /// domain behind it.
    Service(ObjectName),
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortName {
    /// Its number.
    Number(NonZeroU16),
    /// Its name.
    Name(String),
}

/// The name of an object, perhaps without its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectName {
    namespace: Option<String>,
    name: String,
}

impl ObjectName {
    /// Returns the name with its namespace.
    pub fn full(&self) -> Option<NamespacedName> {
        let namespace = self.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        NamespacedName::parse(namespace, &self.name).ok()
    }

    /// Returns the namespace, if one is given, and the name.
    pub fn parts(&self) -> (Option<&str>, &str) {
        (self.namespace.as_deref(), &self.name)
    }

    fn set_namespace(&mut self, namespace: &str) {
        self.namespace.get_or_insert_with(|| namespace.to_owned());
    }

    /// Parses `NAME`, `KIND/NAME` or `NAMESPACE/NAME`.
    fn parse(text: &str, kinds: [&str; 3]) -> Option<Self> {
        let (namespace, name) = match text.split_once('/') {
            Some((kind, name)) if kinds.contains(&kind) => (None, name),
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, text),
        };
        let parsed = Self { namespace, name: name.to_owned() };
        // A mistake in an address is no name.
        let is_number = name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        parsed.full().filter(|_| !is_number).map(|_| parsed)
    }
}

impl ClientName {
    /// Gives a pod without a namespace this one.
    #[must_use]
    pub fn in_namespace(mut self, namespace: &str) -> Self {
        if let Self::Pod(name) = &mut self {
            name.set_namespace(namespace);
        }
        self
    }
}

impl DestinationName {
    /// Gives a Service without a namespace this one.
    #[must_use]
    pub fn in_namespace(mut self, namespace: &str) -> Self {
        if let HostName::Service(name) = &mut self.host {
            name.set_namespace(namespace);
        }
        self
    }
}

impl FromStr for ClientName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "node" => Ok(Self::Node),
            Ok(address) => Ok(Self::Address(address)),
            Err(_) => ObjectName::parse(text, ["pod", "pods", "po"]).map(Self::Pod).ok_or_else(|| {
                "must be node, the address of the client, or a pod: NAME, pod/NAME or NAMESPACE/NAME"
                    .to_owned()
            }),
        }
    }
}

impl FromStr for DestinationName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = match text.rsplit_once(':') {
            _ if text.parse::<IpAddr>().is_ok() || text.ends_with(']') => (text, None),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        let (port, protocol) = match port.map(|port| port.split_once('/').unwrap_or((port, ""))) {
            None => (None, None),
            Some((port, "")) => (Some(self::port(port)?), None),
            Some((port, protocol)) => (Some(self::port(port)?), Some(self::protocol(protocol)?)),
        };
        if host == "localhost" {
            return Err(
                "localhost is no Service: name 127.0.0.1 or [::1]; a Service of this name is svc/localhost"
                    .to_owned(),
            );
        }
        let host = self::host(host).ok_or_else(|| {
            format!(
                "{host} is neither an address nor a Service: must be ADDRESS:PORT, such as 10.96.0.10:53 or \
                 [fd00::10]:53, or NAMESPACE/SERVICE[:PORT], or SERVICE.NAMESPACE[:PORT]"
            )
        })?;
        Ok(Self { host, port, protocol })
    }
}

fn host(text: &str) -> Option<HostName> {
    let address = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = address.parse() {
        return Some(HostName::Address(address));
    }
    let labels: Vec<_> = text.trim_end_matches('.').split('.').collect();
    let name = match labels[..] {
        [name, namespace] | [name, namespace, "svc", ..] if !text.contains('/') => {
            format!("{namespace}/{name}")
        }
        [_] => text.to_owned(),
        _ => return None,
    };
    ObjectName::parse(&name, ["svc", "service", "services"]).map(HostName::Service)
}

fn port(text: &str) -> Result<PortName, String> {
    match text.parse() {
        Ok(number) => {
            NonZeroU16::new(number).map(PortName::Number).ok_or_else(|| "no Service has port 0".to_owned())
        }
        Err(_)
            if crate::model::Name::label(text).is_ok()
                && text.bytes().any(|byte| byte.is_ascii_lowercase()) =>
        {
            Ok(PortName::Name(text.to_owned()))
        }
        Err(_) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Err(format!("{text} is no port: must be 1 to 65535"))
        }
        Err(_) => Err(format!("{text:?} is neither the number nor the name of a port")),
    }
}

fn protocol(text: &str) -> Result<Protocol, String> {
    let wanted = text.to_ascii_lowercase();
    let known = Protocol::ALL.into_iter().find(|known| known.lowercase_name() == wanted);
    known.ok_or_else(|| format!("{wanted} is no protocol of Services: must be tcp, udp or sctp"))
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE), self.name)
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str("node"),
            Self::Address(address) => address.fmt(f),
            Self::Pod(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for DestinationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, &self.port) {
            (HostName::Address(IpAddr::V6(address)), Some(_)) => write!(f, "[{address}]")?,
            (HostName::Address(address), _) => address.fmt(f)?,
            (HostName::Service(name), _) => name.fmt(f)?,
        }
        match &self.port {
            Some(PortName::Number(number)) => write!(f, ":{number}")?,
            Some(PortName::Name(name)) => write!(f, ":{name}")?,
            None => return Ok(()),
        }
        self.protocol.map_or(Ok(()), |protocol| write!(f, "/{}", protocol.lowercase_name()))
    }
}

impl From<(SocketAddr, Protocol)> for DestinationName {
    fn from((address, protocol): (SocketAddr, Protocol)) -> Self {
        let port = NonZeroU16::new(address.port()).map(PortName::Number);
        Self { host: HostName::Address(address.ip()), port, protocol: Some(protocol) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_named_as_with_kubectl() {
        for (text, expected) in [
            ("node", "node"),
            ("10.0.0.1", "10.0.0.1"),
            ("fd00::1", "fd00::1"),
            ("web-0", "shop/web-0"),
            ("pod/node", "shop/node"),
            ("po/web-0", "shop/web-0"),
            ("other/web-0", "other/web-0"),
        ] {
            let client: ClientName = text.parse().expect(text);
            assert_eq!(client.in_namespace("shop").to_string(), expected);
        }
        for text in ["", "10.0.0", "a/b/c", "Web", "pod/", "shop/10.0.0.1"] {
            assert!(text.parse::<ClientName>().is_err(), "{text}");
        }
    }

    #[test]
    fn destinations_are_addresses_or_services() {
        for (text, expected) in [
            ("10.0.0.1:53/udp", "10.0.0.1:53/udp"),
            ("10.0.0.1:53", "10.0.0.1:53"),
            ("10.0.0.1", "10.0.0.1"),
            ("[fd00::1]:53/SCTP", "[fd00::1]:53/sctp"),
            ("fd00::1", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
            ("web", "shop/web"),
            ("svc/web:http", "shop/web:http"),
            ("other/web:80/tcp", "other/web:80/tcp"),
            // A Service with this name: the protocol only follows a port.
            ("other/tcp", "other/tcp"),
            ("web.other", "other/web"),
            ("web.other.svc:http/udp", "other/web:http/udp"),
            ("web.other.svc.cluster.local.:80", "other/web:80"),
        ] {
            let destination: DestinationName = text.parse().expect(text);
            let destination = destination.in_namespace("shop");
            assert_eq!(destination.to_string(), expected);
            assert_eq!(expected.parse(), Ok(destination), "the daemon reads what the command writes");
        }
        for (text, part) in [
            ("10.0.0:80", "10.0.0 is neither an address nor a Service"),
            ("web.shop.example:80", "neither an address nor a Service"),
            ("10.0.0.1:0", "no Service has port 0"),
            ("10.0.0.1:53/icmp", "icmp is no protocol of Services"),
            ("web.shop:70000", "70000 is no port: must be 1 to 65535"),
            ("web.shop:Http", "neither the number nor the name of a port"),
            ("localhost:30080", "localhost is no Service: name 127.0.0.1 or [::1]"),
        ] {
            let error = text.parse::<DestinationName>().expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
