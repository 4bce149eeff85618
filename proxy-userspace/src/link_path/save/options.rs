//! The options of iptables that shunt knows, by match or target.

/// What an option's arguments say about the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Nothing: a comment or counter.
    Nothing,
    Plain,
    Source,
    Destination,
    /// A list of destination ports.
    Ports,
    /// A type of destination, such as `LOCAL`.
    DestinationType,
    /// A set, and `src` or `dst` for each part of its elements.
    Set,
    /// A list of fields to count by, such as `srcip,dstport`.
    Fields,
    /// The value and mask of the packet's mark.
    Mark,
    /// The value and mask of the connection's mark.
    ConnectionMark,
    /// A list of states, with `DNAT` and `SNAT` for translated connections.
    State,
    ConnectionAddress,
    OriginalDestination,
    ReversePath,
}

use Reading as R;

/// The name of a match (empty for options without one), its option, the number of arguments, and
/// what they say.
type KnownOption = (&'static str, &'static str, usize, Reading);

/// The options of iptables-extensions(8) that the kernel evaluates alike in both paths, or with a
/// difference that the judgement knows.
pub(super) const OPTIONS: &[KnownOption] = &[
    ("", "-s", 1, R::Source),
    ("", "-d", 1, R::Destination),
    ("", "-i", 1, R::Plain),
    ("", "-o", 1, R::Plain),
    ("", "-p", 1, R::Plain),
    ("", "-f", 0, R::Plain),
    ("tcp", "--sport", 1, R::Source),
    ("tcp", "--dport", 1, R::Ports),
    ("tcp", "--tcp-flags", 2, R::Plain),
    ("tcp", "--syn", 0, R::Plain),
    ("tcp", "--tcp-option", 1, R::Plain),
    ("udp", "--sport", 1, R::Source),
    ("udp", "--dport", 1, R::Ports),
    ("sctp", "--sport", 1, R::Source),
    ("sctp", "--dport", 1, R::Ports),
    ("icmp", "--icmp-type", 1, R::Plain),
    ("icmp6", "--icmpv6-type", 1, R::Plain),
    ("multiport", "--sports", 1, R::Source),
    ("multiport", "--dports", 1, R::Ports),
    ("multiport", "--ports", 1, R::Destination),
    ("iprange", "--src-range", 1, R::Source),
    ("iprange", "--dst-range", 1, R::Destination),
    ("comment", "--comment", 1, R::Nothing),
    ("nfacct", "--nfacct-name", 1, R::Nothing),
    ("conntrack", "--ctstate", 1, R::State),
    ("state", "--state", 1, R::State),
    ("conntrack", "--ctproto", 1, R::Plain),
    ("conntrack", "--ctdir", 1, R::Plain),
    ("conntrack", "--ctorigsrc", 1, R::ConnectionAddress),
    ("conntrack", "--ctorigsrcport", 1, R::ConnectionAddress),
    ("conntrack", "--ctreplsrc", 1, R::ConnectionAddress),
    ("conntrack", "--ctreplsrcport", 1, R::ConnectionAddress),
    ("conntrack", "--ctorigdst", 1, R::OriginalDestination),
    ("conntrack", "--ctorigdstport", 1, R::OriginalDestination),
    ("mark", "--mark", 1, R::Mark),
    ("connmark", "--mark", 1, R::ConnectionMark),
    ("addrtype", "--src-type", 1, R::Source),
    ("addrtype", "--dst-type", 1, R::DestinationType),
    ("addrtype", "--limit-iface-in", 0, R::Plain),
    ("addrtype", "--limit-iface-out", 0, R::Plain),
    ("set", "--match-set", 2, R::Set),
    ("physdev", "--physdev-in", 1, R::Plain),
    ("physdev", "--physdev-out", 1, R::Plain),
    ("physdev", "--physdev-is-in", 0, R::Plain),
    ("physdev", "--physdev-is-out", 0, R::Plain),
    ("physdev", "--physdev-is-bridged", 0, R::Plain),
    ("limit", "--limit", 1, R::Plain),
    ("limit", "--limit-burst", 1, R::Plain),
    ("statistic", "--mode", 1, R::Plain),
    ("statistic", "--probability", 1, R::Plain),
    ("statistic", "--every", 1, R::Plain),
    ("statistic", "--packet", 1, R::Plain),
    ("recent", "--set", 0, R::Plain),
    ("recent", "--update", 0, R::Plain),
    ("recent", "--rcheck", 0, R::Plain),
    ("recent", "--remove", 0, R::Plain),
    ("recent", "--seconds", 1, R::Plain),
    ("recent", "--reap", 0, R::Plain),
    ("recent", "--hitcount", 1, R::Plain),
    ("recent", "--name", 1, R::Plain),
    ("recent", "--mask", 1, R::Plain),
    ("recent", "--rsource", 0, R::Source),
    ("recent", "--rdest", 0, R::Destination),
    ("hashlimit", "--hashlimit-upto", 1, R::Plain),
    ("hashlimit", "--hashlimit-above", 1, R::Plain),
    ("hashlimit", "--hashlimit-burst", 1, R::Plain),
    ("hashlimit", "--hashlimit-mode", 1, R::Fields),
    ("hashlimit", "--hashlimit-name", 1, R::Nothing),
    ("hashlimit", "--hashlimit-srcmask", 1, R::Plain),
    ("hashlimit", "--hashlimit-htable-size", 1, R::Plain),
    ("hashlimit", "--hashlimit-htable-max", 1, R::Plain),
    ("hashlimit", "--hashlimit-htable-expire", 1, R::Plain),
    ("hashlimit", "--hashlimit-htable-gcinterval", 1, R::Plain),
    ("length", "--length", 1, R::Plain),
    ("mac", "--mac-source", 1, R::Plain),
    ("ttl", "--ttl-eq", 1, R::Plain),
    ("ttl", "--ttl-lt", 1, R::Plain),
    ("ttl", "--ttl-gt", 1, R::Plain),
    ("hl", "--hl-eq", 1, R::Plain),
    ("hl", "--hl-lt", 1, R::Plain),
    ("hl", "--hl-gt", 1, R::Plain),
    ("dscp", "--dscp", 1, R::Plain),
    ("tos", "--tos", 1, R::Plain),
    ("pkttype", "--pkt-type", 1, R::Plain),
    ("rt", "--rt-type", 1, R::Plain),
    ("rt", "--rt-segsleft", 1, R::Plain),
    ("owner", "--uid-owner", 1, R::Plain),
    ("owner", "--gid-owner", 1, R::Plain),
    ("owner", "--socket-exists", 0, R::Plain),
    ("rpfilter", "--loose", 0, R::ReversePath),
    ("rpfilter", "--validmark", 0, R::ReversePath),
    ("rpfilter", "--accept-local", 0, R::ReversePath),
    ("rpfilter", "--invert", 0, R::ReversePath),
];

/// Returns the option of a match. The last of several `-m` has the option if it knows it.
pub(super) fn find(module: &str, option: &str) -> Option<(usize, Reading)> {
    let entry = |name: &str| OPTIONS.iter().find(|known| known.0 == name && known.1 == option);
    entry(module).or_else(|| entry("")).map(|known| (known.2, known.3))
}

/// Returns true if options of this match are known.
pub(super) fn knows_match(module: &str) -> bool {
    OPTIONS.iter().any(|known| known.0 == module)
}
