//! The allow-list: what others may do, at each stage of a packet's way, without noticing that link
//! programs translate instead of netfilter.
//!
//! What is not in these tables decides for netfilter.

/// A stage of a packet's way through netfilter, by what differs there between the two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Before netfilter's own translation at prerouting. In path `programs` the destination is
    /// already the endpoint. In path `netfilter` it still is the VIP.
    BeforeNat,
    /// A nat chain at prerouting, where netfilter translates. The destination differs as before.
    NatPrerouting,
    /// The same, for packets to the node itself and to ports that are no node ports.
    PublishedPort,
    /// After prerouting. Addresses and ports are the same in both paths.
    AfterNat,
    /// A nat chain at postrouting: the first packet of each connection.
    NatPostrouting,
    /// A nat chain at input or output. Packets of link programs do not begin connections at
    /// output, and are only delivered at input.
    NatLocal,
    /// After netfilter's translation at postrouting. In path `netfilter` the source of answers is
    /// the VIP by now. In path `programs` it still is the endpoint, because traffic control comes
    /// later.
    AfterSourceNat,
    /// Frames that a bridge forwards. Nothing is known not to matter.
    Bridge,
}

/// What a rule looks at, by what can differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MatchKind {
    /// See [`super::ruleset::Match::Plain`].
    Plain,
    /// The source address or port.
    Source,
    /// The destination address or port.
    Destination,
    /// The route back to the source, which no routing rule makes depend on the destination.
    ReversePath,
    /// The route back to the source, while a routing rule selects by source. The kernel's lookup
    /// uses the packet's destination as its source (`rpfilter_mt`, `nft_fib4_eval`).
    ReversePathByRule,
    /// Mark bits that are not shunt's.
    Mark,
    /// Mark bits of shunt. Link programs set them on each packet. Rules set them at prerouting,
    /// and on the first packet of a connection.
    OwnMark,
    /// The state of a connection.
    ConnectionState,
    /// Addresses of a connection that are the same after prerouting.
    ConnectionAddress,
    /// Whether netfilter translated the connection.
    Translation,
    /// The destination that the connection's first packet had.
    OriginalDestination,
    /// Something that shunt does not know.
    Unknown,
}

/// What a rule does, by what can differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// Accepts, drops or rejects.
    Verdict,
    /// Returns to the calling chain, or continues in another.
    Branch,
    /// Changes mark bits that are not shunt's, of the packet or the connection.
    SetMark,
    /// Changes mark bits of shunt.
    SetOwnMark,
    /// Writes a log.
    Log,
    /// Changes neither addresses nor ports.
    Modify,
    /// Translates the source.
    SourceNat,
    /// Translates the destination.
    DestinationNat,
    /// Something that shunt does not know.
    Unknown,
}

/// An entry of the allow-list: these kinds do not matter at these stages.
#[derive(Clone, Copy, Debug)]
pub struct Shape<K: 'static> {
    /// What a rule looks at or does.
    pub kinds: &'static [K],
    /// The stages at which nobody notices.
    pub stages: &'static [Stage],
    /// Programs that write such rules.
    pub writers: &'static str,
    /// Why it does not matter.
    pub reason: &'static str,
}

use ActionKind as A;
use MatchKind as M;
use Stage::{AfterNat, AfterSourceNat, BeforeNat, NatLocal, NatPostrouting, NatPrerouting, PublishedPort};

const ALL_BUT_BRIDGE: &[Stage] =
    &[BeforeNat, NatPrerouting, PublishedPort, AfterNat, NatPostrouting, NatLocal, AfterSourceNat];

