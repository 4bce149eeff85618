//! The netfilter rules in this kernel, with real packets through a node: what is marked, as programs on links would mark it, is
//! masqueraded, refused or let through; and what conntrack forgets of UDP flows. Needs root, nft and iptables.

mod conntrack;
mod iptables_mode;
mod iptables_refused;
mod node;
mod packets;
mod places;
