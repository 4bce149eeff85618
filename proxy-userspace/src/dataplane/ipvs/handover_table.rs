//! An nftables table that drops packets during the handover of connections from IPVS to conntrack.
//!
//! It drops the packets of connections that IPVS carries. Such a packet would otherwise begin a new
//! connection: with another endpoint, or with the node itself, which would reset it. The sender
//! retransmits a dropped packet. The first packets of TCP connections pass, and so does everything
//! that netfilter translates.

use std::{collections::BTreeSet, fmt::Write as _};

use crate::{
    kernel::{KernelError, command::Launcher, ipvs::VirtualKey, nft::Nft},
    model::IpFamily,
};

/// The family and name of the table.
const TABLE: &str = "inet shunt-handover";

/// The table. Dropping this value deletes the table.
pub(super) struct HandoverTable(Nft);

impl HandoverTable {
    /// Creates the table for connections to these virtual servers.
    pub(super) fn create(launcher: &Launcher, servers: &[VirtualKey]) -> Result<Self, KernelError> {
        // If this fails, dropping the value deletes the table of a process that was killed.
        let table = Self(Nft::new(launcher.clone()));
        table.0.apply(&script(servers))?;
        Ok(table)
    }
}

impl Drop for HandoverTable {
    fn drop(&mut self) {
        if let Err(error) = self.0.delete_table(TABLE) {
            tracing::warn!(
                %error,
                table = TABLE,
                "cannot delete the nftables table: it drops packets of connections; delete it with nft"
            );
        }
    }
}

/// Deletes the table of a process that was killed during a handover. Without nft, or without
/// nftables in the kernel, there is no table.
pub(super) fn remove(launcher: &Launcher) -> Result<(), KernelError> {
    match Nft::new(launcher.clone()).remove_table(TABLE) {
        Err(KernelError::CommandNotFound { .. }) => Ok(()),
        removed => removed,
    }
}

/// Returns the nft script. The chains run after conntrack (-200) and before any translation (-100).
/// Ports and addresses are in separate sets, because nft does not accept the original destination
/// port in a concatenated key. The rules can therefore match other packets. Their senders
/// retransmit them too.
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

/// Each family with the name of its set, the type of the elements, and nft's name of the family.
const FAMILIES: [(IpFamily, &str, &str, &str); 2] =
    [(IpFamily::V4, "addresses4", "ipv4_addr", "ip"), (IpFamily::V6, "addresses6", "ipv6_addr", "ip6")];

/// Returns the definition of a set, or `None` if it has no elements.
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
    fn rules_exist_only_for_families_with_virtual_servers() {
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
