//! Messages of IPVS' generic netlink family, as in `linux/ip_vs.h`: addresses and ports are in network order, all other numbers
//! in the kernel's.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use super::{Change, RealServer, Timeouts, Traffic, VirtualKey, VirtualServer};
use crate::{
    kernel::nftables::attributes::{self, Attributes},
    net::Protocol,
};

/// `IPVS_CMD_…`.
pub(super) const GET_SERVICE: u8 = 4;
pub(super) const GET_DEST: u8 = 8;
pub(super) const SET_CONFIG: u8 = 12;
pub(super) const GET_CONFIG: u8 = 13;
const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;

/// `IPVS_CMD_ATTR_…`.
const SERVICE: u16 = 1;
const DEST: u16 = 2;
const TIMEOUT_TCP: u16 = 4;
const TIMEOUT_TCP_FIN: u16 = 5;
const TIMEOUT_UDP: u16 = 6;

/// `IPVS_SVC_ATTR_…`.
mod service {
    pub(super) const FAMILY: u16 = 1;
    pub(super) const PROTOCOL: u16 = 2;
    pub(super) const ADDRESS: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const SCHEDULER: u16 = 6;
    pub(super) const FLAGS: u16 = 7;
    pub(super) const TIMEOUT: u16 = 8;
    pub(super) const NETMASK: u16 = 9;
    /// All of them 64 bits wide: kernel 4.1.
    pub(super) const STATS64: u16 = 12;
}

/// `IPVS_STATS_ATTR_…`.
mod stats {
    pub(super) const CONNECTIONS: u16 = 1;
    pub(super) const BYTES_IN: u16 = 4;
    pub(super) const BYTES_OUT: u16 = 5;
}

/// `IPVS_DEST_ATTR_…`.
mod dest {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const PORT: u16 = 2;
    pub(super) const FORWARD: u16 = 3;
    pub(super) const WEIGHT: u16 = 4;
    pub(super) const UPPER_THRESHOLD: u16 = 5;
    pub(super) const LOWER_THRESHOLD: u16 = 6;
    pub(super) const ACTIVE: u16 = 7;
    pub(super) const INACTIVE: u16 = 8;
    pub(super) const FAMILY: u16 = 11;
}

/// `IP_VS_SVC_F_HASHED`, which the kernel sets by itself.
const HASHED: u32 = 2;
/// `IP_VS_CONN_F_MASQ`: packets are translated.
const MASQUERADE: u32 = 0;

impl Change {
    /// The command that makes it.
    pub(super) const fn command(&self) -> u8 {
        match self {
            Self::AddServer(..) => NEW_SERVICE,
            Self::SetServer(..) => SET_SERVICE,
            Self::RemoveServer(_) => DEL_SERVICE,
            Self::AddReal(..) => NEW_DEST,
            Self::SetReal(..) => SET_DEST,
            Self::RemoveReal(..) => DEL_DEST,
        }
    }

    /// Writes what follows the command.
    pub(super) fn write(&self, to: &mut Attributes) {
        match self {
            Self::AddServer(key, server) | Self::SetServer(key, server) => {
                to.nested(SERVICE, |to| {
                    write_key(*key, to);
                    write_server(server, to);
                });
            }
            Self::RemoveServer(key) => write_server_of(*key, to),
            Self::AddReal(key, address, weight) | Self::SetReal(key, address, weight) => {
                write_server_of(*key, to);
                to.nested(DEST, |to| {
                    write_real(*address, to);
                    number(to, dest::FORWARD, MASQUERADE);
                    number(to, dest::WEIGHT, *weight);
                    number(to, dest::UPPER_THRESHOLD, 0);
                    number(to, dest::LOWER_THRESHOLD, 0);
                });
            }
            Self::RemoveReal(key, address) => {
                write_server_of(*key, to);
                to.nested(DEST, |to| write_real(*address, to));
            }
        }
    }
}

/// Names a virtual server.
pub(super) fn write_server_of(key: VirtualKey, to: &mut Attributes) {
    to.nested(SERVICE, |to| write_key(key, to));
}

fn write_key(key: VirtualKey, to: &mut Attributes) {
    to.bytes(service::FAMILY, &family(key.address.ip()).to_ne_bytes());
    to.bytes(service::PROTOCOL, &u16::from(key.protocol.number()).to_ne_bytes());
    to.bytes(service::ADDRESS, &octets(key.address.ip()));
    to.bytes(service::PORT, &key.address.port().to_be_bytes());
}

