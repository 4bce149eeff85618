//! Keeps packets of connections that IPVS carries back while they are handed over, with a table of nftables that is there for
//! no longer.
//!
//! Such a packet would begin a connection anew: with another endpoint, or with the node itself, which would reset it. Dropped, it
//! is sent again. First packets of TCP connections pass, and so does all that netfilter translates.

use std::{collections::BTreeSet, fmt::Write as _};

use crate::{
    kernel::{KernelError, command::SearchPath, ipvs::VirtualKey, nft::Nft},
    model::IpFamily,
};

/// The table, with its family.
const TABLE: &str = "inet shunt-handover";

/// While it lives, packets are kept back.
pub(super) struct Hold(Nft);

impl Hold {
    /// Keeps back what belongs to connections to these virtual servers.
    pub(super) fn put(path: &SearchPath, servers: &[VirtualKey]) -> Result<Self, KernelError> {
        // Dropped also where putting fails: one that a process left that was killed goes too.
        let hold = Self(Nft::new(path.clone()));
        hold.0.apply(&script(servers))?;
        Ok(hold)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = self.0.delete_table(TABLE) {
            tracing::warn!(%error, table = TABLE, "cannot remove the table: packets of connections may be dropped");
        }
    }
}

/// Removes what a process left that was killed while it handed over. Where there is no nft, or the kernel has no nftables, there is
/// nothing.
pub(super) fn remove_left(path: &SearchPath) -> Result<(), KernelError> {
    match Nft::new(path.clone()).remove_table(TABLE) {
        Err(KernelError::CommandNotFound { .. }) => Ok(()),
        removed => removed,
    }
}

/// After conntrack (-200) and before anything is translated (-100). Ports apart from addresses, since nft takes destination
/// ports as no part of a longer key; what else this holds back is sent again too.
fn script(servers: &[VirtualKey]) -> String {
    let mut text = format!("table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n");
    let ports = servers.iter().map(|key| key.address.port().to_string());
    text.extend(set("ports", "inet_service", ports));
    for (family, name, kind, _) in FAMILIES {
        let addresses = servers.iter().map(|key| key.address.ip());
        let of_family = addresses.filter(|address| IpFamily::of(*address) == family);
        text.extend(set(name, kind, of_family.map(|address| address.to_string())));
    }
    let is_served = |family| servers.iter().any(|key| IpFamily::of(key.address.ip()) == family);
    for hook in ["prerouting", "output"] {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "chain {hook} {{\ntype filter hook {hook} priority -150; policy accept;\nct status dnat accept\n\
             meta l4proto tcp tcp flags & syn == 0 ct state new,invalid drop"
        );
        for (_, set, _, word) in FAMILIES.iter().filter(|(family, ..)| is_served(*family)) {
            let _ = writeln!(
                text,
                "ct state established ct original {word} daddr @{set} meta l4proto {{ tcp, udp, sctp }} \
                 ct original proto-dst @ports drop"
            );
        }
        text.push_str("}\n");
    }
    text + "}\n"
}

/// A family's set, what it holds, and nft's word for the family.
const FAMILIES: [(IpFamily, &str, &str, &str); 2] =
    [(IpFamily::V4, "addresses4", "ipv4_addr", "ip"), (IpFamily::V6, "addresses6", "ipv6_addr", "ip6")];

/// A set of these; none of nothing.
fn set(name: &str, kind: &str, elements: impl Iterator<Item = String>) -> Option<String> {
    let elements: Vec<String> = elements.collect::<BTreeSet<_>>().into_iter().collect();
    let elements = (!elements.is_empty()).then(|| elements.join(", "));
    elements.map(|elements| format!("set {name} {{ type {kind}; elements = {{ {elements} }}; }}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Protocol;

    #[test]
    fn only_families_with_virtual_servers_are_kept_back() {
        let key = |address: &str| VirtualKey { protocol: Protocol::Tcp, address: address.parse().unwrap() };
        let text = script(&[key("10.96.0.1:80"), key("10.96.0.2:80"), key("192.168.57.11:30080")]);
        assert!(
            text.contains("{ type ipv4_addr; elements = { 10.96.0.1, 10.96.0.2, 192.168.57.11 }; }"),
            "{text}"
        );
        assert!(text.contains("{ type inet_service; elements = { 30080, 80 }; }"), "{text}");
        assert_eq!(text.matches("ct original ip daddr @addresses4").count(), 2, "{text}");
        assert!(!text.contains("addresses6"), "{text}");
        assert!(script(&[key("[fd96::1]:80")]).contains("elements = { fd96::1 }"));
    }
}
