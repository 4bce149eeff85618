//! Messages of IPVS (`linux/ip_vs.h`). Addresses and ports have network byte order, all other
//! numbers have the kernel's.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use libc::c_int;

use super::{Change, RealServer, Timeouts, Traffic, VirtualKey, VirtualServer};
use crate::{
    kernel::netlink::{Attributes, MessageBuffer, kernel_constants},
    net::Protocol,
};

kernel_constants! {
    IPVS_CMD_NEW_SERVICE = 1, IPVS_CMD_SET_SERVICE = 2, IPVS_CMD_DEL_SERVICE = 3, IPVS_CMD_GET_SERVICE = 4,
    IPVS_CMD_NEW_DEST = 5, IPVS_CMD_SET_DEST = 6, IPVS_CMD_DEL_DEST = 7, IPVS_CMD_GET_DEST = 8,
    IPVS_CMD_SET_CONFIG = 12, IPVS_CMD_GET_CONFIG = 13,

    IPVS_CMD_ATTR_SERVICE = 1, IPVS_CMD_ATTR_DEST = 2, IPVS_CMD_ATTR_TIMEOUT_TCP = 4,
    IPVS_CMD_ATTR_TIMEOUT_TCP_FIN = 5, IPVS_CMD_ATTR_TIMEOUT_UDP = 6,

    IPVS_SVC_ATTR_AF = 1, IPVS_SVC_ATTR_PROTOCOL = 2, IPVS_SVC_ATTR_ADDR = 3, IPVS_SVC_ATTR_PORT = 4,
    IPVS_SVC_ATTR_SCHED_NAME = 6, IPVS_SVC_ATTR_FLAGS = 7, IPVS_SVC_ATTR_TIMEOUT = 8,
    IPVS_SVC_ATTR_NETMASK = 9,
    // Since kernel 4.1. All values have 64 bits.
    IPVS_SVC_ATTR_STATS64 = 12,
    IPVS_STATS_ATTR_CONNS = 1, IPVS_STATS_ATTR_INBYTES = 4, IPVS_STATS_ATTR_OUTBYTES = 5,

    IPVS_DEST_ATTR_ADDR = 1, IPVS_DEST_ATTR_PORT = 2, IPVS_DEST_ATTR_FWD_METHOD = 3,
    IPVS_DEST_ATTR_WEIGHT = 4, IPVS_DEST_ATTR_U_THRESH = 5, IPVS_DEST_ATTR_L_THRESH = 6,
    IPVS_DEST_ATTR_ACTIVE_CONNS = 7, IPVS_DEST_ATTR_INACT_CONNS = 8, IPVS_DEST_ATTR_ADDR_FAMILY = 11,
}

/// The kernel sets this flag itself.
const IP_VS_SVC_F_HASHED: u32 = 2;
/// Forwarding by NAT.
const IP_VS_CONN_F_MASQ: u32 = 0;

impl Change {
    /// Returns the command.
    pub(super) const fn command(&self) -> c_int {
        match self {
            Self::AddServer(..) => IPVS_CMD_NEW_SERVICE,
            Self::SetServer(..) => IPVS_CMD_SET_SERVICE,
            Self::RemoveServer(_) => IPVS_CMD_DEL_SERVICE,
            Self::AddReal(..) => IPVS_CMD_NEW_DEST,
            Self::SetReal(..) => IPVS_CMD_SET_DEST,
            Self::RemoveReal(..) => IPVS_CMD_DEL_DEST,
        }
    }

    /// Writes the attributes of the command.
    pub(super) fn write(&self, to: &mut MessageBuffer) {
        match self {
            Self::AddServer(key, server) | Self::SetServer(key, server) => {
                to.nested(IPVS_CMD_ATTR_SERVICE, |to| {
                    write_key(*key, to);
                    write_server(server, to);
                });
            }
            Self::RemoveServer(key) => write_server_of(*key, to),
            Self::AddReal(key, address, weight) | Self::SetReal(key, address, weight) => {
                write_server_of(*key, to);
                to.nested(IPVS_CMD_ATTR_DEST, |to| {
                    write_real(*address, to);
                    to.ne32(IPVS_DEST_ATTR_FWD_METHOD, IP_VS_CONN_F_MASQ);
                    to.ne32(IPVS_DEST_ATTR_WEIGHT, *weight);
                    to.ne32(IPVS_DEST_ATTR_U_THRESH, 0);
                    to.ne32(IPVS_DEST_ATTR_L_THRESH, 0);
                });
            }
            Self::RemoveReal(key, address) => {
                write_server_of(*key, to);
                to.nested(IPVS_CMD_ATTR_DEST, |to| write_real(*address, to));
            }
        }
    }
}

/// Writes the attribute that identifies a virtual server.
pub(super) fn write_server_of(key: VirtualKey, to: &mut MessageBuffer) {
    to.nested(IPVS_CMD_ATTR_SERVICE, |to| write_key(key, to));
}

