//! The netfilter rules in this kernel, with real packets through a node. Packets with the marks of
//! link programs are masqueraded, rejected or accepted. Stale UDP flows are deleted. Needs root,
//! nft and iptables.

mod conntrack;
mod handover;
mod iptables_mode;
mod iptables_refused;
mod node;
mod packets;
mod places;
