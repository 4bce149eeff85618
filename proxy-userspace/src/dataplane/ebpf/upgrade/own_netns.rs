//! Finds the cookie of this process's network namespace on kernels before 5.14, which do not have
//! `SO_NETNS_COOKIE`.
//!
//! The programs know it: when a UDP socket connects through a Service, they record its namespace.
//! This module inserts a Service that nobody else connects to, connects to it once, and removes it.
//! No packet is sent.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use proxy_common::{
    Addr, Protocol,
    layout::{Endpoint, EndpointKey, EndpointValue, List, ServiceKey, ServiceValue},
};

use super::super::{MapEntry, maps::Maps};
use crate::kernel::{KernelError, netns::NetnsCookie, sock_diag};

/// A documentation address (RFC 5737) and the discard port (9).
const VIP: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 9);
/// The endpoint.
const ENDPOINT: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9);
/// No service port has this identifier: they start with 1, and after a restart with the largest in
/// the maps.
const SERVICE: u32 = 0;

/// Returns the cookie. The programs must be attached to the cgroup of this process.
pub(crate) fn learn(maps: &mut Maps) -> Result<NetnsCookie, KernelError> {
    let service = ServiceKey::new(addr(VIP), VIP.port(), Protocol::Udp);
    let slot = EndpointKey { service: SERVICE, list: List::Cluster.number(), slot: 0 };
    let endpoint = Endpoint::new(addr(ENDPOINT), ENDPOINT.port());
    let endpoint = MapEntry::Endpoint(slot, EndpointValue { endpoint, generation: 0 });
    let service = MapEntry::Service(service, one_endpoint());
    let netns = maps.put(&endpoint).and_then(|()| maps.put(&service)).and_then(|()| connect(maps));
    maps.remove(&service)?;
    maps.remove(&endpoint)?;
    netns
}

fn connect(maps: &Maps) -> Result<NetnsCookie, KernelError> {
    let failed = |what| KernelError::call(what, format!("UDP {VIP}, to learn the network namespace"));
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed("bind for"))?;
    socket.connect(VIP).map_err(failed("connect to"))?;
    let cookie = sock_diag::cookie(&socket).map_err(failed("read the cookie of a socket for"))?;
    maps.udp_socket_netns(cookie)
}

const fn one_endpoint() -> ServiceValue {
    ServiceValue {
        service: SERVICE,
        generation: 0,
        inside_count: 1,
        outside_count: 0,
        affinity_seconds: 0,
        inside_list: List::Cluster as u8,
        outside_list: List::Cluster as u8,
        flags: 0,
    }
}

const fn addr(address: SocketAddrV4) -> Addr {
    Addr::from_v4(address.ip().octets())
}
