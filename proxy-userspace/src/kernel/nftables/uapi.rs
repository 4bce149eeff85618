//! Constants of `linux/netfilter/nf_tables.h` that libc lacks.

use crate::kernel::netlink::kernel_constants;

kernel_constants! {
    // enum nft_table_attributes. The name of the table has the number 1 in all messages.
    NFTA_TABLE_NAME = 1, NFTA_TABLE_USERDATA = 6,
    // enum nft_chain_attributes, enum nft_hook_attributes
    NFTA_CHAIN_NAME = 3, NFTA_CHAIN_HOOK = 4, NFTA_CHAIN_TYPE = 7,
    NFTA_HOOK_HOOKNUM = 1, NFTA_HOOK_PRIORITY = 2,
    // enum nft_rule_attributes, enum nft_list_attributes, enum nft_expr_attributes
    NFTA_RULE_CHAIN = 2, NFTA_RULE_EXPRESSIONS = 4, NFTA_RULE_USERDATA = 7,
    NFTA_LIST_ELEM = 1,
    NFTA_EXPR_NAME = 1, NFTA_EXPR_DATA = 2,
    // enum nft_set_attributes, enum nft_set_desc_attributes
    NFTA_SET_NAME = 2, NFTA_SET_FLAGS = 3, NFTA_SET_KEY_TYPE = 4, NFTA_SET_KEY_LEN = 5,
    NFTA_SET_DATA_TYPE = 6, NFTA_SET_DATA_LEN = 7, NFTA_SET_DESC = 9, NFTA_SET_ID = 10,
    NFTA_SET_TIMEOUT = 11, NFTA_SET_USERDATA = 13,
    NFTA_SET_DESC_SIZE = 1,
    // enum nft_set_elem_list_attributes, enum nft_set_elem_attributes
    NFTA_SET_ELEM_LIST_SET = 2, NFTA_SET_ELEM_LIST_ELEMENTS = 3,
    NFTA_SET_ELEM_KEY = 1, NFTA_SET_ELEM_DATA = 2, NFTA_SET_ELEM_EXPIRATION = 5,
    NFTA_SET_ELEM_USERDATA = 6,
    // enum nft_data_attributes, enum nft_verdict_attributes
    NFTA_DATA_VALUE = 1, NFTA_DATA_VERDICT = 2,
    NFTA_VERDICT_CODE = 1, NFTA_VERDICT_CHAIN = 2,
    // The attributes of expressions: enum nft_bitwise_attributes, enum nft_cmp_attributes …
    NFTA_BITWISE_SREG = 1, NFTA_BITWISE_DREG = 2, NFTA_BITWISE_LEN = 3, NFTA_BITWISE_MASK = 4,
    NFTA_BITWISE_XOR = 5,
    NFTA_CMP_SREG = 1, NFTA_CMP_OP = 2, NFTA_CMP_DATA = 3,
    NFTA_CT_DREG = 1, NFTA_CT_KEY = 2,
    NFTA_DYNSET_SET_NAME = 1, NFTA_DYNSET_OP = 3, NFTA_DYNSET_SREG_KEY = 4,
    NFTA_FIB_DREG = 1, NFTA_FIB_RESULT = 2, NFTA_FIB_FLAGS = 3,
    NFTA_IMMEDIATE_DREG = 1, NFTA_IMMEDIATE_DATA = 2,
    NFTA_LIMIT_RATE = 1, NFTA_LIMIT_UNIT = 2, NFTA_LIMIT_BURST = 3,
    NFTA_LOOKUP_SET = 1, NFTA_LOOKUP_SREG = 2, NFTA_LOOKUP_DREG = 3,
    NFTA_MASQ_FLAGS = 1, NFTA_MASQ_REG_PROTO_MIN = 2, NFTA_MASQ_REG_PROTO_MAX = 3,
    NFTA_META_DREG = 1, NFTA_META_KEY = 2, NFTA_META_SREG = 3,
    NFTA_NAT_TYPE = 1, NFTA_NAT_FAMILY = 2, NFTA_NAT_REG_ADDR_MIN = 3, NFTA_NAT_REG_PROTO_MIN = 5,
    NFTA_NG_DREG = 1, NFTA_NG_MODULUS = 2, NFTA_NG_TYPE = 3, NFTA_NG_OFFSET = 4,
    NFTA_PAYLOAD_DREG = 1, NFTA_PAYLOAD_BASE = 2, NFTA_PAYLOAD_OFFSET = 3, NFTA_PAYLOAD_LEN = 4,
    NFTA_REJECT_TYPE = 1, NFTA_REJECT_ICMP_CODE = 2,
    // enum nft_fib_result, enum nft_fib_flags
    NFT_FIB_RESULT_ADDRTYPE = 3, NFTA_FIB_F_SADDR = 1,
    // linux/netfilter/nf_nat.h
    NF_NAT_RANGE_PROTO_SPECIFIED = 1 << 1, NF_NAT_RANGE_PROTO_RANDOM_FULLY = 1 << 4,
}
