//! Dummy links: links that lead nowhere, made to hold addresses that this network namespace shall take for its own (rtnetlink).

use std::{collections::BTreeSet, io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::net::if_::if_nametoindex;

use super::{KernelError, netlink::NetlinkSocket};

/// A link by its name, in the network namespace of the thread that opened it.
pub struct DummyLink {
    name: &'static str,
    socket: NetlinkSocket,
    sent: u64,
}

impl std::fmt::Debug for DummyLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DummyLink").field("name", &self.name).finish_non_exhaustive()
    }
}

impl DummyLink {
    /// A link of this name, whether it is there or not.
    pub fn open(name: &'static str) -> Result<Self, KernelError> {
        let socket =
            NetlinkSocket::open(NETLINK_ROUTE).map_err(KernelError::call("open", "an rtnetlink socket"))?;
        Ok(Self { name, socket, sent: 0 })
    }

    /// How many messages were sent since it was opened.
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Its index; none where it is not there.
    fn index(&self) -> Option<u32> {
        if_nametoindex(self.name).ok()
    }

    /// Whether it is there.
    pub fn is_there(&self) -> bool {
        self.index().is_some()
    }

    /// Makes it. It stays down: its addresses are local all the same, and nothing is sent through it.
    pub fn create(&mut self) -> Result<(), KernelError> {
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(self.name.into()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Dummy)]),
        ];
        self.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(message))
            .map_err(KernelError::call("make the dummy link", self.name))
    }

    /// Removes it, with its addresses.
    pub fn remove(&mut self) -> Result<(), KernelError> {
        let Some(index) = self.index() else { return Ok(()) };
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.tell(0, RouteNetlinkMessage::DelLink(message))
            .map_err(KernelError::call("remove the link", self.name))
    }

    /// Its addresses, but for IPv6 link-local ones, which the kernel gives it.
    pub fn addresses(&mut self) -> Result<BTreeSet<IpAddr>, KernelError> {
        let Some(index) = self.index() else { return Ok(BTreeSet::new()) };
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.sent += 1;
        let answers = self
            .socket
            .query(None, NLM_F_DUMP, request)
            .map_err(KernelError::call("list the addresses of", self.name))?;
        let address = |answer| match answer {
            RouteNetlinkMessage::NewAddress(message) if message.header.index == index => address(&message),
            _ => None,
        };
        Ok(answers.into_iter().filter_map(address).collect())
    }

    /// Gives it an address; that it has it already is as good.
    pub fn add(&mut self, address: IpAddr) -> Result<(), KernelError> {
        let message = self.message(address)?;
        match self.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewAddress(message)) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => {
                Err(self.failed("add", address)(error))
            }
            _ => Ok(()),
        }
    }

    /// Takes an address from it; that it has none such is as good.
    pub fn delete(&mut self, address: IpAddr) -> Result<(), KernelError> {
        let message = self.message(address)?;
        match self.tell(0, RouteNetlinkMessage::DelAddress(message)) {
            Err(error) if error.raw_os_error() != Some(libc::EADDRNOTAVAIL) => {
                Err(self.failed("delete", address)(error))
            }
            _ => Ok(()),
        }
    }

    fn failed(&self, operation: &'static str, address: IpAddr) -> impl FnOnce(io::Error) -> KernelError {
        KernelError::call(operation, format!("address {address} of {}", self.name))
    }

    fn message(&self, address: IpAddr) -> Result<AddressMessage, KernelError> {
        let missing = || self.failed("change", address)(io::Error::from_raw_os_error(libc::ENODEV));
        let mut message = AddressMessage::default();
        message.header.index = self.index().ok_or_else(missing)?;
        (message.header.family, message.header.prefix_len) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        Ok(message)
    }

    fn tell(&mut self, flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
        self.sent += 1;
        self.socket.query(None, flags, message).map(drop)
    }
}

fn address(message: &AddressMessage) -> Option<IpAddr> {
    let found = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
        _ => None,
    })?;
    let is_link_local = matches!(found, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!is_link_local).then_some(found)
}
