//! Constants of nf_tables and of the legacy iptables that libc lacks.

use crate::kernel::netlink::kernel_constants;

kernel_constants! {
    // linux/netfilter/nf_tables.h: enum nft_chain_attributes, enum nft_hook_attributes
    NFTA_CHAIN_HOOK = 4, NFTA_CHAIN_USE = 6, NFTA_CHAIN_TYPE = 7,
    NFTA_HOOK_HOOKNUM = 1,
    // enum nft_rule_attributes, enum nft_list_attributes, enum nft_expr_attributes
    NFTA_RULE_EXPRESSIONS = 4,
    NFTA_LIST_ELEM = 1,
    NFTA_EXPR_NAME = 1, NFTA_EXPR_DATA = 2,
    // linux/netfilter/nf_tables_compat.h: enum nft_target_attributes
    NFTA_TARGET_NAME = 1,
    // linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h
    IPT_SO_GET_INFO = 64, IP6T_SO_GET_INFO = 64,
}