fn write_key(key: VirtualKey, to: &mut MessageBuffer) {
    to.ne16(IPVS_SVC_ATTR_AF, family(key.address.ip()));
    to.ne16(IPVS_SVC_ATTR_PROTOCOL, key.protocol.number().into());
    to.bytes(IPVS_SVC_ATTR_ADDR, &octets(key.address.ip()));
    to.be16(IPVS_SVC_ATTR_PORT, key.address.port());
}

fn write_server(server: &VirtualServer, to: &mut MessageBuffer) {
    to.string(IPVS_SVC_ATTR_SCHED_NAME, &server.scheduler);
    // struct ip_vs_flags: the flags, and a mask of the flags to set.
    to.bytes(IPVS_SVC_ATTR_FLAGS, &[server.flags.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat());
    to.ne32(IPVS_SVC_ATTR_TIMEOUT, server.timeout);
    to.ne32(IPVS_SVC_ATTR_NETMASK, server.netmask);
}

fn write_real(address: SocketAddr, to: &mut MessageBuffer) {
    to.ne16(IPVS_DEST_ATTR_ADDR_FAMILY, family(address.ip()));
    to.bytes(IPVS_DEST_ATTR_ADDR, &octets(address.ip()));
    to.be16(IPVS_DEST_ATTR_PORT, address.port());
}

/// Writes the timeouts that are not zero. The kernel keeps the others.
pub(super) fn write_timeouts(timeouts: Timeouts, to: &mut MessageBuffer) {
    for (kind, seconds) in [
        (IPVS_CMD_ATTR_TIMEOUT_TCP, timeouts.tcp),
        (IPVS_CMD_ATTR_TIMEOUT_TCP_FIN, timeouts.tcp_fin),
        (IPVS_CMD_ATTR_TIMEOUT_UDP, timeouts.udp),
    ] {
        if seconds != 0 {
            to.ne32(kind, seconds);
        }
    }
}

pub(super) fn read_timeouts(message: Attributes<'_>) -> Timeouts {
    let seconds = |kind| message.ne32(kind).unwrap_or_default();
    Timeouts {
        tcp: seconds(IPVS_CMD_ATTR_TIMEOUT_TCP),
        tcp_fin: seconds(IPVS_CMD_ATTR_TIMEOUT_TCP_FIN),
        udp: seconds(IPVS_CMD_ATTR_TIMEOUT_UDP),
    }
}

/// Returns the virtual server in an answer. Returns `None` for servers that are identified by a
/// firewall mark, and for other protocols than TCP, UDP and SCTP.
pub(super) fn read_server(message: Attributes<'_>) -> Option<(VirtualKey, VirtualServer)> {
    let service = message.nested(IPVS_CMD_ATTR_SERVICE)?;
    let server = VirtualServer {
        scheduler: Arc::from(service.string(IPVS_SVC_ATTR_SCHED_NAME)?),
        flags: service.ne32(IPVS_SVC_ATTR_FLAGS)? & !IP_VS_SVC_F_HASHED,
        timeout: service.ne32(IPVS_SVC_ATTR_TIMEOUT)?,
        netmask: service.ne32(IPVS_SVC_ATTR_NETMASK)?,
    };
    Some((read_key(service)?, server))
}

/// Returns the traffic of the virtual server in an answer. Returns `None` where [`read_server`]
/// does.
pub(super) fn read_traffic(message: Attributes<'_>) -> Option<(VirtualKey, Traffic)> {
    let service = message.nested(IPVS_CMD_ATTR_SERVICE)?;
    let stats = service.nested(IPVS_SVC_ATTR_STATS64)?;
    let traffic = Traffic {
        connections: stats.ne64(IPVS_STATS_ATTR_CONNS)?,
        bytes_in: stats.ne64(IPVS_STATS_ATTR_INBYTES)?,
        bytes_out: stats.ne64(IPVS_STATS_ATTR_OUTBYTES)?,
    };
    Some((read_key(service)?, traffic))
}

fn read_key(service: Attributes<'_>) -> Option<VirtualKey> {
    let protocol = Protocol::from_number(u8::try_from(service.ne16(IPVS_SVC_ATTR_PROTOCOL)?).ok()?)?;
    let is_v6 = is_v6(service.ne16(IPVS_SVC_ATTR_AF)?);
    let ip = read_address(service, IPVS_SVC_ATTR_ADDR, is_v6)?;
    Some(VirtualKey { protocol, address: SocketAddr::new(ip, service.be16(IPVS_SVC_ATTR_PORT)?) })
}

/// Returns the real server in an answer. Before kernel 3.18, its family is that of its virtual
/// server.
pub(super) fn read_real(message: Attributes<'_>, server: VirtualKey) -> Option<RealServer> {
    let dest = message.nested(IPVS_CMD_ATTR_DEST)?;
    let is_v6 = dest.ne16(IPVS_DEST_ATTR_ADDR_FAMILY).map_or(server.address.is_ipv6(), is_v6);
    let ip = read_address(dest, IPVS_DEST_ATTR_ADDR, is_v6)?;
    let connections = [IPVS_DEST_ATTR_ACTIVE_CONNS, IPVS_DEST_ATTR_INACT_CONNS].map(|kind| dest.ne32(kind));
    Some(RealServer {
        address: SocketAddr::new(ip, dest.be16(IPVS_DEST_ATTR_PORT)?),
        weight: dest.ne32(IPVS_DEST_ATTR_WEIGHT)?,
        connections: connections[0]?.saturating_add(connections[1]?),
    })
}

/// Reads a `union nf_inet_addr`: 16 bytes, of which IPv4 uses the first four.
fn read_address(attributes: Attributes<'_>, kind: c_int, is_v6: bool) -> Option<IpAddr> {
    if is_v6 {
        attributes.array::<16>(kind).map(IpAddr::from)
    } else {
        attributes.array::<4>(kind).map(IpAddr::from)
    }
}

fn is_v6(family: u16) -> bool {
    i32::from(family) == libc::AF_INET6
}

const fn family(address: IpAddr) -> u16 {
    #[expect(clippy::cast_possible_truncation, reason = "AF_INET is 2, AF_INET6 is 10")]
    match address {
        IpAddr::V4(_) => libc::AF_INET as u16,
        IpAddr::V6(_) => libc::AF_INET6 as u16,
    }
}

/// Returns a `union nf_inet_addr`.
fn octets(address: IpAddr) -> [u8; 16] {
    let mut octets = [0; 16];
    match address {
        IpAddr::V4(v4) => octets[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => octets = v6.octets(),
    }
    octets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_server_is_read_back_without_the_kernels_flag() {
        for address in ["10.96.0.10:53", "[fd96::10]:53"] {
            let key = VirtualKey { protocol: Protocol::Udp, address: address.parse().unwrap() };
            let server = VirtualServer::new("rr", key.address.ip()).persistent(10_800);
            let mut buffer = MessageBuffer::default();
            let server_in_kernel =
                VirtualServer { flags: server.flags | IP_VS_SVC_F_HASHED, ..server.clone() };
            Change::AddServer(key, server_in_kernel).write(&mut buffer);
            assert_eq!(read_server(Attributes(buffer.as_bytes())), Some((key, server)));
        }
    }

    #[test]
    fn real_server_is_read_back_with_its_connections() {
        let key = VirtualKey { protocol: Protocol::Tcp, address: "10.96.0.10:80".parse().unwrap() };
        let address: SocketAddr = "10.244.1.11:8080".parse().unwrap();
        let mut buffer = MessageBuffer::default();
        buffer.nested(IPVS_CMD_ATTR_DEST, |to| {
            write_real(address, to);
            to.ne32(IPVS_DEST_ATTR_WEIGHT, 1);
            to.ne32(IPVS_DEST_ATTR_ACTIVE_CONNS, 3);
            to.ne32(IPVS_DEST_ATTR_INACT_CONNS, 4);
        });
        let read = read_real(Attributes(buffer.as_bytes()), key);
        assert_eq!(read, Some(RealServer { address, weight: 1, connections: 7 }));
    }

    #[test]
    fn traffic_of_a_virtual_server_is_read() {
        let key = VirtualKey { protocol: Protocol::Sctp, address: "[fd96::10]:80".parse().unwrap() };
        let mut buffer = MessageBuffer::default();
        buffer.nested(IPVS_CMD_ATTR_SERVICE, |to| {
            write_key(key, to);
            to.nested(IPVS_SVC_ATTR_STATS64, |to| {
                for (kind, count) in [(1, 3_u64), (2, 20), (3, 10), (4, 1 << 40), (5, 77)] {
                    to.bytes(kind, &count.to_ne_bytes());
                }
            });
        });
        let traffic = Traffic { connections: 3, bytes_in: 1 << 40, bytes_out: 77 };
        assert_eq!(read_traffic(Attributes(buffer.as_bytes())), Some((key, traffic)));
    }

    #[test]
    fn servers_with_a_firewall_mark_are_ignored() {
        let mut buffer = MessageBuffer::default();
        buffer.nested(IPVS_CMD_ATTR_SERVICE, |to| {
            to.ne16(IPVS_SVC_ATTR_AF, 2);
            to.ne32(5, 77);
        });
        assert_eq!(read_server(Attributes(buffer.as_bytes())), None);
    }

    #[test]
    fn timeouts_of_zero_are_not_sent() {
        let mut buffer = MessageBuffer::default();
        let timeouts = Timeouts { tcp: 900, tcp_fin: 0, udp: 300 };
        write_timeouts(timeouts, &mut buffer);
        assert_eq!(read_timeouts(Attributes(buffer.as_bytes())), timeouts);
        assert_eq!(Attributes(buffer.as_bytes()).iter().count(), 2);
    }
}
