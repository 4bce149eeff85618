//! The kernel's expressions for each statement: `linux/netfilter/nf_tables.h`. Registers are those nft uses, so that it reads
//! them back as what was meant.

use std::net::SocketAddr;

use ipnet::IpNet;

use super::{
    Family,
    attributes::Attributes,
    statement::{Rule, Selector, Statement, Verdict, octets},
};

/// `NFTA_LIST_ELEM`.
const ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME` and `NFTA_EXPR_DATA`.
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
/// `NFTA_DATA_VALUE` and `NFTA_DATA_VERDICT`.
pub(super) const DATA_VALUE: u16 = 1;
pub(super) const DATA_VERDICT: u16 = 2;
/// `NFTA_VERDICT_CODE` and `NFTA_VERDICT_CHAIN`.
pub(super) const VERDICT_CODE: u16 = 1;
pub(super) const VERDICT_CHAIN: u16 = 2;
/// `NF_DROP`, `NFT_CONTINUE`, `NFT_RETURN`, `NFT_JUMP` and `NFT_GOTO`; all but the first are negative.
pub(super) const DROP: u32 = 0;
pub(super) const CONTINUE: u32 = 1_u32.wrapping_neg();
pub(super) const RETURN: u32 = 5_u32.wrapping_neg();
pub(super) const JUMP: u32 = 3_u32.wrapping_neg();
pub(super) const GOTO: u32 = 4_u32.wrapping_neg();

/// `NFT_REG_VERDICT`.
const VERDICT_REGISTER: u32 = 0;
/// `NFT_REG_1` and `NFT_REG_2`, 16 bytes each.
const FIRST: u32 = 1;
const SECOND: u32 = 2;
/// `NFT_REG32_00`, four bytes.
const FIRST_WORD: u32 = 8;
/// `NFT_CMP_EQ` and `NFT_CMP_NEQ`.
const EQUAL: u32 = 0;
const DIFFERENT: u32 = 1;

/// `NFT_META_*`.
const META_MARK: u32 = 3;
const META_INPUT_NAME: u32 = 6;
const META_PROTOCOL: u32 = 16;
/// `NFT_CT_*`.
const CT_STATE: u32 = 0;
const CT_STATUS: u32 = 2;
/// `NF_CT_STATE_BIT(IP_CT_NEW)` and `IPS_DST_NAT`.
const STATE_NEW: u32 = 1 << 3;
const STATUS_DNAT: u32 = 1 << 5;
/// `NFT_PAYLOAD_NETWORK_HEADER` and `NFT_PAYLOAD_TRANSPORT_HEADER`.
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;
/// Where TCP, UDP and SCTP have the destination port.
const PORT_OFFSET: u32 = 2;
/// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_SADDR` and `RTN_LOCAL`.
const FIB_ADDRESS_TYPE: u32 = 3;
const FIB_SOURCE: u32 = 1;
const FIB_LOCAL: u32 = 2;
/// `NFT_NG_RANDOM`.
const RANDOM: u32 = 1;
/// `NFT_NAT_DNAT`.
const DNAT: u32 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const FULLY_RANDOM: u32 = 1 << 4;
/// `NFT_DYNSET_OP_UPDATE`.
const UPDATE: u32 = 1;
/// `IFNAMSIZ`.
const INTERFACE_NAME: usize = 16;

/// The expressions of a rule, as the elements of a list.
pub(super) fn write(rule: &Rule, family: Family, to: &mut Attributes) {
    let mut expressions = Expressions { to, family };
    for statement in &rule.statements {
        expressions.statement(statement);
    }
}

/// A verdict as a register's data.
pub(super) fn write_verdict(verdict: &Verdict, to: &mut Attributes) {
    let (code, chain) = match verdict {
        Verdict::Drop => (DROP, None),
        Verdict::Continue => (CONTINUE, None),
        Verdict::Return => (RETURN, None),
        Verdict::Jump(chain) => (JUMP, Some(chain)),
        Verdict::Goto(chain) => (GOTO, Some(chain)),
    };
    to.nested(DATA_VERDICT, |to| {
        to.number(VERDICT_CODE, code);
        if let Some(chain) = chain {
            to.text(VERDICT_CHAIN, chain);
        }
    });
}

struct Expressions<'a> {
    to: &'a mut Attributes,
    family: Family,
}

