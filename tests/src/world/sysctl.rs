//! Sets the sysctls of one network namespace: forwarding, no filters or rate limits, addresses
//! usable immediately.

use std::{fs, ops::RangeInclusive};

use anyhow::{Context as _, Result};

/// Source ports that cases may use, in addition to the ports below the kernel's ephemeral range.
/// Sockets without a fixed port never get these ports. A port in `TIME_WAIT` that the kernel had
/// chosen cannot be bound, not even with `SO_REUSEADDR`.
pub const RESERVED_PORTS: [RangeInclusive<u16>; 2] = [40_000..=40_099, 45_000..=45_399];
/// The start of the kernel's ephemeral range.
const FIRST_EPHEMERAL: u16 = 32_768;

/// Returns true if a case may use this source port.
pub fn is_valid_source_port(port: u16) -> bool {
    (1..FIRST_EPHEMERAL).contains(&port) || RESERVED_PORTS.iter().any(|range| range.contains(&port))
}

/// The sysctls of every namespace, set before its links are created, so that `default` applies to
/// them.
const EVERYWHERE: &[(&str, &str)] = &[
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv6/icmp/ratelimit", "0"),
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
    // No duplicate address detection, so that an IPv6 address works immediately.
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    // A node may send a packet back out of the link on which it arrived. Clients must not bypass
    // the node afterwards.
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv6/conf/all/accept_redirects", "0"),
    ("ipv6/conf/default/accept_redirects", "0"),
];

/// The additional sysctls of nodes, which route for their pods.
const ON_NODES: &[(&str, &str)] = &[
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
];

/// Applies to both families.
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
