//! Asks a copy of the link program what it does with a packet. Nothing of it stays in the kernel.
//!
//! The copy reads the maps that are in use: Services, endpoints and the settings of the node. It
//! has maps of its own for what programs write: flows, affinity and counts. So a packet leaves no
//! flow and no count behind, and each packet is the first one of its connection.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
};

use proxy_common::layout::{MAPS, MapContent, MapDeclaration};

use super::{OBJECT, maps::pinned_marks};
use crate::{
    kernel::{
        KernelError,
        bpf::{
            ProgramCopy,
            test_run::{TestFrame, test_run},
        },
    },
    model::Protocol,
};

/// The program for links with Ethernet headers.
const PROGRAM: &str = "shunt_in_eth";
const ETHERNET: usize = 14;
/// `TC_ACT_SHOT`.
const DROPPED: i32 = 2;

/// What the program did with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rehearsed {
    /// It goes to this destination: the one that it had, or an endpoint.
    Sent(SocketAddr),
    /// It has the mark of packets that are refused.
    Refused,
    /// It is dropped.
    Dropped,
}

/// Runs a copy of the link program, with the maps pinned in a directory, over the first packet of a
/// connection. To the program, the packet comes in on a link that belongs to no pod.
///
/// # Errors
/// Returns an error if the maps are not there, if the kernel refuses the program or the frame, or
/// if the addresses are of two families.
pub fn rehearse(
    pins: &Path,
    source: SocketAddr,
    destination: SocketAddr,
    protocol: Protocol,
) -> Result<Rehearsed, KernelError> {
    let invalid = |what: &str| KernelError::call("build", "a frame")(std::io::Error::other(what.to_owned()));
    let bytes = frame(source, destination, protocol).ok_or_else(|| invalid("two families, or no ports"))?;
    let marks = pinned_marks(pins).ok_or_else(|| invalid("the marks are not known"))?;
    let is_shared = |map: &&MapDeclaration| map.content == MapContent::Config || map.name == "prefilter";
    let names = |maps: Vec<&MapDeclaration>| maps.into_iter().map(|map| map.name).collect::<Vec<_>>();
    let shared = names(MAPS.iter().filter(is_shared).collect());
    let resizable = names(MAPS.iter().filter(|map| !is_shared(map) && map.is_lru).collect());
    // Each CPU has one slot, which no Service has.
    let copy = ProgramCopy::load(OBJECT, PROGRAM, (pins, &shared), &resizable, &[("SERVICE_SLOTS", 1)])?;
    let mut frame = TestFrame { bytes, ..TestFrame::default() };
    let code = test_run(copy.program()?, &mut frame).map_err(KernelError::call("run program", PROGRAM))?;
    if code == DROPPED {
        return Ok(Rehearsed::Dropped);
    }
    if frame.mark & marks.reject != 0 {
        return Ok(Rehearsed::Refused);
    }
    destination_of(&frame.bytes).map(Rehearsed::Sent).ok_or_else(|| invalid("the program shortened it"))
}

/// Builds a frame whose link addresses are zero, as on lo. Checksums are zero: the program only
/// updates them. Returns `None` for two families, or a protocol that links do not translate.
fn frame(source: SocketAddr, destination: SocketAddr, protocol: Protocol) -> Option<Vec<u8>> {
    let transport = transport(source.port(), destination.port(), protocol)?;
    let length = u16::try_from(transport.len()).ok()?;
    let mut frame = vec![0; ETHERNET - 2];
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend((20 + length).to_be_bytes());
            frame.extend([0, 0, 0, 0, 64, protocol.number(), 0, 0]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([protocol.number(), 64]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        _ => return None,
    }
    frame.extend(transport);
    Some(frame)
}

/// A SYN, or a datagram of eight bytes.
fn transport(from: u16, to: u16, protocol: Protocol) -> Option<Vec<u8>> {
    let mut header = [from.to_be_bytes(), to.to_be_bytes()].concat();
    match protocol {
        Protocol::Tcp => {
            // Sequence number, acknowledgement, a header of 20 bytes with SYN, window.
            header.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0]);
        }
        Protocol::Udp => header.extend([0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        Protocol::Sctp => return None,
    }
    Some(header)
}

fn destination_of(frame: &[u8]) -> Option<SocketAddr> {
    let packet = frame.get(ETHERNET..)?;
    let (address, header): (IpAddr, usize) = if packet.first()? >> 4 == 4 {
        (<[u8; 4]>::try_from(packet.get(16..20)?).ok()?.into(), 20)
    } else {
        (<[u8; 16]>::try_from(packet.get(24..40)?).ok()?.into(), 40)
    };
    let port = packet.get(header + 2..header + 4)?.try_into().ok()?;
    Some(SocketAddr::new(address, u16::from_be_bytes(port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_destination() {
        for (from, to) in [("192.0.2.1:4000", "10.96.0.1:80"), ("[2001:db8::1]:4000", "[fd96::1]:80")] {
            let [from, to] = [from, to].map(|text| text.parse().expect(text));
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let frame = frame(from, to, protocol).expect("one family");
                assert_eq!(destination_of(&frame), Some(to));
            }
            assert_eq!(frame(from, to, Protocol::Sctp), None);
        }
        let (from, to) = ("192.0.2.1:1".parse().expect("IPv4"), "[fd96::1]:80".parse().expect("IPv6"));
        assert_eq!(frame(from, to, Protocol::Tcp), None);
    }
}