/// Whether what is in the first register has to be this value.
fn comparison(inside: bool) -> u32 {
    if inside { EQUAL } else { DIFFERENT }
}

impl Expressions<'_> {
    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::In(key, set) => self.lookup(key, set, None),
            Statement::VerdictMap(key, map) => self.lookup(key, map, Some(VERDICT_REGISTER)),
            Statement::Source { range, inside } => self.in_range(Selector::Source, range, *inside),
            Statement::Destination(range) => self.in_range(Selector::Destination, range, true),
            Statement::InputInterface { name, inside } => self.interface(name, *inside),
            Statement::SourceIsLocal => self.source_is_local(),
            Statement::StateNew => self.ct_has(CT_STATE, STATE_NEW),
            Statement::StatusDnat => self.ct_has(CT_STATUS, STATUS_DNAT),
            Statement::Protocol(protocol) => {
                self.load(Selector::Protocol, FIRST);
                self.compare(EQUAL, &[*protocol]);
            }
            Statement::Marked(bit) => {
                self.load_meta(META_MARK, FIRST);
                self.mask(&bit.to_ne_bytes(), &[0; 4]);
                self.compare(DIFFERENT, &[0; 4]);
            }
            Statement::OneIn(count) => {
                self.load(Selector::Random(*count), FIRST);
                self.compare(EQUAL, &[0; 4]);
            }
            Statement::SetMark(bit) => self.change_mark(!bit, *bit),
            Statement::FlipMark(bit) => self.change_mark(u32::MAX, *bit),
            Statement::DnatByMap(key, map) => self.dnat_by_map(key, map),
            Statement::Dnat(endpoint) => self.dnat(*endpoint),
            Statement::Update(set, key) => self.update(set, key),
            Statement::Masquerade => self.add("masq", |to| to.number(1, FULLY_RANDOM)),
            Statement::Reject => self.reject(),
            Statement::Verdict(verdict) => self.add("immediate", |to| {
                to.number(1, VERDICT_REGISTER);
                to.nested(2, |to| write_verdict(verdict, to));
            }),
        }
    }

    fn add(&mut self, name: &str, data: impl FnOnce(&mut Attributes)) {
        self.to.nested(ELEMENT, |to| {
            to.text(EXPRESSION_NAME, name);
            to.nested(EXPRESSION_DATA, data);
        });
    }

    fn load(&mut self, selector: Selector, register: u32) {
        match selector {
            Selector::Source => {
                self.payload(NETWORK, self.family.source_offset(), self.family.address_length(), register);
            }
            Selector::Destination => {
                let offset = self.family.source_offset() + self.family.address_length();
                self.payload(NETWORK, offset, self.family.address_length(), register);
            }
            Selector::Protocol => self.load_meta(META_PROTOCOL, register),
            Selector::DestinationPort => self.payload(TRANSPORT, PORT_OFFSET, 2, register),
            Selector::Random(below) => self.add("numgen", |to| {
                to.number(1, register);
                to.number(2, below);
                to.number(3, RANDOM);
                to.number(4, 0);
            }),
        }
    }

    fn payload(&mut self, base: u32, offset: u32, length: u32, register: u32) {
        self.add("payload", |to| {
            to.number(1, register);
            to.number(2, base);
            to.number(3, offset);
            to.number(4, length);
        });
    }

    fn load_meta(&mut self, key: u32, register: u32) {
        self.add("meta", |to| {
            to.number(2, key);
            to.number(1, register);
        });
    }

    /// Loads all of a key into neighbouring registers, from the first on.
    fn load_key(&mut self, key: &[Selector]) {
        let mut word = 0;
        for selector in key {
            self.load(*selector, register(word));
            word += match selector {
                Selector::Source | Selector::Destination => self.family.address_length() / 4,
                Selector::Protocol | Selector::DestinationPort | Selector::Random(_) => 1,
            };
        }
    }

    fn lookup(&mut self, key: &[Selector], set: &str, into: Option<u32>) {
        self.load_key(key);
        self.add("lookup", |to| {
            to.text(1, set);
            to.number(2, FIRST);
            if let Some(register) = into {
                to.number(3, register);
            }
        });
    }

    /// A range that ends within a byte is masked; of any other its bytes are compared.
    fn in_range(&mut self, selector: Selector, range: &IpNet, inside: bool) {
        let network = octets(range.network());
        let whole = usize::from(range.prefix_len() / 8);
        if range.prefix_len().is_multiple_of(8) && whole > 0 {
            let length = u32::try_from(whole).unwrap_or_default();
            let offset = match selector {
                Selector::Destination => self.family.source_offset() + self.family.address_length(),
                _ => self.family.source_offset(),
            };
            self.payload(NETWORK, offset, length, FIRST);
            self.compare(comparison(inside), &network[..whole]);
        } else {
            self.load(selector, FIRST);
            self.mask(&octets(range.netmask()), &vec![0; network.len()]);
            self.compare(comparison(inside), &network);
        }
    }

    fn interface(&mut self, name: &str, inside: bool) {
        self.load_meta(META_INPUT_NAME, FIRST);
        let bytes = if let Some(prefix) = name.strip_suffix('*') {
            prefix.as_bytes().to_vec()
        } else {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(INTERFACE_NAME, 0);
            bytes
        };
        self.compare(comparison(inside), &bytes);
    }

    fn source_is_local(&mut self) {
        self.add("fib", |to| {
            to.number(1, FIRST);
            to.number(2, FIB_ADDRESS_TYPE);
            to.number(3, FIB_SOURCE);
        });
        self.compare(EQUAL, &FIB_LOCAL.to_ne_bytes());
    }

    fn ct_has(&mut self, key: u32, bit: u32) {
        self.add("ct", |to| {
            to.number(2, key);
            to.number(1, FIRST);
        });
        self.mask(&bit.to_ne_bytes(), &[0; 4]);
        self.compare(DIFFERENT, &[0; 4]);
    }

    fn compare(&mut self, operation: u32, value: &[u8]) {
        self.add("cmp", |to| {
            to.number(1, FIRST);
            to.number(2, operation);
            to.nested(3, |to| to.bytes(DATA_VALUE, value));
        });
    }

    /// The first register becomes itself, and-ed with the mask, and exclusive-or-ed with the other.
    fn mask(&mut self, mask: &[u8], flip: &[u8]) {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        self.add("bitwise", |to| {
            to.number(1, FIRST);
            to.number(2, FIRST);
            to.number(3, length);
            to.nested(4, |to| to.bytes(DATA_VALUE, mask));
            to.nested(5, |to| to.bytes(DATA_VALUE, flip));
        });
    }

    fn change_mark(&mut self, keep: u32, flip: u32) {
        self.load_meta(META_MARK, FIRST);
        self.mask(&keep.to_ne_bytes(), &flip.to_ne_bytes());
        self.add("meta", |to| {
            to.number(2, META_MARK);
            to.number(3, FIRST);
        });
    }

    fn dnat_by_map(&mut self, key: &[Selector], map: &str) {
        self.lookup(key, map, Some(FIRST));
        let port = register(self.family.address_length() / 4);
        self.nat(port);
    }

    fn dnat(&mut self, endpoint: SocketAddr) {
        self.immediate(FIRST, &octets(endpoint.ip()));
        self.immediate(SECOND, &endpoint.port().to_be_bytes());
        self.nat(SECOND);
    }

    fn immediate(&mut self, register: u32, value: &[u8]) {
        self.add("immediate", |to| {
            to.number(1, register);
            to.nested(2, |to| to.bytes(DATA_VALUE, value));
        });
    }

    fn nat(&mut self, port: u32) {
        let family = u32::from(self.family.number());
        self.add("nat", |to| {
            to.number(1, DNAT);
            to.number(2, family);
            to.number(3, FIRST);
            to.number(5, port);
        });
    }

    fn update(&mut self, set: &str, key: &[Selector]) {
        self.load_key(key);
        self.add("dynset", |to| {
            to.text(1, set);
            to.number(3, UPDATE);
            to.number(4, FIRST);
        });
    }

    /// `NFT_REJECT_ICMP_UNREACH` with the code for an unreachable port: of IPv4 3, of IPv6 4.
    fn reject(&mut self) {
        let code = match self.family {
            Family::Ip => 3,
            Family::Ip6 => 4,
        };
        self.add("reject", |to| {
            to.number(1, 0);
            to.bytes(2, &[code]);
        });
    }
}

/// The register of this word, as the kernel itself names it: whole ones of 16 bytes by their own number.
const fn register(word: u32) -> u32 {
    if word.is_multiple_of(4) { FIRST + word / 4 } else { FIRST_WORD + word }
}
