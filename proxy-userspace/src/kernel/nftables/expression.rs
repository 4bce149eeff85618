//! Writes the statements of a rule as the kernel's expressions.
//!
//! The registers and the order of attributes are those of nft, so that nft reads the rules back as
//! what they mean.

use std::net::SocketAddr;

use ipnet::IpNet;
use libc::{
    NF_DROP, NFT_CMP_EQ, NFT_CMP_NEQ, NFT_CONTINUE, NFT_CT_STATE, NFT_CT_STATUS, NFT_DYNSET_OP_UPDATE,
    NFT_GOTO, NFT_JUMP, NFT_META_IIFNAME, NFT_META_L4PROTO, NFT_META_MARK, NFT_META_NFTRACE, NFT_NAT_DNAT,
    NFT_NG_RANDOM, NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, NFT_REG_1, NFT_REG_2,
    NFT_REG_VERDICT, NFT_REG32_00, NFT_REJECT_ICMP_UNREACH, NFT_RETURN, c_int,
};

use super::{
    IpFamily, NftFamily,
    statement::{Rule, Selector, Statement, Verdict, octets},
    uapi::*,
};
use crate::kernel::netlink::MessageBuffer;

/// `NF_CT_STATE_BIT(IP_CT_NEW)` and `IPS_DST_NAT`.
const STATE_NEW: u32 = 1 << 3;
const STATUS_DNAT: u32 = 1 << 5;
/// The offset of the destination port in the headers of TCP, UDP and SCTP.
const PORT_OFFSET: u32 = 2;

/// Writes the expressions of a rule as a list.
pub(super) fn write(rule: &Rule, family: IpFamily, to: &mut MessageBuffer) {
    let mut expressions = Expressions { to, family };
    for statement in &rule.statements {
        expressions.statement(statement);
    }
}

/// Writes a verdict as the data of a register.
pub(super) fn write_verdict(verdict: &Verdict, to: &mut MessageBuffer) {
    let (code, chain) = match verdict {
        Verdict::Drop => (NF_DROP, None),
        Verdict::Continue => (NFT_CONTINUE, None),
        Verdict::Return => (NFT_RETURN, None),
        Verdict::Jump(chain) => (NFT_JUMP, Some(chain)),
        Verdict::Goto(chain) => (NFT_GOTO, Some(chain)),
    };
    to.nested(NFTA_DATA_VERDICT, |to| {
        to.be_int(NFTA_VERDICT_CODE, code);
        if let Some(chain) = chain {
            to.string(NFTA_VERDICT_CHAIN, chain);
        }
    });
}

struct Expressions<'a> {
    to: &'a mut MessageBuffer,
    family: IpFamily,
}

/// Returns the comparison for a value that must be equal, or that must not.
fn comparison(is_equal: bool) -> c_int {
    if is_equal { NFT_CMP_EQ } else { NFT_CMP_NEQ }
}