fn write_server(server: &VirtualServer, to: &mut Attributes) {
    to.text(service::SCHEDULER, &server.scheduler);
    // Which of the flags count: all of them.
    to.bytes(service::FLAGS, &[server.flags.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat());
    number(to, service::TIMEOUT, server.timeout);
    to.bytes(service::NETMASK, &server.netmask.to_ne_bytes());
}

fn write_real(address: SocketAddr, to: &mut Attributes) {
    to.bytes(dest::FAMILY, &family(address.ip()).to_ne_bytes());
    to.bytes(dest::ADDRESS, &octets(address.ip()));
    to.bytes(dest::PORT, &address.port().to_be_bytes());
}

fn number(to: &mut Attributes, kind: u16, value: u32) {
    to.bytes(kind, &value.to_ne_bytes());
}

/// The parts of [`Timeouts`] that are not zero: those the kernel leaves as they are.
pub(super) fn write_timeouts(timeouts: Timeouts, to: &mut Attributes) {
    for (kind, seconds) in
        [(TIMEOUT_TCP, timeouts.tcp), (TIMEOUT_TCP_FIN, timeouts.tcp_fin), (TIMEOUT_UDP, timeouts.udp)]
    {
        if seconds != 0 {
            number(to, kind, seconds);
        }
    }
}

pub(super) fn read_timeouts(attributes: &[u8]) -> Timeouts {
    let seconds = |kind| attributes::find(attributes, kind).and_then(read_number).unwrap_or_default();
    Timeouts { tcp: seconds(TIMEOUT_TCP), tcp_fin: seconds(TIMEOUT_TCP_FIN), udp: seconds(TIMEOUT_UDP) }
}

/// A virtual server in an answer; none that goes by a firewall mark, or is of a protocol that none of ours has.
pub(super) fn read_server(message: &[u8]) -> Option<(VirtualKey, VirtualServer)> {
    let attributes = attributes::find(message, SERVICE)?;
    let find = |kind| attributes::find(attributes, kind);
    let server = VirtualServer {
        scheduler: Arc::from(attributes::text(find(service::SCHEDULER)?)?),
        flags: find(service::FLAGS).and_then(read_number)? & !HASHED,
        timeout: find(service::TIMEOUT).and_then(read_number)?,
        netmask: find(service::NETMASK).and_then(read_number)?,
    };
    Some((read_key(attributes)?, server))
}

/// What the virtual server in an answer had to do; none that [`read_server`] has none of.
pub(super) fn read_traffic(message: &[u8]) -> Option<(VirtualKey, Traffic)> {
    let attributes = attributes::find(message, SERVICE)?;
    let counts = attributes::find(attributes, service::STATS64)?;
    let count = |kind| attributes::find(counts, kind)?.first_chunk().map(|n| u64::from_ne_bytes(*n));
    let traffic = Traffic {
        connections: count(stats::CONNECTIONS)?,
        bytes_in: count(stats::BYTES_IN)?,
        bytes_out: count(stats::BYTES_OUT)?,
    };
    Some((read_key(attributes)?, traffic))
}

fn read_key(attributes: &[u8]) -> Option<VirtualKey> {
    let find = |kind| attributes::find(attributes, kind);
    let protocol = protocol_of(find(service::PROTOCOL)?.first_chunk().map(|n| u16::from_ne_bytes(*n))?)?;
    let is_v6 = i32::from(u16::from_ne_bytes(*find(service::FAMILY)?.first_chunk()?)) == libc::AF_INET6;
    let ip = read_address(find(service::ADDRESS)?, is_v6)?;
    let port = u16::from_be_bytes(*find(service::PORT)?.first_chunk()?);
    Some(VirtualKey { protocol, address: SocketAddr::new(ip, port) })
}

/// A real server in an answer. Before kernel 3.18 its family was that of its virtual server.
pub(super) fn read_real(message: &[u8], of: VirtualKey) -> Option<RealServer> {
    let attributes = attributes::find(message, DEST)?;
    let find = |kind| attributes::find(attributes, kind);
    let count = |kind| find(kind).and_then(read_number);
    let family = find(dest::FAMILY).and_then(|value| value.first_chunk()).map(|n| u16::from_ne_bytes(*n));
    let is_v6 = family.map_or(of.address.is_ipv6(), |family| i32::from(family) == libc::AF_INET6);
    let ip = read_address(find(dest::ADDRESS)?, is_v6)?;
    let port = u16::from_be_bytes(*find(dest::PORT)?.first_chunk()?);
    Some(RealServer {
        address: SocketAddr::new(ip, port),
        weight: count(dest::WEIGHT)?,
        connections: count(dest::ACTIVE)?.saturating_add(count(dest::INACTIVE)?),
    })
}

fn read_number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn read_address(value: &[u8], is_v6: bool) -> Option<IpAddr> {
    if is_v6 {
        value.first_chunk::<16>().map(|octets| Ipv6Addr::from(*octets).into())
    } else {
        value.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets).into())
    }
}

