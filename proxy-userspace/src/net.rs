//! Plain network types that several layers use.
#![forbid(unsafe_code)]

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
pub use proxy_common::{Protocol, layout::DirectScope};

/// An encoding of objects, which the API server may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentType {
    /// Kubernetes' protobuf, which is shorter, and faster to decode.
    Protobuf,
    /// JSON.
    Json,
}

impl ContentType {
    /// All encodings, the preferred one first.
    pub const ALL: [Self; 2] = [Self::Protobuf, Self::Json];
    /// The media types of [`Self::ALL`].
    pub const NAMES: &[&str] = &[Self::Protobuf.name(), Self::Json.name()];

    /// Returns the media type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
            Self::Json => "application/json",
        }
    }

    /// Returns the encoding of a media type, whatever its parameters are.
    pub fn named(media_type: &str) -> Option<Self> {
        let name = media_type.split(';').next().unwrap_or_default().trim();
        Self::ALL.into_iter().find(|content_type| content_type.name().eq_ignore_ascii_case(name))
    }

    /// Returns the header `Accept` for these encodings.
    pub fn accept(content_types: &[Self]) -> String {
        content_types.iter().map(|content_type| content_type.name()).collect::<Vec<_>>().join(", ")
    }
}

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpFamily {
    /// Both families, in the order in which output lists them.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family of an address.
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the number of bits of an address.
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// Returns the unspecified address.
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// Returns the name that Kubernetes, the metrics and the health checks use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for IpFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The header with which a link's packets begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkHeader {
    /// An Ethernet header.
    Ethernet,
    /// The IP header, as on tunnels.
    Ip,
    /// A header that shunt does not support, as on InfiniBand. The number is the link type
    /// (`ARPHRD_*`).
    Other(u16),
}

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let octets = self.0.map(|octet| format!("{octet:02x}"));
        f.write_str(&octets.join(":"))
    }
}

/// A table of nftables: the family (`NFPROTO_*`) and the name.
pub type TableName = (libc::c_int, &'static str);

/// The names of the tables that exist while commands trace, one for each command. Each is a table
/// of IPv4 and one of IPv6.
pub const TRACE_TABLES: [&str; 8] = [
    "shunt-trace-1",
    "shunt-trace-2",
    "shunt-trace-3",
    "shunt-trace-4",
    "shunt-trace-5",
    "shunt-trace-6",
    "shunt-trace-7",
    "shunt-trace-8",
];

/// The tables of nftables that shunt writes, with kube-proxy's.
pub const OWN_TABLES: &[TableName] = &own_tables();

const fn own_tables() -> [TableName; 3 + 2 * TRACE_TABLES.len()] {
    let mut tables = [(libc::NFPROTO_INET, "shunt"); 3 + 2 * TRACE_TABLES.len()];
    tables[1] = (libc::NFPROTO_IPV4, "kube-proxy");
    tables[2] = (libc::NFPROTO_IPV6, "kube-proxy");
    let mut number = 0;
    while number < TRACE_TABLES.len() {
        tables[3 + 2 * number] = (libc::NFPROTO_IPV4, TRACE_TABLES[number]);
        tables[4 + 2 * number] = (libc::NFPROTO_IPV6, TRACE_TABLES[number]);
        number += 1;
    }
    tables
}

/// The names of shunt's programs begin so.
pub const OWN_PROGRAMS: &str = "shunt_";

/// The name of the link that is the tunnel to other nodes.
pub const TUNNEL_LINK: &str = "shunt-dsr";

/// A link of the node's network namespace.
#[expect(clippy::struct_excessive_bools, reason = "independent facts that the kernel reports")]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// The interface index. Unlike the name, it never changes while the link exists.
    pub index: u32,
    /// The name.
    pub name: Arc<str>,
    /// The index of the bridge, bond or VRF of which this link is a port.
    pub master: Option<u32>,
    /// The header with which packets begin.
    pub header: LinkHeader,
    /// The bytes of the longest IP packet. 0 if the kernel does not say.
    pub mtu: u32,
    /// The link is set up.
    pub is_up: bool,
    /// True for the loopback link.
    pub is_loopback: bool,
    /// True for an `ifb` link. It passes packets through a qdisc that another link redirects to it,
    /// for example to limit the bandwidth of a pod, and returns them to that link.
    pub is_ifb: bool,
    /// If the link is a bridge: its own MAC address. It can differ from the address of every port.
    pub bridge_address: Option<MacAddress>,
    /// Its own MAC address.
    pub hardware_address: Option<MacAddress>,
    /// What it is. `None` for a link that is built over others, such as a bridge, a bond, a VLAN or
    /// a tunnel, and for one without packets of others.
    pub device: Option<Device>,
    /// The link is a bond or a team: what comes in on a port of it comes in on the link itself
    /// right after that, before anything else looks at it.
    pub is_bond: bool,
    /// Which frames are for it, if this is a VLAN.
    pub vlan: Option<Vlan>,
    /// What its driver says about XDP.
    pub xdp: XdpFeatures,
    /// The link is a veth without a qdisc whose peer is in another network namespace, and packets
    /// that are handed to the peer are counted there. Minimum kernel: 6.7 (024ee930cb3c).
    pub hands_to_peer: bool,
}