impl Expressions<'_> {
    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::InSet(key, set) => self.lookup(key, set, None),
            Statement::VerdictMap(key, map) => self.lookup(key, map, Some(NFT_REG_VERDICT)),
            Statement::Source { range, inside } => self.in_range(Selector::Source, range, *inside),
            Statement::Destination(range) => self.in_range(Selector::Destination, range, true),
            Statement::InputInterface { name, inside } => self.interface(name, *inside),
            Statement::SourceIsLocal => self.source_is_local(),
            Statement::StateNew => self.ct_has(NFT_CT_STATE, STATE_NEW),
            Statement::StatusDnat => self.ct_has(NFT_CT_STATUS, STATUS_DNAT),
            Statement::Protocol(protocol) => {
                self.load(Selector::Protocol, NFT_REG_1);
                self.compare(NFT_CMP_EQ, &[protocol.number()]);
            }
            Statement::HasMark(bit) => {
                self.load_meta(NFT_META_MARK, NFT_REG_1);
                self.has_bit(*bit);
            }
            Statement::OneIn(count) => {
                self.load(Selector::Random(*count), NFT_REG_1);
                self.compare(NFT_CMP_EQ, &[0; 4]);
            }
            Statement::SetMark(bit) => self.change_mark(!bit, *bit),
            Statement::ToggleMark(bit) => self.change_mark(u32::MAX, *bit),
            Statement::DnatByMap(key, map) => self.dnat_by_map(key, map),
            Statement::Dnat(endpoint) => self.dnat(*endpoint),
            Statement::UpdateSet(set, key) => self.update_set(set, key),
            Statement::Masquerade => {
                self.add("masq", |to| to.be_int(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY));
            }
            Statement::MasqueradeTo { first, last } => self.masquerade_to(*first, *last),
            Statement::Limit { rate, burst } => self.add("limit", |to| {
                to.be64(NFTA_LIMIT_RATE, u64::from(*rate));
                to.be64(NFTA_LIMIT_UNIT, 1);
                to.be32(NFTA_LIMIT_BURST, *burst);
            }),
            Statement::Trace => self.trace(),
            Statement::Reject => self.reject(),
            Statement::Verdict(verdict) => {
                self.immediate(NFT_REG_VERDICT, |to| write_verdict(verdict, to));
            }
        }
    }

    fn add(&mut self, name: &str, write: impl FnOnce(&mut MessageBuffer)) {
        self.to.nested(NFTA_LIST_ELEM, |to| {
            to.string(NFTA_EXPR_NAME, name);
            to.nested(NFTA_EXPR_DATA, write);
        });
    }

    fn load(&mut self, selector: Selector, register: c_int) {
        let network = NFT_PAYLOAD_NETWORK_HEADER;
        let address_length = NftFamily::of(self.family).address_length();
        match selector {
            Selector::Source | Selector::Destination => {
                self.load_payload(network, self.address_offset(selector), address_length, register);
            }
            Selector::Protocol => self.load_meta(NFT_META_L4PROTO, register),
            Selector::DestinationPort => {
                self.load_payload(NFT_PAYLOAD_TRANSPORT_HEADER, PORT_OFFSET, 2, register);
            }
            Selector::Random(modulus) => self.add("numgen", |to| {
                to.be_int(NFTA_NG_DREG, register);
                to.be32(NFTA_NG_MODULUS, modulus);
                to.be_int(NFTA_NG_TYPE, NFT_NG_RANDOM);
                to.be32(NFTA_NG_OFFSET, 0);
            }),
        }
    }

    fn load_payload(&mut self, base: c_int, offset: u32, length: u32, register: c_int) {
        self.add("payload", |to| {
            to.be_int(NFTA_PAYLOAD_DREG, register);
            to.be_int(NFTA_PAYLOAD_BASE, base);
            to.be32(NFTA_PAYLOAD_OFFSET, offset);
            to.be32(NFTA_PAYLOAD_LEN, length);
        });
    }

    fn load_meta(&mut self, key: c_int, register: c_int) {
        self.add("meta", |to| {
            to.be_int(NFTA_META_KEY, key);
            to.be_int(NFTA_META_DREG, register);
        });
    }

    /// Returns the offset of the source address, or of the destination address behind it.
    fn address_offset(&self, selector: Selector) -> u32 {
        let family = NftFamily::of(self.family);
        let is_destination = selector == Selector::Destination;
        family.source_offset + if is_destination { family.address_length() } else { 0 }
    }

    /// Loads a whole key into consecutive registers, starting at the first.
    fn load_key(&mut self, key: &[Selector]) {
        let mut word = 0;
        for selector in key {
            self.load(*selector, register(word));
            word += match selector {
                Selector::Source | Selector::Destination => NftFamily::of(self.family).address_words.into(),
                Selector::Protocol | Selector::DestinationPort | Selector::Random(_) => 1,
            };
        }
    }

    fn lookup(&mut self, key: &[Selector], set: &str, into: Option<c_int>) {
        self.load_key(key);
        self.add("lookup", |to| {
            to.string(NFTA_LOOKUP_SET, set);
            to.be_int(NFTA_LOOKUP_SREG, NFT_REG_1);
            if let Some(register) = into {
                to.be_int(NFTA_LOOKUP_DREG, register);
            }
        });
    }

    /// If the prefix ends at a byte boundary, compares only its bytes. Otherwise masks the address
    /// first.
    fn in_range(&mut self, selector: Selector, range: &IpNet, inside: bool) {
        let network = octets(range.network());
        let whole_bytes = range.prefix_len() / 8;
        if range.prefix_len().is_multiple_of(8) && whole_bytes > 0 {
            let offset = self.address_offset(selector);
            self.load_payload(NFT_PAYLOAD_NETWORK_HEADER, offset, whole_bytes.into(), NFT_REG_1);
            self.compare(comparison(inside), &network[..whole_bytes.into()]);
        } else {
            self.load(selector, NFT_REG_1);
            self.mask(&octets(range.netmask()), &vec![0; network.len()]);
            self.compare(comparison(inside), &network);
        }
    }

    fn interface(&mut self, name: &str, inside: bool) {
        self.load_meta(NFT_META_IIFNAME, NFT_REG_1);
        let bytes = if let Some(prefix) = name.strip_suffix('*') {
            prefix.as_bytes().to_vec()
        } else {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(libc::IFNAMSIZ, 0);
            bytes
        };
        self.compare(comparison(inside), &bytes);
    }

    fn source_is_local(&mut self) {
        self.add("fib", |to| {
            to.be_int(NFTA_FIB_DREG, NFT_REG_1);
            to.be_int(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE);
            to.be_int(NFTA_FIB_FLAGS, NFTA_FIB_F_SADDR);
        });
        self.compare(NFT_CMP_EQ, &u32::from(libc::RTN_LOCAL).to_ne_bytes());
    }

    fn ct_has(&mut self, key: c_int, bit: u32) {
        self.add("ct", |to| {
            to.be_int(NFTA_CT_KEY, key);
            to.be_int(NFTA_CT_DREG, NFT_REG_1);
        });
        self.has_bit(bit);
    }

    /// The first register must have this bit.
    fn has_bit(&mut self, bit: u32) {
        self.mask(&bit.to_ne_bytes(), &[0; 4]);
        self.compare(NFT_CMP_NEQ, &[0; 4]);
    }

    fn compare(&mut self, operation: c_int, value: &[u8]) {
        self.add("cmp", |to| {
            to.be_int(NFTA_CMP_SREG, NFT_REG_1);
            to.be_int(NFTA_CMP_OP, operation);
            to.nested(NFTA_CMP_DATA, |to| to.bytes(NFTA_DATA_VALUE, value));
        });
    }

    /// Changes the first register to `(register & mask) ^ xor`.
    fn mask(&mut self, mask: &[u8], xor: &[u8]) {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        self.add("bitwise", |to| {
            to.be_int(NFTA_BITWISE_SREG, NFT_REG_1);
            to.be_int(NFTA_BITWISE_DREG, NFT_REG_1);
            to.be32(NFTA_BITWISE_LEN, length);
            to.nested(NFTA_BITWISE_MASK, |to| to.bytes(NFTA_DATA_VALUE, mask));
            to.nested(NFTA_BITWISE_XOR, |to| to.bytes(NFTA_DATA_VALUE, xor));
        });
    }

    fn change_mark(&mut self, mask: u32, xor: u32) {
        self.load_meta(NFT_META_MARK, NFT_REG_1);
        self.mask(&mask.to_ne_bytes(), &xor.to_ne_bytes());
        self.add("meta", |to| {
            to.be_int(NFTA_META_KEY, NFT_META_MARK);
            to.be_int(NFTA_META_SREG, NFT_REG_1);
        });
    }

    fn trace(&mut self) {
        self.immediate(NFT_REG_1, |to| to.bytes(NFTA_DATA_VALUE, &[1]));
        self.add("meta", |to| {
            to.be_int(NFTA_META_KEY, NFT_META_NFTRACE);
            to.be_int(NFTA_META_SREG, NFT_REG_1);
        });
    }

    fn dnat_by_map(&mut self, key: &[Selector], map: &str) {
        self.lookup(key, map, Some(NFT_REG_1));
        self.nat(register(NftFamily::of(self.family).address_words.into()));
    }

    fn dnat(&mut self, endpoint: SocketAddr) {
        let (address, port) = (octets(endpoint.ip()), endpoint.port().to_be_bytes());
        self.immediate(NFT_REG_1, |to| to.bytes(NFTA_DATA_VALUE, &address));
        self.immediate(NFT_REG_2, |to| to.bytes(NFTA_DATA_VALUE, &port));
        self.nat(NFT_REG_2);
    }

    fn masquerade_to(&mut self, first: u16, last: u16) {
        self.immediate(NFT_REG_1, |to| to.bytes(NFTA_DATA_VALUE, &first.to_be_bytes()));
        self.immediate(NFT_REG_2, |to| to.bytes(NFTA_DATA_VALUE, &last.to_be_bytes()));
        self.add("masq", |to| {
            to.be_int(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY | NF_NAT_RANGE_PROTO_SPECIFIED);
            to.be_int(NFTA_MASQ_REG_PROTO_MIN, NFT_REG_1);
            to.be_int(NFTA_MASQ_REG_PROTO_MAX, NFT_REG_2);
        });
    }

    fn immediate(&mut self, register: c_int, write: impl FnOnce(&mut MessageBuffer)) {
        self.add("immediate", |to| {
            to.be_int(NFTA_IMMEDIATE_DREG, register);
            to.nested(NFTA_IMMEDIATE_DATA, write);
        });
    }

    /// Translates to the address in the first register and to the port in this register.
    fn nat(&mut self, port: c_int) {
        let family = NftFamily::of(self.family).number;
        self.add("nat", |to| {
            to.be_int(NFTA_NAT_TYPE, NFT_NAT_DNAT);
            to.be_int(NFTA_NAT_FAMILY, family);
            to.be_int(NFTA_NAT_REG_ADDR_MIN, NFT_REG_1);
            to.be_int(NFTA_NAT_REG_PROTO_MIN, port);
        });
    }

    fn update_set(&mut self, set: &str, key: &[Selector]) {
        self.load_key(key);
        self.add("dynset", |to| {
            to.string(NFTA_DYNSET_SET_NAME, set);
            to.be_int(NFTA_DYNSET_OP, NFT_DYNSET_OP_UPDATE);
            to.be_int(NFTA_DYNSET_SREG_KEY, NFT_REG_1);
        });
    }

    fn reject(&mut self) {
        // "Port unreachable": ICMP_PORT_UNREACH, or ICMPV6_PORT_UNREACH.
        let code = match self.family {
            IpFamily::V4 => 3,
            IpFamily::V6 => 4,
        };
        self.add("reject", |to| {
            to.be_int(NFTA_REJECT_TYPE, NFT_REJECT_ICMP_UNREACH);
            to.bytes(NFTA_REJECT_ICMP_CODE, &[code]);
        });
    }
}

/// Returns the register that starts at this 32-bit word. The kernel names registers that start at a
/// multiple of 16 bytes by their 128-bit number.
const fn register(word: c_int) -> c_int {
    if word % 4 == 0 { NFT_REG_1 + word / 4 } else { NFT_REG32_00 + word }
}
