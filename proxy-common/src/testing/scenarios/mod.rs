//! What becomes of packets on links, rule by rule. Each scenario is played for both families of addresses, on the host and by
//! the programs in the kernel.

mod affinity;
mod counted;
mod errors;
mod fragments;
mod headers;
mod ports;
mod sources;
mod tcp;
mod turned_away;
mod udp;

use std::net::{IpAddr, SocketAddr};

use super::{Scene, Sent, Service};
use crate::{Protocol, packet::TcpFlags};

/// A scenario: its name, a sentence, and how it is played.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// The file and function.
    pub name: &'static str,
    /// Plays it in a new scene; panics where packets do not fare as they should.
    pub play: fn(&mut Scene<'_>),
}

/// All of them, file by file.
pub const ALL: [&[Scenario]; 10] = [
    affinity::ALL,
    counted::ALL,
    errors::ALL,
    fragments::ALL,
    headers::ALL,
    ports::ALL,
    sources::ALL,
    tcp::ALL,
    turned_away::ALL,
    udp::ALL,
];

/// Lists a file's scenarios, and makes each a test on the host.
macro_rules! scenarios {
    ($($name:ident,)*) => {
        /// The scenarios of this file.
        pub(super) const ALL: &[super::Scenario] = &[$(
            super::Scenario {
                name: concat!(module_path!(), "::", stringify!($name)),
                play: $name,
            },
        )*];

        #[cfg(test)]
        mod on_the_host {
            $(
                #[test]
                fn $name() {
                    for places in crate::testing::Places::BOTH {
                        let mut bed = crate::testing::Memory::default();
                        super::$name(&mut crate::testing::Scene::new(&mut bed, places));
                    }
                }
            )*
        }
    };
}
use scenarios;

/// Both protocols.
const PROTOS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

fn addr(ip: IpAddr, port: u16) -> SocketAddr {
    (ip, port).into()
}

/// The first packet of a flow.
fn first(proto: Protocol, from: SocketAddr, to: SocketAddr) -> Sent {
    match proto {
        Protocol::Udp => Sent::udp(from, to),
        _ => Sent::tcp(TcpFlags::SYN_ALONE, from, to),
    }
}

/// A service port with one address and one endpoint, and a client outside.
struct Served {
    service: Service,
    vip: SocketAddr,
    endpoint: SocketAddr,
    /// The client's first packet.
    first: Sent,
}

impl Served {
    fn new(scene: &mut Scene<'_>, proto: Protocol) -> Self {
        let vip = addr(scene.at.cluster_ip, 80);
        Self::at(scene, proto, vip, vip)
    }

    /// At the address that maps have, which differs from the VIP for node ports.
    fn at(scene: &mut Scene<'_>, proto: Protocol, vip: SocketAddr, known: SocketAddr) -> Self {
        let endpoint = addr(scene.at.pod, 8080);
        let service = scene.serve(proto, &[known], &[endpoint]);
        let first = first(proto, addr(scene.at.client, 40_000), vip);
        Self { service, vip, endpoint, first }
    }

    /// A client's packet, which is none of a first one's.
    fn next(&self) -> Sent {
        self.first.clone().flags(TcpFlags::ACK_ALONE)
    }

    /// The endpoint's answer to a first packet.
    fn answer(&self) -> Sent {
        self.answer_from(self.endpoint)
    }

    fn answer_from(&self, endpoint: SocketAddr) -> Sent {
        self.first.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK)
    }

    /// Client and endpoint have spoken.
    #[track_caller]
    fn begin(&self, scene: &mut Scene<'_>) {
        scene.enters(&self.first).becomes(&self.first.clone().to(self.endpoint)).is_marked(0);
        scene.leaves(&self.answer()).becomes(&self.answer().from(self.vip)).is_marked(0);
        scene.enters(&self.next()).becomes(&self.next().to(self.endpoint)).is_marked(0);
    }
}

/// The unspecified address of an address's family.
fn any(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}
