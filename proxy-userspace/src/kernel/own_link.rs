//! Links that shunt creates, and their addresses: dummy links, which send nothing and hold
//! addresses that a network namespace takes as its own, and the tunnel to other nodes.

use std::{collections::BTreeSet, io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
    link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::net::if_::if_nametoindex;

use super::{
    KernelError,
    netlink::{NetlinkSocket, attribute},
};

/// A link, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct OwnLink {
    name: &'static str,
    socket: NetlinkSocket,
}

impl OwnLink {
    /// Opens the link with this name. The link need not exist.
    pub fn open(name: &'static str) -> Result<Self, KernelError> {
        let socket =
            NetlinkSocket::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))?;
        Ok(Self { name, socket })
    }

    /// Returns the number of messages that were sent.
    pub const fn message_count(&self) -> u32 {
        self.socket.message_count()
    }

    /// Returns the interface index, if the link exists.
    pub fn index(&self) -> Option<u32> {
        if_nametoindex(self.name).ok()
    }

    /// Returns true if the link exists.
    pub fn exists(&self) -> bool {
        self.index().is_some()
    }

    /// Creates the link as a dummy link. It stays down: its addresses are local nevertheless, and
    /// nothing is sent through it.
    pub fn create_dummy(&mut self) -> Result<(), KernelError> {
        self.create(vec![LinkInfo::Kind(InfoKind::Dummy)])
            .map_err(KernelError::call("create the dummy link", self.name))
    }

    /// Creates the link as a VXLAN link with these options.
    pub(super) fn create_vxlan(&mut self, options: Vec<InfoVxlan>) -> Result<(), KernelError> {
        self.create(vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(options))])
            .map_err(KernelError::call("create the VXLAN link", self.name))
    }

    fn create(&mut self, info: Vec<LinkInfo>) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(self.name.into()), LinkAttribute::LinkInfo(info)];
        self.request(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(message))
    }

    /// Returns the options of the link if it exists and is a VXLAN link.
    pub(super) fn vxlan_options(&self) -> Result<Option<Vec<InfoVxlan>>, KernelError> {
        let Some(index) = self.index() else { return Ok(None) };
        let mut message = LinkMessage::default();
        message.header.index = index;
        let answers = self.socket.query(None, 0, RouteNetlinkMessage::GetLink(message));
        let answers = answers.map_err(KernelError::call("read the link", self.name))?;
        let options = |answer| match answer {
            RouteNetlinkMessage::NewLink(message) => vxlan_options(message),
            _ => None,
        };
        Ok(answers.into_iter().find_map(options))
    }

    /// Sets the link up or down. Succeeds if it does not exist.
    pub(super) fn set(&mut self, is_up: bool) -> Result<(), KernelError> {
        let Some(index) = self.index() else { return Ok(()) };
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = if is_up { LinkFlags::Up } else { LinkFlags::empty() };
        message.header.change_mask = LinkFlags::Up;
        self.request(0, RouteNetlinkMessage::SetLink(message))
            .map_err(KernelError::call(if is_up { "set up" } else { "set down" }, self.name))
    }

    /// Removes the link with its addresses. Succeeds if it does not exist.
    pub fn remove(&mut self) -> Result<(), KernelError> {
        let Some(index) = self.index() else { return Ok(()) };
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.request(0, RouteNetlinkMessage::DelLink(message))
            .map_err(KernelError::call("remove the link", self.name))
    }

    /// Returns the addresses, except IPv6 link-local ones, which the kernel adds. A link that does
    /// not exist has none.
    pub fn addresses(&mut self) -> Result<BTreeSet<IpAddr>, KernelError> {
        let Some(index) = self.index() else { return Ok(BTreeSet::new()) };
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let answers = self.socket.query(None, NLM_F_DUMP, request);
        let answers = answers.map_err(KernelError::call("list the addresses of", self.name))?;
        let address = |answer| match answer {
            RouteNetlinkMessage::NewAddress(message) if message.header.index == index => address(&message),
            _ => None,
        };
        Ok(answers.into_iter().filter_map(address).collect())
    }

    /// Adds an address. Succeeds if the link already has it.
    pub fn add(&mut self, address: IpAddr) -> Result<(), KernelError> {
        self.add_within(address, AddressScope::Universe)
    }

    /// Adds an address that is valid within a scope. The kernel gives packets that leave on other
    /// links no source of the scope of a link. Succeeds if the link already has the address.
    pub(super) fn add_within(&mut self, address: IpAddr, scope: AddressScope) -> Result<(), KernelError> {
        let (flags, exists) = (NLM_F_CREATE | NLM_F_EXCL, libc::EEXIST);
        self.change("add", address, scope, flags, RouteNetlinkMessage::NewAddress, exists)
    }

    /// Deletes an address. Succeeds if the link does not have it.
    pub fn delete(&mut self, address: IpAddr) -> Result<(), KernelError> {
        let scope = AddressScope::Universe;
        self.change("delete", address, scope, 0, RouteNetlinkMessage::DelAddress, libc::EADDRNOTAVAIL)
    }

    /// Adds or deletes an address. The error number `done` means that nothing has to change.
    fn change(
        &mut self,
        operation: &'static str,
        address: IpAddr,
        scope: AddressScope,
        flags: u16,
        message: fn(AddressMessage) -> RouteNetlinkMessage,
        done: i32,
    ) -> Result<(), KernelError> {
        let mut body = AddressMessage::default();
        (body.header.family, body.header.prefix_len) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        body.header.scope = scope;
        body.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        let changed = match self.index() {
            Some(index) => {
                body.header.index = index;
                self.request(flags, message(body))
            }
            None => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        };
        match changed {
            Err(error) if error.raw_os_error() != Some(done) => {
                Err(KernelError::call(operation, format!("address {address} of {}", self.name))(error))
            }
            _ => Ok(()),
        }
    }

    fn request(&mut self, flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
        self.socket.query(None, flags, message).map(drop)
    }
}

fn vxlan_options(message: LinkMessage) -> Option<Vec<InfoVxlan>> {
    let info = message.attributes.into_iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    info?.into_iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(options)) => Some(options),
        _ => None,
    })
}

fn address(message: &AddressMessage) -> Option<IpAddr> {
    let found = attribute!(
        message.attributes,
        AddressAttribute::Local(address) | AddressAttribute::Address(address) => *address
    )?;
    let is_link_local = matches!(found, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!is_link_local).then_some(found)
}