const fn family(address: IpAddr) -> u16 {
    // Both are below 16 bits.
    #[expect(clippy::cast_possible_truncation, reason = "AF_INET is 2, AF_INET6 is 10")]
    match address {
        IpAddr::V4(_) => libc::AF_INET as u16,
        IpAddr::V6(_) => libc::AF_INET6 as u16,
    }
}

/// A `union nf_inet_addr`.
fn octets(address: IpAddr) -> [u8; 16] {
    let mut octets = [0; 16];
    match address {
        IpAddr::V4(v4) => octets[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => octets = v6.octets(),
    }
    octets
}

fn protocol_of(number: u16) -> Option<Protocol> {
    u8::try_from(number).ok().and_then(Protocol::from_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_server_is_read_back_as_it_was_written_without_what_the_kernel_adds() {
        for address in ["10.96.0.10:53", "[fd96::10]:53"] {
            let key = VirtualKey { protocol: Protocol::Udp, address: address.parse().unwrap() };
            let server = VirtualServer::new("rr", key.address.ip()).persistent(10_800);
            let mut attributes = Attributes::default();
            let kept = VirtualServer { flags: server.flags | HASHED, ..server.clone() };
            Change::AddServer(key, kept).write(&mut attributes);
            assert_eq!(read_server(attributes.as_bytes()), Some((key, server)));
        }
    }

    #[test]
    fn a_real_server_is_read_back_with_its_connections() {
        let key = VirtualKey { protocol: Protocol::Tcp, address: "10.96.0.10:80".parse().unwrap() };
        let address: SocketAddr = "10.244.1.11:8080".parse().unwrap();
        let mut attributes = Attributes::default();
        attributes.nested(DEST, |to| {
            write_real(address, to);
            number(to, dest::WEIGHT, 1);
            number(to, dest::ACTIVE, 3);
            number(to, dest::INACTIVE, 4);
        });
        let read = read_real(attributes.as_bytes(), key);
        assert_eq!(read, Some(RealServer { address, weight: 1, connections: 7 }));
    }

    #[test]
    fn the_traffic_of_a_virtual_server_is_read() {
        let key = VirtualKey { protocol: Protocol::Sctp, address: "[fd96::10]:80".parse().unwrap() };
        let mut attributes = Attributes::default();
        attributes.nested(SERVICE, |to| {
            write_key(key, to);
            to.nested(service::STATS64, |to| {
                for (kind, count) in [(1, 3_u64), (2, 20), (3, 10), (4, 1 << 40), (5, 77)] {
                    to.bytes(kind, &count.to_ne_bytes());
                }
            });
        });
        let traffic = Traffic { connections: 3, bytes_in: 1 << 40, bytes_out: 77 };
        assert_eq!(read_traffic(attributes.as_bytes()), Some((key, traffic)));
    }

    #[test]
    fn servers_that_go_by_a_mark_are_none_of_ours() {
        let mut attributes = Attributes::default();
        attributes.nested(SERVICE, |to| {
            to.bytes(service::FAMILY, &2_u16.to_ne_bytes());
            number(to, 5, 77);
        });
        assert_eq!(read_server(attributes.as_bytes()), None);
    }

    #[test]
    fn timeouts_that_are_not_set_are_not_sent() {
        let mut attributes = Attributes::default();
        let timeouts = Timeouts { tcp: 900, tcp_fin: 0, udp: 300 };
        write_timeouts(timeouts, &mut attributes);
        assert_eq!(read_timeouts(attributes.as_bytes()), timeouts);
        assert_eq!(attributes::read(attributes.as_bytes()).count(), 2);
    }
}