/// What rules may look at.
pub const MATCHES: &[Shape<MatchKind>] = &[
    Shape {
        kinds: &[M::Plain],
        stages: ALL_BUT_BRIDGE,
        writers: "all firewalls and CNIs",
        reason: "link programs change neither links, protocols, flags, lengths nor the number of packets",
    },
    Shape {
        kinds: &[M::ConnectionState],
        stages: ALL_BUT_BRIDGE,
        writers: "Calico, Docker, firewalld, kube-router, ufw",
        reason: "a connection has the same state, whoever translates its packets",
    },
    Shape {
        kinds: &[M::Mark],
        stages: ALL_BUT_BRIDGE,
        writers: "AWS VPC CNI, Calico, Cilium, kube-router, CNI portmap",
        reason: "link programs leave other bits of the mark alone",
    },
    Shape {
        kinds: &[M::OwnMark],
        stages: &[NatPostrouting, NatLocal],
        writers: "flannel (returns what kube-proxy masquerades), the kubelet",
        reason: "the first packet of a connection has the same mark in both paths once it is routed",
    },
    Shape {
        kinds: &[M::Source],
        stages: &[BeforeNat, NatPrerouting, PublishedPort, AfterNat, NatPostrouting, NatLocal],
        writers: "CNIs that masquerade pods, CNI portmap, Docker, kube-router",
        reason: "the source is translated at postrouting in both paths",
    },
    Shape {
        kinds: &[M::ReversePath],
        stages: ALL_BUT_BRIDGE,
        writers: "Calico (raw), firewalld (IPv6)",
        reason: "the route back to the client does not depend on the destination",
    },
    Shape {
        kinds: &[M::Destination, M::ReversePathByRule, M::ConnectionAddress],
        stages: &[AfterNat, NatPostrouting, NatLocal, AfterSourceNat],
        writers: "CNIs that masquerade pods, Calico, firewalld, kube-router, ufw",
        reason: "the destination is the endpoint in both paths after prerouting",
    },
    Shape {
        kinds: &[M::Destination],
        stages: &[PublishedPort],
        writers: "Docker, CNI portmap",
        reason: "no VIP of a Service is a port that is published on the node, unless it is a node port",
    },
];

/// What rules may do.
pub const ACTIONS: &[Shape<ActionKind>] = &[
    Shape {
        kinds: &[A::Verdict],
        stages: &[BeforeNat, PublishedPort, AfterNat, NatPostrouting, NatLocal, AfterSourceNat],
        writers: "all firewalls and CNIs",
        reason: "the same packets get the verdict in both paths, if the rule's matches are the same",
    },
    Shape {
        kinds: &[A::Branch],
        stages: ALL_BUT_BRIDGE,
        writers: "all firewalls and CNIs",
        reason: "the same packets reach the other rules, if the rule's matches are the same",
    },
    Shape {
        kinds: &[A::SetMark],
        stages: ALL_BUT_BRIDGE,
        writers: "AWS VPC CNI, Calico, Cilium, kube-router, CNI portmap",
        reason: "link programs leave other bits of the mark alone, and conntrack its own mark",
    },
    Shape {
        kinds: &[A::SetOwnMark],
        stages: &[NatPostrouting, NatLocal],
        writers: "CNIs that ask kube-proxy to masquerade",
        reason: "the first packet of a connection has the same mark in both paths once it is routed",
    },
    Shape {
        kinds: &[A::Log],
        stages: &[PublishedPort, AfterNat, NatPostrouting, NatLocal],
        writers: "Calico, kube-router, ufw",
        reason: "a log shows the same addresses in both paths after prerouting",
    },
    Shape {
        kinds: &[A::Modify],
        stages: ALL_BUT_BRIDGE,
        writers: "firewalld and others that limit the maximum segment size",
        reason: "no shunt program looks at these fields",
    },
    Shape {
        kinds: &[A::SourceNat],
        stages: &[NatPostrouting, NatLocal],
        writers: "CNIs that masquerade pods that leave the cluster, Docker",
        reason: "the first packet of a connection is the same in both paths once it is routed",
    },
    Shape {
        kinds: &[A::DestinationNat],
        stages: &[PublishedPort, NatLocal],
        writers: "Docker, CNI portmap; at output: Docker, Calico, NodeLocal DNSCache",
        reason: "packets of Services never begin a connection to such a port",
    },
];

