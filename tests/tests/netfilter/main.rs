//! The netfilter rules in this kernel, with real packets through a node: what is marked, as programs on links would mark it, is
//! masqueraded, refused or let through. Needs root, nft and iptables.

mod node;
mod packets;
mod places;
