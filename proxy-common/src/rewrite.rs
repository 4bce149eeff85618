//! Changing a packet's addresses and ports, with all checksums that cover them.

use crate::{
    Addr, Protocol,
    checksum::Difference,
    layout::{Flow, FlowKey},
    packet::{ChecksumCoverage, Frame, IpVersion, Packet, Tuple},
    protocol::ChecksumField,
};

/// Changes addresses and ports of a TCP or UDP packet, or of a first fragment of one. None if the packet is too short, or, half
/// changed, if the kernel has no memory for it.
#[inline(never)]
pub fn transport<F: Frame>(
    frame: &F,
    packet: &Packet,
    protocol: Protocol,
    before: &FlowKey,
    after: &Flow,
) -> Option<()> {
    let ChecksumField { offset, is_optional: may_be_absent } = protocol.checksum_field()?;
    let checksum = packet.payload + offset;
    // That of TCP was there when its flags were read.
    let is_absent = may_be_absent && frame.load(checksum)? == [0; 2];
    let (moved, changed) = if packet.is_plain_v4() {
        store_plain_v4(frame, packet, before, after)?
    } else {
        store_fields(frame, packet, before, after)?
    };
    if is_absent {
        // The header's own checksum made up for IPv4 addresses.
        let is_v4 = packet.version == IpVersion::V4;
        frame.update_hardware_checksum(if is_v4 { changed } else { changed.and(moved) });
        return Some(());
    }
    if !moved.is_none() {
        let covered = ChecksumCoverage { pseudo_header: Some(packet.version), may_be_absent };
        frame.fix_checksum(checksum, moved, covered)?;
    }
    if !changed.is_none() {
        frame.fix_checksum(checksum, changed, ChecksumCoverage { pseudo_header: None, may_be_absent })?;
    }
    Some(())
}

/// Writes addresses and ports where no options are between them, and the IPv4 header's checksum, which is before them: one call
/// of the kernel for what else takes up to five.
#[inline(always)]
fn store_plain_v4(
    frame: &impl Frame,
    packet: &Packet,
    before: &FlowKey,
    after: &Flow,
) -> Option<(Difference, Difference)> {
    let moved = Difference::of_addresses(&before.source.addr, &after.source.addr)
        .and(Difference::of_addresses(&before.destination.addr, &after.destination.addr));
    let changed = Difference::of_ports(before.source.port, after.source.port)
        .and(Difference::of_ports(before.destination.port, after.destination.port));
    let word = |addr: &Addr| u128::from(u32::from_le_bytes(addr.words()[3].to_ne_bytes()));
    let port = |port: u16| u128::from(port.swap_bytes());
    // Put together in registers: BPF would else write byte by byte.
    let bytes = u128::from(u16::from_le_bytes(moved.apply(packet.checksum)))
        | word(&after.source.addr) << 16
        | word(&after.destination.addr) << 48
        | port(after.source.port) << 80
        | port(after.destination.port) << 96;
    let [bytes @ .., _, _] = bytes.to_le_bytes();
    frame.store::<14>(packet.header + 10, &bytes)?;
    Some((moved, changed))
}

#[inline(always)]
fn store_fields(
    frame: &impl Frame,
    packet: &Packet,
    before: &FlowKey,
    after: &Flow,
) -> Option<(Difference, Difference)> {
    let moved = addresses(
        frame,
        packet,
        (before.source.addr, after.source.addr),
        (before.destination.addr, after.destination.addr),
    )?;
    let changed = ports(
        frame,
        packet,
        (before.source.port, after.source.port),
        (before.destination.port, after.destination.port),
    )?;
    Some((moved, changed))
}

/// Changes the addresses of a later fragment. The checksum of what it carries is in the first one.
#[inline(always)]
pub fn later_fragment(frame: &impl Frame, packet: &Packet, source: Addr, destination: Addr) -> Option<()> {
    let difference = addresses(frame, packet, (packet.source, source), (packet.destination, destination))?;
    if packet.version == IpVersion::V6 {
        frame.update_hardware_checksum(difference);
    }
    Some(())
}

