//! The tunnel to other nodes for direct server return: a VXLAN link whose packets have no Ethernet
//! header (VXLAN-GPE), and whose programs choose the other end of each packet.
//!
//! Packets go to the address of a node, by UDP, so that no pod network and no router has to know
//! them. A link of kind ipip would take the packets of the pod network's own tunnel.

use std::{io, num::NonZeroU16};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::net::if_::if_nametoindex;

use super::{
    KernelError,
    netlink::{NetlinkSocket, attribute},
    sysctl::Sysctl,
};
use crate::net::TUNNEL_LINK;

/// Packets of clients come in on the tunnel, and those to them leave on another link. The kernel
/// uses the higher value of this and that of all links.
const REVERSE_PATH_FILTER: Sysctl = Sysctl("ipv4/conf/shunt-dsr/rp_filter");
const LOOSE: i64 = 2;

/// Creates the tunnel with this UDP port in the network namespace of this thread. Keeps one that is
/// there, because packets may be on their way through it.
pub fn set_up(port: NonZeroU16) -> Result<(), KernelError> {
    let mut socket = open()?;
    if !is_right(&mut socket, port)? {
        remove_with(&mut socket)?;
        request(&mut socket, NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(new_link(port)))
            .map_err(KernelError::call("create the VXLAN link", TUNNEL_LINK))?;
    }
    REVERSE_PATH_FILTER.write(LOOSE)?;
    let mut message = LinkMessage::default();
    message.header.index = index().unwrap_or_default();
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    request(&mut socket, 0, RouteNetlinkMessage::SetLink(message))
        .map_err(KernelError::call("set up the VXLAN link", TUNNEL_LINK))
}

/// Removes the tunnel. Succeeds if it does not exist.
pub fn remove() -> Result<(), KernelError> {
    if index().is_none() {
        return Ok(());
    }
    remove_with(&mut open()?)
}

fn open() -> Result<NetlinkSocket, KernelError> {
    NetlinkSocket::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))
}

fn index() -> Option<u32> {
    if_nametoindex(TUNNEL_LINK).ok()
}

fn new_link(port: NonZeroU16) -> LinkMessage {
    // The kernel accepts no GPE with addresses that it learns.
    let options = vec![
        InfoVxlan::Id(0),
        InfoVxlan::Learning(false),
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Gpe,
        InfoVxlan::Port(port.get()),
    ];
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(TUNNEL_LINK.into()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vxlan),
            LinkInfo::Data(InfoData::Vxlan(options)),
        ]),
    ];
    message
}

/// Returns true if the tunnel exists and has this port.
fn is_right(socket: &mut NetlinkSocket, port: NonZeroU16) -> Result<bool, KernelError> {
    let Some(index) = index() else { return Ok(false) };
    let mut message = LinkMessage::default();
    message.header.index = index;
    let answers = socket.query(None, 0, RouteNetlinkMessage::GetLink(message));
    let answers = answers.map_err(KernelError::call("read the link", TUNNEL_LINK))?;
    Ok(answers.iter().any(|answer| match answer {
        RouteNetlinkMessage::NewLink(message) => has_port(message, port),
        _ => false,
    }))
}

fn has_port(message: &LinkMessage, port: NonZeroU16) -> bool {
    let infos = attribute!(message.attributes, LinkAttribute::LinkInfo(infos) => infos);
    let options = infos.into_iter().flatten().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(options)) => Some(options),
        _ => None,
    });
    let is_set = |wanted: &InfoVxlan| options.is_some_and(|options| options.contains(wanted));
    is_set(&InfoVxlan::Port(port.get()))
        && is_set(&InfoVxlan::CollectMetadata(true))
        && is_set(&InfoVxlan::Gpe)
}

fn remove_with(socket: &mut NetlinkSocket) -> Result<(), KernelError> {
    let Some(index) = index() else { return Ok(()) };
    let mut message = LinkMessage::default();
    message.header.index = index;
    request(socket, 0, RouteNetlinkMessage::DelLink(message))
        .map_err(KernelError::call("remove the link", TUNNEL_LINK))
}

fn request(socket: &mut NetlinkSocket, flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
    socket.query(None, flags, message).map(drop)
}
