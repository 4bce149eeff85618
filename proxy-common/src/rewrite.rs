//! Rewrites addresses and ports of a packet, and all checksums that cover them.

use crate::{
    Addr, Protocol,
    checksum::Difference,
    layout::{Flow, FlowKey},
    packet::{ChecksumCoverage, Frame, IpVersion, Packet, PlainEnds, PlainPacket, Tuple},
    protocol::ChecksumField,
};

/// Rewrites addresses and ports of a TCP or UDP packet, or of its first fragment. Returns `None` if
/// the packet is truncated, or if the kernel has no memory. In the second case the packet may be
/// partly changed.
#[inline(never)]
pub fn transport<F: Frame>(
    frame: &F,
    packet: &Packet,
    protocol: Protocol,
    before: &FlowKey,
    after: &Flow,
) -> Option<()> {
    let checksum = TransportChecksum::of(frame, packet.checksum_field(protocol))?;
    let (addresses, ports) = if packet.is_v4_without_options() {
        store_plain_v4(frame, packet, before, after)?
    } else {
        store_fields(frame, packet, before, after)?
    };
    checksum.fix(frame, packet.version, addresses, ports)
}

/// Rewrites a plain packet that leaves with these Ethernet addresses, one hop later. The
/// differences are those of addresses and ports ([`PlainPacket::differences`]). Returns `None` as
/// [`transport`].
#[inline(always)]
pub fn plain(
    frame: &impl Frame,
    packet: &PlainPacket,
    hardware: &[u8; 12],
    ends: &PlainEnds,
    [addresses, ports]: [Difference; 2],
) -> Option<()> {
    let checksum = TransportChecksum::of(frame, packet.checksum_field())?;
    frame.store(0, packet.start(hardware, ends, addresses).bytes()?)?;
    checksum.fix_plain(frame, packet, addresses, ports)
}

/// Rewrites addresses and ports of a plain packet that goes on through the stack. Returns `None`
/// as [`transport`].
#[inline(always)]
pub fn plain_in_place(frame: &impl Frame, packet: &PlainPacket, ends: &PlainEnds) -> Option<()> {
    let [addresses, ports] = packet.differences(ends);
    let checksum = TransportChecksum::of(frame, packet.checksum_field())?;
    frame.store(PlainPacket::CHECKSUM, &packet.ends(ends, addresses))?;
    checksum.fix_plain(frame, packet, addresses, ports)
}

/// Updates the checksum of a TCP segment of IPv4 at this offset, often with one call of the
/// kernel instead of two.
///
/// Hardware may be meant to complete the checksum (`CHECKSUM_PARTIAL`). The field then has the
/// sum of the pseudo header, in which ports do not count. The kernel adds the difference of the
/// addresses to this sum, and subtracts it from a complete checksum. So the field shows which of
/// both it has. If it does not, because both are the same, the second call does nothing to the
/// sum of the pseudo header.
#[inline(always)]
fn fix_tcp(frame: &impl Frame, offset: u32, addresses: Difference, ports: Difference) -> Option<()> {
    let before = frame.load(offset)?;
    let coverage = ChecksumCoverage { pseudo_header: Some(IpVersion::V4), is_optional: false };
    frame.fix_checksum(offset, addresses, coverage)?;
    let may_be_complete = addresses.is_zero() || frame.load(offset)? == addresses.apply(before);
    if may_be_complete && !ports.is_zero() {
        frame.fix_checksum(offset, ports, ChecksumCoverage { pseudo_header: None, ..coverage })?;
    }
    Some(())
}

/// The checksum of a TCP or UDP packet.
pub(crate) struct TransportChecksum {
    offset: u32,
    is_optional: bool,
    is_absent: bool,
}

impl TransportChecksum {
    /// Finds the checksum, by its field in the frame. Returns `None` if the packet is truncated
    /// before it: then nothing must be written.
    #[inline(always)]
    pub(crate) fn of(frame: &impl Frame, field: Option<ChecksumField>) -> Option<Self> {
        let ChecksumField { offset, is_optional } = field?;
        // A TCP segment has its checksum: who read its flags has checked that.
        let is_absent = is_optional && frame.load(offset)? == [0; 2];
        Some(Self { offset, is_optional, is_absent })
    }