/// The frames that a VLAN link takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vlan {
    /// The index of the link beneath.
    pub link: u32,
    /// The identifier in their tag.
    pub id: u16,
    /// The protocol of their tag, as an Ethernet type.
    pub protocol: u16,
}

/// What the driver of a link says about XDP. Kernels before 6.3 report nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XdpFeatures {
    /// It runs programs, which may send frames back and to other links.
    pub runs_programs: bool,
    /// It takes frames that programs of other links redirect to it. Many drivers say so only while
    /// the link has a program.
    pub takes_frames: bool,
}

/// What a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// A device, also that of a virtual machine.
    Hardware,
    /// One end of a veth pair, which leads to another network namespace.
    Veth,
}

/// Where an XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XdpMode {
    /// In the kernel, after it made an `sk_buff`.
    Generic,
    /// In the driver, before that.
    Native,
}

impl XdpMode {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Generic => "generic",
            Self::Native => "native",
        }
    }
}

/// An address of a link in the node's network namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkAddress {
    /// The link's name.
    pub link: Arc<str>,
    /// The address.
    pub address: IpAddr,
    /// The length of the configured prefix in bits.
    pub prefix_len: u8,
}

/// An address of a link that packets may leave with: not deprecated, tentative or secondary, and of
/// global scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceAddress {
    /// The link's index.
    pub link: u32,
    /// The address.
    pub address: IpAddr,
    /// The length of the configured prefix in bits.
    pub prefix_len: u8,
}

/// A range of ports, in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// The last port, not lower than the first.
    pub last: u16,
}

impl PortRange {
    /// Parses a range such as `1024-29999`. Port 0 is not allowed.
    pub fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-')?;
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let range = Self { first: port(first)?, last: port(last)? };
        (range.first <= range.last).then_some(range)
    }

    /// Returns the ports that are in both ranges.
    pub fn common(self, other: Self) -> Option<Self> {
        let range = Self { first: self.first.max(other.first), last: self.last.min(other.last) };
        (range.first <= range.last).then_some(range)
    }

    /// Returns the number of ports.
    pub fn count(self) -> u32 {
        u32::from(self.last - self.first) + 1
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// What the kernel reports about this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The addresses of all links, without IPv6 link-local addresses; sorted.
    pub addresses: Vec<LinkAddress>,
    /// The ranges that are local by a route that somebody added, and not by an address of a link;
    /// sorted.
    pub local_routes: Vec<IpNet>,
    /// The addresses that packets may leave with, in the kernel's order.
    pub source_addresses: Vec<SourceAddress>,
    /// The kernel chooses the source of packets in a tunnel: programs can choose it since 5.19
    /// (26101f5ab6bd).
    pub kernel_chooses_tunnel_source: bool,
    /// All links; sorted.
    pub links: Vec<Link>,
    /// The ports that the kernel gives to sockets of the node (`net.ipv4.ip_local_port_range`), if
    /// they are known.
    pub local_ports: Option<PortRange>,
    /// The source ports with which link programs of an earlier process masquerade. In the ebpf
    /// mode, this process goes on with their flows. In other modes, `None` after their removal.
    pub former_programs_ports: Option<PortRange>,
    /// What translates packets that come in on links.
    pub link_path: LinkPath,
    /// The sockets that are served.
    pub socket_scope: SocketScope,
    /// The addresses of the pods that redirect their own packets, or did. Their sockets are not
    /// served meanwhile.
    pub exempt_addresses: BTreeSet<IpAddr>,
}

