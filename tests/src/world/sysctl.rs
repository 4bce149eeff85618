//! The sysctls of one network namespace: forwarding, no filters or rate limits, addresses usable at once.

use std::{fs, ops::RangeInclusive};

use anyhow::{Context as _, Result};

/// Ports that cases name, besides those below the kernel's own range: sockets that name none get none of these. A port in `TIME_WAIT`
/// that was got from the kernel cannot be bound, also not with `SO_REUSEADDR`.
pub const RESERVED_PORTS: [RangeInclusive<u16>; 2] = [40_000..=40_099, 45_000..=45_399];
/// Where the kernel's own range begins.
const FIRST_OF_KERNEL: u16 = 32_768;

/// Whether a case may name this port for a client's own.
pub fn is_valid_source_port(port: u16) -> bool {
    (1..FIRST_OF_KERNEL).contains(&port) || RESERVED_PORTS.iter().any(|range| range.contains(&port))
}

/// What every namespace gets, before its links are made, so that `default` takes effect on them.
const EVERYWHERE: &[(&str, &str)] = &[
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv6/icmp/ratelimit", "0"),
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
    // No duplicate address detection: an IPv6 address works as soon as it is there.
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    // A node that sends a packet back out where it came in must not make callers go round it the next time.
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv6/conf/all/accept_redirects", "0"),
    ("ipv6/conf/default/accept_redirects", "0"),
];

/// What nodes get on top: they route for their pods.
const ON_NODES: &[(&str, &str)] = &[
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
];

/// Of both families.
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Sets the sysctls of the calling thread's namespace.
pub(super) fn apply(is_node: bool) -> Result<()> {
    let on_nodes = if is_node { ON_NODES } else { &[] };
    for (name, value) in EVERYWHERE.iter().chain(on_nodes) {
        let path = format!("/proc/sys/net/{name}");
        fs::write(&path, value).with_context(|| format!("set {path} to {value}"))?;
    }
    let named = RESERVED_PORTS.map(|range| format!("{}-{}", range.start(), range.end())).join(",");
    fs::write(RESERVED, &named).with_context(|| format!("set {RESERVED} to {named}"))
}
