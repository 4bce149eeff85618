//! Turns captured packets into lines of a trace.

use std::net::SocketAddr;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};
use proxy_common::layout::{CapturedPacket, HEADERS_LENGTH, Program, captured};

use super::{
    names::{Names, Vip},
    programs::ClockOffset,
    record::{TracedPacket, TracedVerdict},
};
use crate::model::Protocol;

/// The program made a packet the answer.
const ANSWERED: u32 = captured::REFUSED | captured::CHANGED;

/// A captured packet with what its headers say.
pub(super) struct Packet {
    time_ns: u64,
    link: u32,
    length: u32,
    /// [`captured`].
    happened: u32,
    program: Program,
    before: Vec<u8>,
    after: Vec<u8>,
    addresses: [Option<Addresses>; 2],
}

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Addresses {
    protocol: Protocol,
    source: SocketAddr,
    destination: SocketAddr,
}

impl Packet {
    /// Reads a record. `None` if it is of another version.
    pub(super) fn new(record: &CapturedPacket) -> Option<Self> {
        let program = *Program::ALL.get(record.program as usize)?;
        let bytes = |length: u32, most: usize| usize::try_from(length).unwrap_or(most).min(most);
        let after = record.after[..bytes(record.after_length, record.after.len())].to_vec();
        let headers: Vec<u8> = record.before.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut before = headers[..bytes(record.before_length, HEADERS_LENGTH)].to_vec();
        if record.happened & ANSWERED != ANSWERED {
            // The program changes only headers: what follows them is what it was.
            before.extend(after.get(before.len()..).unwrap_or_default());
        }
        let is_ethernet = is_ethernet(program);
        let addresses = [&before, &after].map(|bytes| addresses(bytes, is_ethernet));
        let CapturedPacket { time_ns, link, length, happened, .. } = *record;
        Some(Self { time_ns, link, length, happened, program, before, after, addresses })
    }

    /// Returns the addresses that may be the one of the Service: where the client sends, and from
    /// where the reply comes.
    pub(super) fn vips(&self) -> impl Iterator<Item = Vip> {
        let [before, after] = self.addresses;
        let to = before.map(|it| (it.destination, it.protocol));
        let from = after.map(|it| (it.source, it.protocol));
        if is_ingress(self.program) { [to, from] } else { [from, to] }.into_iter().flatten()
    }

    /// Returns the line, and the addresses before and after the program.
    pub(super) fn line(&self, names: &mut Names, clock: ClockOffset) -> (TracedPacket, Vec<SocketAddr>) {
        let Self { time_ns, link, length, happened, program, before, after, addresses } = self;
        let verdict = match happened {
            _ if happened & captured::DROPPED != 0 => TracedVerdict::Dropped,
            _ if happened & captured::REFUSED != 0 => TracedVerdict::Refused,
            _ => TracedVerdict::Translated,
        };
        let packet = TracedPacket {
            time_ns: clock.unix_ns(*time_ns),
            link: names.link(*link),
            is_ethernet: is_ethernet(*program),
            program: program.name().to_owned(),
            verdict,
            service: self.vips().find_map(|vip| names.service(vip)),
            // An answer may be shorter than the packet.
            length: (*length).max(u32::try_from(before.len()).unwrap_or(u32::MAX)),
            before: STANDARD.encode(before),
            after: (happened & captured::CHANGED != 0).then(|| STANDARD.encode(after)),
        };
        (packet, addresses.iter().flatten().flat_map(|it| [it.source, it.destination]).collect())
    }
}

const fn is_ethernet(program: Program) -> bool {
    matches!(program, Program::InEth | Program::OutEth)
}

const fn is_ingress(program: Program) -> bool {
    matches!(program, Program::InEth | Program::InIp)
}

/// Returns the addresses of a packet, which may be cut off. An ICMP error has none here.
fn addresses(bytes: &[u8], is_ethernet: bool) -> Option<Addresses> {
    let sliced = if is_ethernet {
        LaxSlicedPacket::from_ethernet(bytes).ok()?
    } else {
        LaxSlicedPacket::from_ip(bytes).ok()?
    };
    let (protocol, source, destination) = match sliced.transport? {
        TransportSlice::Tcp(tcp) => (Protocol::Tcp, tcp.source_port(), tcp.destination_port()),
        TransportSlice::Udp(udp) => (Protocol::Udp, udp.source_port(), udp.destination_port()),
        _ => return None,
    };
    let (from, to) = match sliced.net? {
        LaxNetSlice::Ipv4(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        LaxNetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        LaxNetSlice::Arp(_) => return None,
    };
    Some(Addresses {
        protocol,
        source: SocketAddr::new(from, source),
        destination: SocketAddr::new(to, destination),
    })
}
