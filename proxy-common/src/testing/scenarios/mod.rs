//! What happens to packets on links. Each scenario runs for both IP families, on the host and with
//! the programs in the kernel.

mod affinity;
mod counts;
mod direct;
mod dsr;
mod dsr_return;
mod errors;
mod floods;
mod fragments;
mod headers;
mod maglev;
mod masquerade;
#[cfg(test)]
mod paths;
mod ports;
mod refused;
mod rejected;
mod sources;
mod tcp;
mod twice_nat;
mod udp;

use std::net::{IpAddr, SocketAddr};

use super::{Service, TestNode, TestPacket};
use crate::{Protocol, packet::TcpFlags};

/// Makes the node know a flow of a client on the direct path, on a link that has an XDP program.
/// Returns a packet that comes in.
pub fn know_direct_flow(node: &mut TestNode<'_>, protocol: Protocol) -> TestPacket {
    direct::learned_by_xdp(node, protocol).0
}

/// A scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// The module and function.
    pub name: &'static str,
    /// Runs it on a new node. Panics if a packet has another result than expected.
    pub run: fn(&mut TestNode<'_>),
}

/// All scenarios by file.
pub const ALL: [&[Scenario]; 18] = [
    affinity::ALL,
    counts::ALL,
    direct::ALL,
    dsr::ALL,
    dsr_return::ALL,
    errors::ALL,
    floods::ALL,
    fragments::ALL,
    headers::ALL,
    maglev::ALL,
    masquerade::ALL,
    ports::ALL,
    refused::ALL,
    sources::ALL,
    tcp::ALL,
    twice_nat::ALL,
    rejected::ALL,
    udp::ALL,
];

/// Lists the scenarios of a file, and makes each a test on the host.
macro_rules! scenarios {
    ($($name:ident,)*) => {
        /// The scenarios of this file.
        pub(super) const ALL: &[super::Scenario] = &[$(
            super::Scenario {
                name: concat!(module_path!(), "::", stringify!($name)),
                run: $name,
            },
        )*];

        #[cfg(test)]
        mod on_the_host {
            $(
                #[test]
                fn $name() {
                    for addresses in crate::testing::Addresses::BOTH {
                        let mut maps = crate::testing::MemoryMaps::default();
                        super::$name(&mut crate::testing::TestNode::new(&mut maps, addresses));
                    }
                }
            )*
        }
    };
}
use scenarios;

/// The protocols that the programs translate.
const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

fn addr(ip: IpAddr, port: u16) -> SocketAddr {
    (ip, port).into()
}

/// Returns the first packet of a flow.
fn first(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> TestPacket {
    match protocol {
        Protocol::Udp => TestPacket::udp(from, to),
        _ => TestPacket::tcp(TcpFlags::SYN_ALONE, from, to),
    }
}

/// A service port with one frontend and one endpoint, and a client outside.
struct Fixture {
    service: Service,
    vip: SocketAddr,
    endpoint: SocketAddr,
    /// The first packet of the client.
    first: TestPacket,
}

impl Fixture {
    fn new(node: &mut TestNode<'_>, protocol: Protocol) -> Self {
        let vip = addr(node.ip.cluster_ip, 80);
        Self::at(node, protocol, vip, vip)
    }

    /// `frontend` is the address in the maps. For a node port it is not the VIP.
    fn at(node: &mut TestNode<'_>, protocol: Protocol, vip: SocketAddr, frontend: SocketAddr) -> Self {
        let endpoint = addr(node.ip.pod, 8080);
        let service = node.add_service(protocol, &[frontend], &[endpoint]);
        let first = first(protocol, addr(node.ip.client, 40_000), vip);
        Self { service, vip, endpoint, first }
    }

    /// Returns a later packet of the client.
    fn next(&self) -> TestPacket {
        self.first.clone().flags(TcpFlags::ACK_ALONE)
    }

    /// Returns the reply of the endpoint to the first packet.
    fn reply(&self) -> TestPacket {
        self.reply_from(self.endpoint)
    }

    fn reply_from(&self, endpoint: SocketAddr) -> TestPacket {
        self.first.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK)
    }

    /// Exchanges packets between client and endpoint.
    #[track_caller]
    fn establish(&self, node: &mut TestNode<'_>) {
        node.ingress(&self.first).becomes(&self.first.clone().to(self.endpoint)).is_marked(0);
        node.egress(&self.reply()).becomes(&self.reply().from(self.vip)).is_marked(0);
        node.ingress(&self.next()).becomes(&self.next().to(self.endpoint)).is_marked(0);
    }
}

/// Returns the unspecified address of the IP family.
fn any(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}