/// The kernel's unique number of a network namespace, valid until reboot, as `bpf_get_netns_cookie`
/// returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsCookie(pub u64);

/// The sockets that the socket programs serve, in the ebpf mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SocketScope {
    /// All sockets.
    #[default]
    All,
    /// The sockets in the node's network namespace.
    Node,
    /// All sockets but those in these network namespaces. Not empty.
    AllBut(BTreeSet<NetnsCookie>),
}

/// What translates the packets of clients that come in on links, in the ebpf mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LinkPath {
    /// The link programs.
    #[default]
    Programs,
    /// The link programs. Packets of flows leave on another link at once.
    Direct {
        /// Which packets do.
        scope: DirectScope,
        /// For how long a flow may take the direct path without a packet through the stack, while
        /// nothing changes. Zero if rules of others look at packets, or IPsec policies.
        lease: Duration,
        /// The names of the links on which others see packets after shunt's programs. What comes
        /// in there goes through the stack.
        without: BTreeSet<Arc<str>>,
        /// The names of the links on which filters of others see packets that leave. No packet
        /// leaves there before the stack.
        filtered: BTreeSet<Arc<str>>,
    },
    /// Netfilter: the rules of the backstop.
    Netfilter {
        /// The reason, for people: the setting, or the rule, policy or program of others that could
        /// notice that programs translate before it.
        why: Arc<str>,
    },
}

impl LinkPath {
    /// Returns the name of the path.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Programs => "programs",
            Self::Direct { .. } => "direct",
            Self::Netfilter { .. } => "netfilter",
        }
    }
}

/// The link path of a node, and why it has this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenPath {
    /// The path.
    pub path: LinkPath,
    /// The reason, for people: the setting, or what others have set up.
    pub why: Arc<str>,
}

impl ChosenPath {
    /// Returns a path with its reason.
    pub fn new(path: LinkPath, why: impl Into<Arc<str>>) -> Self {
        Self { path, why: why.into() }
    }

    /// Returns netfilter, with its reason.
    pub fn netfilter(why: impl Into<Arc<str>>) -> Self {
        let why = why.into();
        Self { path: LinkPath::Netfilter { why: Arc::clone(&why) }, why }
    }
}

/// The environment variables that set HTTP proxies, as in Go's `httpproxy.FromEnvironment`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxyVariables {
    /// `HTTPS_PROXY`: the proxy for servers with `https`.
    pub https: Option<ProxyVariable>,
    /// `HTTP_PROXY`: the proxy for servers with `http`.
    pub http: Option<ProxyVariable>,
    /// `NO_PROXY`: servers that are reached without a proxy.
    pub no_proxy: Option<ProxyVariable>,
}

/// An environment variable that is set and not empty.
#[derive(Clone, PartialEq, Eq)]
pub struct ProxyVariable {
    /// The name, in upper or lower case.
    pub name: &'static str,
    /// The value. It may contain a password.
    pub value: String,
}

impl ProxyVariables {
    /// Reads the variables. The name in upper case comes before the name in lower case.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let first = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| {
                let value = variable(name).filter(|value| !value.is_empty())?;
                Some(ProxyVariable { name, value })
            })
        };
        Self {
            https: first(["HTTPS_PROXY", "https_proxy"]),
            http: first(["HTTP_PROXY", "http_proxy"]),
            no_proxy: first(["NO_PROXY", "no_proxy"]),
        }
    }
}

// Never prints a value, because of the passwords.
impl fmt::Debug for ProxyVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyVariables").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_ranges_have_two_ports_in_order() {
        assert_eq!(PortRange::parse("1024-29999"), Some(PortRange { first: 1_024, last: 29_999 }));
        for text in ["", "1024", "2-1", "0-1", "1-65536", "1-2-3", "a-b"] {
            assert_eq!(PortRange::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn port_ranges_with_a_port_in_common_overlap() {
        let range = |first, last| PortRange { first, last };
        assert_eq!(range(1, 5).common(range(5, 9)), Some(range(5, 5)));
        assert_eq!(range(5, 9).common(range(1, 7)), Some(range(5, 7)));
        assert_eq!(range(1, 4).common(range(5, 9)), None);
        assert_eq!(range(5, 9).common(range(1, 4)), None);
    }
}