/// An ICMP error: what it tells of, and how both change.
pub struct IcmpError<'a> {
    /// The error itself.
    pub outer: &'a Packet,
    /// Its source after translation.
    pub source: Addr,
    /// Its destination after translation.
    pub destination: Addr,
    /// The packet it tells of, whose beginning it carries.
    pub inner: &'a Packet,
    /// That packet's addresses and ports.
    pub before: &'a Tuple,
    /// The same after translation.
    pub after: &'a Tuple,
}

/// Changes an ICMP error and the packet within it. The inner packet's own transport checksum, of which the rest may be cut
/// off, is left: nobody can check it.
#[inline(always)]
pub fn icmp_error(frame: &impl Frame, error: &IcmpError<'_>) -> Option<()> {
    let IcmpError { outer, inner, before, after, .. } = error;
    let checksum = outer.payload + 2;
    let in_payload = ChecksumCoverage { pseudo_header: None, may_be_absent: false };
    let moved =
        addresses(frame, outer, (outer.source, error.source), (outer.destination, error.destination))?;
    let changed = addresses(
        frame,
        inner,
        (before.source.addr, after.source.addr),
        (before.destination.addr, after.destination.addr),
    )?;
    let changed = match outer.version {
        // The inner header's checksum changed the other way, and the outer addresses are not covered.
        IpVersion::V4 => Difference::default(),
        IpVersion::V6 => {
            let covered = ChecksumCoverage { pseudo_header: Some(IpVersion::V6), may_be_absent: false };
            if !moved.is_none() {
                frame.fix_checksum(checksum, moved, covered)?;
            }
            changed
        }
    };
    let changed = changed.and(ports(
        frame,
        inner,
        (before.source.port, after.source.port),
        (before.destination.port, after.destination.port),
    )?);
    if changed.is_none() { Some(()) } else { frame.fix_checksum(checksum, changed, in_payload) }
}

/// Writes the addresses that differ, and brings the IPv4 header's checksum up to date.
#[inline(always)]
fn addresses(
    frame: &impl Frame,
    packet: &Packet,
    source: (Addr, Addr),
    destination: (Addr, Addr),
) -> Option<Difference> {
    if source.0 != source.1 {
        address(frame, packet, Field::Source, &source.1)?;
    }
    if destination.0 != destination.1 {
        address(frame, packet, Field::Destination, &destination.1)?;
    }
    let difference = Difference::of_addresses(&source.0, &source.1)
        .and(Difference::of_addresses(&destination.0, &destination.1));
    if packet.version == IpVersion::V4 && !difference.is_none() {
        frame.fix_header_checksum(packet.header + 10, difference)?;
    }
    Some(difference)
}

#[derive(Clone, Copy)]
enum Field {
    Source,
    Destination,
}

#[inline(always)]
fn address(frame: &impl Frame, packet: &Packet, field: Field, new: &Addr) -> Option<()> {
    match packet.version {
        IpVersion::V4 => {
            let offset = packet.header + if matches!(field, Field::Source) { 12 } else { 16 };
            frame.store(offset, &new.words()[3].to_ne_bytes())
        }
        IpVersion::V6 => {
            let offset = packet.header + if matches!(field, Field::Source) { 8 } else { 24 };
            frame.store(offset, &new.octets)
        }
    }
}

/// Writes the ports that differ.
#[inline(always)]
fn ports(
    frame: &impl Frame,
    packet: &Packet,
    source: (u16, u16),
    destination: (u16, u16),
) -> Option<Difference> {
    if source.0 != source.1 {
        frame.store(packet.payload, &source.1.to_be_bytes())?;
    }
    if destination.0 != destination.1 {
        frame.store(packet.payload + 2, &destination.1.to_be_bytes())?;
    }
    Some(Difference::of_ports(source.0, source.1).and(Difference::of_ports(destination.0, destination.1)))
}