/// Chains that are allowed as a whole, with the jumps to them.
#[derive(Clone, Copy, Debug)]
pub struct ChainShape {
    /// The names. A name that ends in `-` stands for all names that begin with it and go on with a
    /// hash.
    pub names: &'static [&'static str],
    /// Programs that write such chains.
    pub writers: &'static str,
    /// Why they do not matter.
    pub reason: &'static str,
}

/// Chains of iptables tables.
pub const CHAINS: &[ChainShape] = &[
    ChainShape { names: &["SHUNT-"], writers: "shunt", reason: "they are shunt's own, and know both paths" },
    ChainShape {
        names: &[
            "KUBE-SERVICES",
            "KUBE-EXTERNAL-SERVICES",
            "KUBE-NODEPORTS",
            "KUBE-POSTROUTING",
            "KUBE-MARK-MASQ",
            "KUBE-FORWARD",
            "KUBE-PROXY-FIREWALL",
            "KUBE-PROXY-CANARY",
            "KUBE-PROXY-ROUTE-LOCALNET",
            "KUBE-SVC-",
            "KUBE-SVL-",
            "KUBE-EXT-",
            "KUBE-XLB-",
            "KUBE-FW-",
            "KUBE-SEP-",
        ],
        writers: "kube-proxy and shunt in iptables mode",
        reason: "they make Services, as shunt does; shunt removes them at the takeover",
    },
    ChainShape {
        names: &[
            "KUBE-NODE-PORT",
            "KUBE-LOAD-BALANCER",
            "KUBE-SOURCE-RANGES-FIREWALL",
            "KUBE-IPVS-FILTER",
            "KUBE-IPVS-OUT-FILTER",
        ],
        writers: "kube-proxy and shunt in ipvs mode",
        reason: "they make Services, as shunt does; shunt removes them at the takeover",
    },
    ChainShape {
        names: &["KUBE-FIREWALL", "KUBE-MARK-DROP", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT"],
        writers: "the kubelet",
        reason: "KUBE-FIREWALL looks for a translation only of packets to 127.0.0.0/8, where no endpoint is. \
                 The others are empty, or nothing jumps to them",
    },
];

/// The tables of iptables.
pub const IPTABLES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];

/// Returns true if a chain, and every jump to it, is allowed as a whole.
pub fn is_allowed_chain(name: &str) -> bool {
    let is_hash = |rest: &str| rest.bytes().all(|byte| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b'-'));
    CHAINS.iter().flat_map(|shape| shape.names).any(|known| match name.strip_prefix(known) {
        Some(rest) if known.ends_with('-') => !rest.is_empty() && is_hash(rest),
        Some(rest) => rest.is_empty(),
        None => false,
    })
}

/// Returns true if the allow-list has this kind at this stage.
pub(super) fn allows<K: PartialEq>(shapes: &[Shape<K>], kind: &K, stage: Stage) -> bool {
    shapes.iter().any(|shape| shape.kinds.contains(kind) && shape.stages.contains(&stage))
}

/// A filter of traffic control that does not matter.
#[derive(Clone, Copy, Debug)]
pub struct FilterShape {
    /// The kind of the filter.
    pub kind: &'static str,
    /// The kind of the link to which it redirects all that it matches.
    pub redirects_to: &'static str,
    /// Programs that write such filters.
    pub writers: &'static str,
    /// Why they do not matter.
    pub reason: &'static str,
}

/// Filters at ingress. Others, and all at the egress of a clsact qdisc, decide for netfilter.
///
/// Qdiscs without filters do not matter: the root qdisc of a link gets answers after they are
/// translated. XDP programs do not matter either: they get packets before traffic control, with the
/// VIP in both paths, and no answer leaves through them.
pub const FILTERS: &[FilterShape] = &[
    FilterShape {
        kind: "u32",
        redirects_to: "ifb",
        writers: "CNI bandwidth",
        reason: "the ifb link limits the rate of a pod, and hands the packets back as they are",
    },
    FilterShape {
        kind: "matchall",
        redirects_to: "ifb",
        writers: "CNI bandwidth",
        reason: "the ifb link limits the rate of a pod, and hands the packets back as they are",
    },
];