    /// Updates that of a plain packet for changed addresses and ports.
    #[inline(always)]
    fn fix_plain(
        self,
        frame: &impl Frame,
        packet: &PlainPacket,
        addresses: Difference,
        ports: Difference,
    ) -> Option<()> {
        if packet.is_tcp() {
            fix_tcp(frame, self.offset, addresses, ports)
        } else {
            self.fix(frame, IpVersion::V4, addresses, ports)
        }
    }

    /// Updates it for changed addresses and ports.
    #[inline(always)]
    pub(crate) fn fix(
        self,
        frame: &impl Frame,
        version: IpVersion,
        addresses: Difference,
        ports: Difference,
    ) -> Option<()> {
        let Self { offset, is_optional, is_absent } = self;
        if is_absent {
            // The checksum of the IPv4 header compensates for the addresses.
            let is_v4 = version == IpVersion::V4;
            frame.update_hardware_checksum(if is_v4 { ports } else { ports.and(addresses) });
            return Some(());
        }
        if !addresses.is_zero() {
            let coverage = ChecksumCoverage { pseudo_header: Some(version), is_optional };
            frame.fix_checksum(offset, addresses, coverage)?;
        }
        if !ports.is_zero() {
            frame.fix_checksum(offset, ports, ChecksumCoverage { pseudo_header: None, is_optional })?;
        }
        Some(())
    }
}

/// Writes checksum, addresses and ports of an IPv4 header without options, which are adjacent: one
/// helper call instead of up to five. Returns the differences of addresses and ports.
#[inline(always)]
fn store_plain_v4(
    frame: &impl Frame,
    packet: &Packet,
    before: &FlowKey,
    after: &Flow,
) -> Option<(Difference, Difference)> {
    let addresses = Difference::of_addresses(&before.source.addr, &after.source.addr)
        .and(Difference::of_addresses(&before.destination.addr, &after.destination.addr));
    let ports = Difference::of_ports(before.source.port, after.source.port)
        .and(Difference::of_ports(before.destination.port, after.destination.port));
    let word = |addr: &Addr| u128::from(u32::from_le_bytes(addr.words()[3].to_ne_bytes()));
    let port = |port: u16| u128::from(port.swap_bytes());
    // Built in registers, because BPF would otherwise write byte by byte.
    let bytes = u128::from(u16::from_le_bytes(addresses.apply(packet.checksum)))
        | word(&after.source.addr) << 16
        | word(&after.destination.addr) << 48
        | port(after.source.port) << 80
        | port(after.destination.port) << 96;
    let [bytes @ .., _, _] = bytes.to_le_bytes();
    frame.store::<14>(packet.header() + 10, &bytes)?;
    Some((addresses, ports))
}

/// Writes addresses and ports that differ, field by field. Returns the differences of addresses and
/// ports.
#[inline(always)]
fn store_fields(
    frame: &impl Frame,
    packet: &Packet,
    before: &FlowKey,
    after: &Flow,
) -> Option<(Difference, Difference)> {
    let addresses = store_addresses(
        frame,
        packet,
        (before.source.addr, after.source.addr),
        (before.destination.addr, after.destination.addr),
    )?;
    let ports = store_ports(
        frame,
        packet,
        (before.source.port, after.source.port),
        (before.destination.port, after.destination.port),
    )?;
    Some((addresses, ports))
}

/// Rewrites the addresses of a later fragment. The transport checksum is in the first fragment.
#[inline(always)]
pub fn later_fragment(frame: &impl Frame, packet: &Packet, source: Addr, destination: Addr) -> Option<()> {
    let difference =
        store_addresses(frame, packet, (packet.source, source), (packet.destination, destination))?;
    if packet.version == IpVersion::V6 {
        frame.update_hardware_checksum(difference);
    }
    Some(())
}

