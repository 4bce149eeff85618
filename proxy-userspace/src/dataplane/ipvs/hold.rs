//! Keeps packets of connections that IPVS carries back while they are handed over, with a table of nftables that is there for
//! no longer.
//!
//! Such a packet would begin a connection anew: with another endpoint, or with the node itself, which would reset it. Dropped, it
//! is sent again. First packets of TCP connections pass, and so does all that netfilter translates.

use std::fmt::Write as _;

use crate::{
    kernel::{KernelError, command::SearchPath, ipvs::VirtualKey, nft::Nft},
    model::{IpFamily, Protocol},
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
        if let Err(error) = remove(&self.0) {
            tracing::warn!(%error, table = TABLE, "cannot remove the table: packets of connections may be dropped");
        }
    }
}

/// Removes what a process left that was killed while it handed over. Where there is no nft, there is nothing.
pub(super) fn remove_left(path: &SearchPath) -> Result<(), KernelError> {
    match remove(&Nft::new(path.clone())) {
        Err(KernelError::CommandNotFound { .. }) => Ok(()),
        removed => removed,
    }
}

fn remove(nft: &Nft) -> Result<(), KernelError> {
    match nft.list_table(TABLE)? {
        Some(_) => nft.apply(&format!("delete table {TABLE}\n")),
        None => Ok(()),
    }
}

/// After conntrack (-200) and before anything is translated (-100).
fn script(servers: &[VirtualKey]) -> String {
    let mut text = format!("table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n");
    for (family, set, kind, _) in FAMILIES {
        let of_family = servers.iter().filter(|key| IpFamily::of(key.address.ip()) == family);
        let elements: Vec<String> = of_family.map(element).collect();
        if !elements.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "set {set} {{ type {kind} . inet_proto . inet_service; elements = {{ {} }}; }}",
                elements.join(", ")
            );
        }
    }
    for hook in ["prerouting", "output"] {
        let _ = writeln!(
            text,
            "chain {hook} {{\ntype filter hook {hook} priority -150; policy accept;\nct status dnat accept\n\
             meta l4proto tcp tcp flags & syn == 0 ct state new,invalid drop"
        );
        for (family, set, _, word) in FAMILIES {
            if servers.iter().any(|key| IpFamily::of(key.address.ip()) == family) {
                let _ = writeln!(
                    text,
                    "ct state established ct original {word} daddr . meta l4proto . ct original proto-dst @{set} drop"
                );
            }
        }
        text.push_str("}\n");
    }
    text + "}\n"
}

/// A family's set, what it holds of addresses, and nft's word for it.
const FAMILIES: [(IpFamily, &str, &str, &str); 2] =
    [(IpFamily::V4, "servers4", "ipv4_addr", "ip"), (IpFamily::V6, "servers6", "ipv6_addr", "ip6")];

fn element(key: &VirtualKey) -> String {
    let protocol = match key.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    };
    format!("{} . {protocol} . {}", key.address.ip(), key.address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_families_with_virtual_servers_are_kept_back() {
        let key = |address: &str| VirtualKey { protocol: Protocol::Tcp, address: address.parse().unwrap() };
        let text = script(&[key("10.96.0.1:80"), key("192.168.57.11:30080")]);
        assert!(text.contains("elements = { 10.96.0.1 . tcp . 80, 192.168.57.11 . tcp . 30080 };"), "{text}");
        assert!(text.contains("@servers4 drop") && !text.contains("servers6"), "{text}");
        assert!(script(&[key("[fd96::1]:80")]).contains("{ fd96::1 . tcp . 80 }"));
    }
}
