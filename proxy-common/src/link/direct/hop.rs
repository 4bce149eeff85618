//! The hop limit of packets that are forwarded, and the whole rewrite of packets of IPv6 on the
//! direct path. [`rewrite::plain`](crate::rewrite::plain) rewrites those of IPv4.

use crate::{
    Addr, Protocol,
    checksum::Difference,
    layout::DirectFlow,
    packet::{Frame, IpVersion, Packet},
    rewrite::TransportChecksum,
};

/// What changes in a packet of IPv6 on its way through the node.
pub(super) struct Hop<'a> {
    pub(super) source: &'a Addr,
    pub(super) destination: &'a Addr,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    /// The difference that the addresses make to a checksum.
    pub(super) addresses: Difference,
    /// The difference that the ports make.
    pub(super) ports: Difference,
}

/// Rewrites a packet of IPv6 of a learned flow. Returns `None` as [`rewrite_hop`].
#[inline(always)]
pub(super) fn rewrite_learned(
    frame: &impl Frame,
    packet: &Packet,
    protocol: Protocol,
    flow: &DirectFlow,
) -> Option<()> {
    let DirectFlow { source, destination, path } = flow;
    let hop = Hop {
        source,
        destination,
        source_port: path.source_port,
        destination_port: path.destination_port,
        addresses: Difference::from_folded(path.addresses),
        ports: Difference::from_folded(path.ports),
    };
    rewrite_hop(frame, packet, protocol, &path.hardware, &hop)
}

/// Writes Ethernet addresses, hop limit, addresses and ports of a packet of IPv6, and updates the
/// checksums. Returns `None` if the packet is truncated, or if the kernel has no memory. The packet
/// may then be partly changed.
#[inline(always)]
pub(super) fn rewrite_hop(
    frame: &impl Frame,
    packet: &Packet,
    protocol: Protocol,
    hardware: &[u8; 12],
    hop: &Hop<'_>,
) -> Option<()> {
    let checksum = TransportChecksum::of(frame, packet.checksum_field(protocol))?;
    frame.store(0, hardware)?;
    store_hops_v6(frame, packet, packet.proto, packet.hops - 1)?;
    frame.store(packet.header() + 8, &hop.source.octets)?;
    frame.store(packet.header() + 24, &hop.destination.octets)?;
    let ports = u32::from(hop.source_port.to_be()) | u32::from(hop.destination_port.to_be()) << 16;
    frame.store(packet.payload(), &ports.to_le_bytes())?;
    checksum.fix(frame, IpVersion::V6, hop.addresses, hop.ports)
}

/// Writes the hop limit of a packet that is forwarded, and the checksum of an IPv4 header.
#[inline(always)]
pub(super) fn count_hop(frame: &impl Frame, packet: &Packet, hops: u8) -> Option<()> {
    match packet.version {
        IpVersion::V4 => {
            let [a, b] = Difference::of_hop(hops, packet.proto).apply(packet.checksum);
            frame.store(packet.header() + 8, &[hops - 1, packet.proto, a, b])
        }
        IpVersion::V6 => {
            let next = if packet.has_plain_header() { packet.proto } else { next_header(frame, packet)? };
            store_hops_v6(frame, packet, next, hops - 1)
        }
    }
}

/// Writes the hop limit, with the next header before it: programs reach no single byte. No checksum
/// covers it, so a sum of the hardware changes with it.
#[inline(always)]
fn store_hops_v6(frame: &impl Frame, packet: &Packet, next: u8, hops: u8) -> Option<()> {
    frame.store(packet.header() + 6, &[next, hops])?;
    frame.update_hardware_checksum(Difference::of_bytes([next, hops + 1], [next, hops]));
    Some(())
}

/// Returns what follows an IPv6 header.
#[inline(always)]
fn next_header(frame: &impl Frame, packet: &Packet) -> Option<u8> {
    let [next, _]: [u8; 2] = frame.load(packet.header() + 6)?;
    Some(next)
}
