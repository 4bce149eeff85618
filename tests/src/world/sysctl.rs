//! The sysctls of one network namespace: forwarding, no filters or rate limits, addresses usable at once.

use std::fs;

use anyhow::{Context as _, Result};

/// Sockets that name no port get one from here on, in both families. Below it are those that cases name: a port in
/// `TIME_WAIT` that was got from the kernel cannot be bound, also not with `SO_REUSEADDR`.
pub const FIRST_FREE_PORT: u16 = 46000;

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
    // From FIRST_FREE_PORT: one that a case names is never taken by a connection of a case before.
    ("ipv4/ip_local_port_range", "46000 60999"),
];

/// What nodes get on top: they route for their pods.
const ON_NODES: &[(&str, &str)] = &[
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
];

/// Sets the sysctls of the calling thread's namespace.
pub(super) fn apply(is_node: bool) -> Result<()> {
    let on_nodes = if is_node { ON_NODES } else { &[] };
    for (name, value) in EVERYWHERE.iter().chain(on_nodes) {
        let path = format!("/proc/sys/net/{name}");
        fs::write(&path, value).with_context(|| format!("set {path} to {value}"))?;
    }
    Ok(())
}