/// An ICMP error with its inner packet, and the changes to both.
pub struct IcmpError<'a> {
    /// The error.
    pub outer: &'a Packet,
    /// The source of the error after translation.
    pub source: Addr,
    /// The destination of the error after translation.
    pub destination: Addr,
    /// The inner packet, which may be truncated.
    pub inner: &'a Packet,
    /// Addresses and ports of the inner packet.
    pub before: &'a Tuple,
    /// Addresses and ports of the inner packet after translation.
    pub after: &'a Tuple,
}

/// Rewrites an ICMP error and its inner packet. The transport checksum of the inner packet stays,
/// because the packet may be truncated and nobody can verify it.
#[inline(always)]
pub fn icmp_error(frame: &impl Frame, error: &IcmpError<'_>) -> Option<()> {
    let IcmpError { outer, inner, before, after, .. } = error;
    let checksum = outer.payload() + 2;
    let outer_addresses =
        store_addresses(frame, outer, (outer.source, error.source), (outer.destination, error.destination))?;
    let inner_addresses = store_addresses(
        frame,
        inner,
        (before.source.addr, after.source.addr),
        (before.destination.addr, after.destination.addr),
    )?;
    let inner_ports = store_ports(
        frame,
        inner,
        (before.source.port, after.source.port),
        (before.destination.port, after.destination.port),
    )?;
    let payload = match outer.version {
        // The checksum of the inner header compensates for its addresses, and no pseudo header
        // covers the outer addresses.
        IpVersion::V4 => inner_ports,
        IpVersion::V6 => {
            let coverage = ChecksumCoverage { pseudo_header: Some(IpVersion::V6), is_optional: false };
            if !outer_addresses.is_zero() {
                frame.fix_checksum(checksum, outer_addresses, coverage)?;
            }
            inner_addresses.and(inner_ports)
        }
    };
    let coverage = ChecksumCoverage { pseudo_header: None, is_optional: false };
    if payload.is_zero() { Some(()) } else { frame.fix_checksum(checksum, payload, coverage) }
}

/// Writes the addresses that differ, and updates the checksum of an IPv4 header.
#[inline(always)]
fn store_addresses(
    frame: &impl Frame,
    packet: &Packet,
    source: (Addr, Addr),
    destination: (Addr, Addr),
) -> Option<Difference> {
    if source.0 != source.1 {
        store_address(frame, packet, Field::Source, &source.1)?;
    }
    if destination.0 != destination.1 {
        store_address(frame, packet, Field::Destination, &destination.1)?;
    }
    let difference = Difference::of_addresses(&source.0, &source.1)
        .and(Difference::of_addresses(&destination.0, &destination.1));
    if packet.version == IpVersion::V4 && !difference.is_zero() {
        frame.fix_header_checksum(packet.header() + 10, difference)?;
    }
    Some(difference)
}

#[derive(Clone, Copy)]
enum Field {
    Source,
    Destination,
}

#[inline(always)]
fn store_address(frame: &impl Frame, packet: &Packet, field: Field, new: &Addr) -> Option<()> {
    match packet.version {
        IpVersion::V4 => {
            let offset = packet.header() + if matches!(field, Field::Source) { 12 } else { 16 };
            frame.store(offset, &new.words()[3].to_ne_bytes())
        }
        IpVersion::V6 => {
            let offset = packet.header() + if matches!(field, Field::Source) { 8 } else { 24 };
            frame.store(offset, &new.octets)
        }
    }
}

/// Writes the ports that differ.
#[inline(always)]
fn store_ports(
    frame: &impl Frame,
    packet: &Packet,
    source: (u16, u16),
    destination: (u16, u16),
) -> Option<Difference> {
    if source.0 != source.1 {
        frame.store(packet.payload(), &source.1.to_be_bytes())?;
    }
    if destination.0 != destination.1 {
        frame.store(packet.payload() + 2, &destination.1.to_be_bytes())?;
    }
    Some(Difference::of_ports(source.0, source.1).and(Difference::of_ports(destination.0, destination.1)))
}
