//! The tunnel to other nodes for direct server return: a VXLAN link whose packets have no Ethernet
//! header (VXLAN-GPE), and whose programs choose the other end of each packet.
//!
//! Packets go to the address of a node, by UDP, so that no pod network and no router has to know
//! them. A link of kind ipip would take the packets of the pod network's own tunnel.

use std::{
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
};

use netlink_packet_route::{address::AddressScope, link::InfoVxlan};
use nix::net::if_::if_nametoindex;

use super::{KernelError, own_link::OwnLink, sysctl::Sysctl};
use crate::net::TUNNEL_LINK;

/// Packets of clients come in on the tunnel, and those to them leave on another link. The kernel
/// uses the higher value of this and that of all links.
const REVERSE_PATH_FILTER: Sysctl = Sysctl("ipv4/conf/shunt-dsr/rp_filter");
const LOOSE: i64 = 2;

/// The dummy address of IPv4 (RFC 7600, section 4.8). On a link without an address, the kernel
/// drops IPv4 packets whose source is reached by another link, also with a loose filter.
const DUMMY_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 8));

/// Creates the tunnel with this UDP port in the network namespace of this thread. It is down:
/// without a program, the kernel would take packets from anybody. Keeps one that is there, because
/// packets may be on their way through it.
pub fn create(port: NonZeroU16) -> Result<(), KernelError> {
    let mut link = OwnLink::open(TUNNEL_LINK)?;
    if !is_right(&link, port)? {
        link.remove()?;
        link.create_vxlan(options(port))?;
    }
    // Others may have set it since: udev applies the settings of the host to new links.
    REVERSE_PATH_FILTER.ensure(LOOSE)?;
    link.add_within(DUMMY_ADDRESS, AddressScope::Link)
}

/// Sets the tunnel up once it has its program, or down before the program goes.
pub fn set(is_up: bool) -> Result<(), KernelError> {
    OwnLink::open(TUNNEL_LINK)?.set(is_up)
}

/// Returns the interface index of the tunnel, if it exists.
pub fn index() -> Option<u32> {
    if_nametoindex(TUNNEL_LINK).ok()
}

/// Removes the tunnel. Succeeds if it does not exist.
pub fn remove() -> Result<(), KernelError> {
    OwnLink::open(TUNNEL_LINK)?.remove()
}

/// The kernel permits no GPE with addresses that it learns.
fn options(port: NonZeroU16) -> Vec<InfoVxlan> {
    vec![
        InfoVxlan::Id(0),
        InfoVxlan::Learning(false),
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Gpe,
        InfoVxlan::Port(port.get()),
    ]
}

/// Returns true if the tunnel exists and has this port.
fn is_right(link: &OwnLink, port: NonZeroU16) -> Result<bool, KernelError> {
    let present = link.vxlan_options()?.unwrap_or_default();
    Ok(options(port).iter().all(|option| present.contains(option)))
}
