//! The entry points of programs that only the benchmark uses: they translate one connection by
//! constants. What shunt's programs do cannot cost less.
//!
//! Built for the host, this is an empty program.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(
    target_arch = "bpf",
    expect(unsafe_code, reason = "entry points and the license need fixed symbol names and sections")
)]

#[cfg(target_arch = "bpf")]
#[expect(dead_code, unused_imports, reason = "the module is that of shunt's programs, which use more of it")]
mod ctx;
#[cfg(target_arch = "bpf")]
mod object;
#[cfg(target_arch = "bpf")]
#[path = "maps/translations.rs"]
mod translations;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{
        Global,
        macros::{classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use proxy_common::{
        checksum::{Difference, fold_words},
        link::Outcome,
        packet::{ChecksumCoverage, Frame, IpVersion},
    };

    use crate::{
        ctx::{Ethernet, NEXT, REDIRECT, Skb, Xdp},
        translations::{self, Key, Translation, state},
    };

    /// What the programs do: see `Rule` of the benchmark. Addresses and ports are in the order of
    /// the packet. A rule for port 0 is none. The first two are for packets that come in from the
    /// client and from the endpoint. The others are for packets that leave.
    #[unsafe(no_mangle)]
    static RULES: Global<[[u32; 12]; 4]> = Global::new([[0; 12]; 4]);

    /// The last word of a rule: the programs look up no packet.
    const CONSTANTS: u32 = 0;
    /// They look up each packet in a table that has every flow. With any other number, they also
    /// know the state of the flow: see [`with_state`].
    const TABLE: u32 = 1;

    const TCP: u8 = 6;
    const UDP: u8 = 17;
    /// The offsets of the IPv4 header, of its fields from the hop limit on, and of the ports.
    const HEADER: u32 = 14;
    const HOPS: u32 = HEADER + 8;
    const PAYLOAD: u32 = HEADER + 20;

    /// Translates packets of IPv4 that come in and that a rule names.
    #[classifier]
    pub fn floor_ingress(ctx: TcContext) -> i32 {
        let skb: Skb<Ethernet> = Skb::new(ctx);
        let [to_vip, from_endpoint, ..] = RULES.load();
        match translate(&skb, [to_vip, from_endpoint]) {
            Some(link) if link != 0 => {
                skb.redirect(link);
                REDIRECT
            }
            _ => NEXT,
        }
    }

    /// Translates packets of IPv4 that leave and that a rule names.
    #[classifier]
    pub fn floor_egress(ctx: TcContext) -> i32 {
        let skb: Skb<Ethernet> = Skb::new(ctx);
        let [.., to_endpoint, to_client] = RULES.load();
        let _ = translate(&skb, [to_endpoint, to_client]);
        NEXT
    }

    /// Does the same before the stack, and sends the packets back on the link.
    #[xdp]
    pub fn floor_xdp(ctx: XdpContext) -> u32 {
        let [to_vip, from_endpoint, ..] = RULES.load();
        let is_translated = translate(&Xdp::new(ctx), [to_vip, from_endpoint]).is_some();
        Xdp::code(if is_translated { Outcome::Transmit } else { Outcome::Proceed })
    }

    /// Returns the index of the link on which the packet leaves, or 0 if it goes through the stack.
    #[inline(always)]
    fn translate(frame: &impl Frame, [first, second]: [[u32; 12]; 2]) -> Option<u32> {
        let [ethertype, version]: [u16; 2] = halves(frame.load(HEADER - 2)?);
        if ethertype != 0x0800_u16.to_be() || version.to_ne_bytes()[0] != 0x45 {
            return None;
        }
        let fields: [u8; 16] = frame.load(HOPS)?;
        let [hops, proto, a, b, ..] = fields;
        if proto != TCP && proto != UDP || hops < 2 {
            return None;
        }
        let word =
            |at: usize| u32::from_ne_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]]);
        let half = |at: usize| u16::from_ne_bytes([fields[at], fields[at + 1]]);
        let key = Key { addresses: [word(4), word(8)], ports: [half(12), half(14)], proto: proto.into() };
        let (rule, other) = if is_of(&first, &key) {
            (first, second)
        } else if is_of(&second, &key) {
            (second, first)
        } else {
            return None;
        };
        let translation = match rule[11] {
            CONSTANTS => translation_of(&rule, &key),
            TABLE => remembered(&rule, &key),
            _ => with_state(&rule, &other, &key, &Segment::of(frame, proto)?),
        };
        rewrite(frame, &key, &translation, [hops, proto, a, b])?;
        Some(translation.link)
    }

    /// Returns true if a packet comes from the end that a rule names, or goes to it.
    #[inline(always)]
    fn is_of(rule: &[u32; 12], key: &Key) -> bool {
        let [by_source, address, port, ..] = *rule;
        let [at_address, at_port] = if by_source == 0 {
            [key.addresses[1], key.ports[1].into()]
        } else {
            [key.addresses[0], key.ports[0].into()]
        };
        at_address == address && at_port == port
    }

    /// Returns the translation of the table, and writes it if the packet is the first of its flow.
    #[inline(always)]
    fn remembered(rule: &[u32; 12], key: &Key) -> Translation {
        if let Some(translation) = translations::find(key) {
            return translation;
        }
        let translation = translation_of(rule, key);
        translations::insert(key, &translation);
        translation
    }

    /// What the state of a flow depends on. All zero for UDP.
    struct Segment {
        /// In host byte order, as the next one.
        sequence: u32,
        acknowledged: u32,
        flags: u8,
    }

    impl Segment {
        const FIN_OR_RST: u8 = 0x05;
        const SYN: u8 = 0x02;

        #[inline(always)]
        fn of(frame: &impl Frame, proto: u8) -> Option<Self> {
            if proto == UDP {
                return Some(Self { sequence: 0, acknowledged: 0, flags: 0 });
            }
            let [sequence, acknowledged, [_, flags, ..]] = frame.load_words::<3>(PAYLOAD + 4)?;
            let [sequence, acknowledged] = [sequence, acknowledged].map(u32::from_be_bytes);
            Some(Self { sequence, acknowledged, flags })
        }
    }

    /// Returns the translation of the flow, and updates its state as shunt does: the first packet
    /// of the client writes the entries of both directions. An answer of the endpoint is noted in
    /// the entry of the client. When the client has acknowledged it, the entries move to the
    /// table of assured flows. A FIN or reset is noted in both entries, and so is the SYN of a
    /// later connection from the same port.
    #[inline(always)]
    fn with_state(rule: &[u32; 12], other: &[u32; 12], key: &Key, segment: &Segment) -> Translation {
        let (is_of_client, is_tcp) = (rule[0] == 0, key.proto == TCP.into());
        let [.., a, b, c, link, _] = *other;
        if let Some(translation) = translations::find(key) {
            if segment.flags & (Segment::FIN_OR_RST | Segment::SYN) != 0 {
                let state = if segment.flags & Segment::SYN == 0 { state::CLOSED } else { 0 };
                translations::set_state(key, state);
                translations::set_state(&translation.opposite_key(key), state);
            }
            return translation;
        }
        if let Some(translation) = translations::find_unassured(key) {
            if !is_of_client {
                if !is_tcp || segment.flags & Segment::SYN != 0 {
                    translations::note_answer(&translation.opposite_key(key), segment.sequence);
                }
            } else if translation.state & state::ANSWERED != 0
                && (!is_tcp || segment.acknowledged.wrapping_sub(translation.sequence) < 1 << 16)
            {
                let (opposite_key, opposite) = translation.opposite(key, [a, b, c], link);
                translations::assure(key, &translation);
                translations::assure(&opposite_key, &opposite);
            }
            return translation;
        }
        let translation = translation_of(rule, key);
        if is_of_client {
            let (opposite_key, opposite) = translation.opposite(key, [a, b, c], link);
            translations::insert_unassured(&opposite_key, &opposite);
            translations::insert_unassured(key, &translation);
        }
        translation
    }

    #[inline(always)]
    fn translation_of(rule: &[u32; 12], key: &Key) -> Translation {
        let [_, _, _, source, source_port, destination, destination_port, a, b, c, link, _] = *rule;
        let or = |new: u32, old: u32| if new == 0 { old } else { new };
        #[expect(clippy::cast_possible_truncation, reason = "a port")]
        let port_or = |new: u32, old: u16| if new == 0 { old } else { new as u16 };
        Translation {
            addresses: [or(source, key.addresses[0]), or(destination, key.addresses[1])],
            ports: [port_or(source_port, key.ports[0]), port_or(destination_port, key.ports[1])],
            hardware: [a, b, c],
            link,
            state: 0,
            sequence: 0,
            unused: [0; 7],
        }
    }

    /// Writes Ethernet addresses if the packet is redirected, hop limit, addresses and ports.
    #[inline(always)]
    fn rewrite(frame: &impl Frame, key: &Key, to: &Translation, [hops, proto, a, b]: [u8; 4]) -> Option<()> {
        let addresses = difference(key.addresses, to.addresses);
        let ports = difference(key.ports.map(u32::from), to.ports.map(u32::from));
        let (mut left, mut header) = (hops, addresses);
        if to.link != 0 {
            left -= 1;
            header = header.and(Difference::of_bytes([hops, proto], [left, proto]));
            let [x, y, z] = to.hardware.map(u128::from);
            let [bytes @ .., _, _, _, _] = (x | y << 32 | z << 64).to_le_bytes();
            frame.store::<12>(0, &bytes)?;
        }
        let [a, b] = header.apply([a, b]);
        let [source, destination] = to.addresses.map(u128::from);
        let [from, at] = to.ports.map(u128::from);
        let bytes = u128::from(u32::from_ne_bytes([left, proto, a, b]))
            | source << 32
            | destination << 64
            | from << 96
            | at << 112;
        frame.store::<16>(HOPS, &bytes.to_le_bytes())?;
        let is_optional = proto == UDP;
        let offset = PAYLOAD + if is_optional { 6 } else { 16 };
        frame.fix_checksum(
            offset,
            addresses,
            ChecksumCoverage { pseudo_header: Some(IpVersion::V4), is_optional },
        )?;
        if !ports.is_zero() {
            frame.fix_checksum(offset, ports, ChecksumCoverage { pseudo_header: None, is_optional })?;
        }
        Some(())
    }

    #[inline(always)]
    fn difference([a, b]: [u32; 2], [c, d]: [u32; 2]) -> Difference {
        let old = i64::from(a) + i64::from(b);
        let new = i64::from(c) + i64::from(d);
        Difference::from_wsum(fold_words(new - old))
    }

    #[inline(always)]
    fn halves([a, b, c, d]: [u8; 4]) -> [u16; 2] {
        [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
    }
}
