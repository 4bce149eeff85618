//! Creates links, addresses and routes of one network namespace over rtnetlink.

use std::{
    future::Future,
    net::IpAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use anyhow::{Context as _, Result};
use futures::TryStreamExt as _;
use ipnet::IpNet;
use netlink_packet_route::{
    address::{AddressAttribute, AddressFlags},
    route::{RouteMessage, RouteScope},
};
use rtnetlink::{
    Handle, LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection,
};
use tokio::runtime::Runtime;

use super::topology::Route;

/// A netlink socket in the namespace of the thread that opened it.
pub(super) struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

impl Netlink {
    /// Opens a socket in the calling thread's namespace.
    pub(super) fn open() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let handle = {
            let _inside = runtime.enter();
            let (connection, handle, _) = new_connection().context("open a netlink socket")?;
            runtime.spawn(connection);
            handle
        };
        Ok(Self { runtime, handle })
    }

    /// Creates a bridge that forwards from the start.
    pub(super) fn add_bridge(&self, name: &str) -> Result<()> {
        let bridge = LinkBridge::new(name).mcast_snooping(false).up().build();
        self.execute(self.handle.link().add(bridge).execute(), || format!("add bridge {name}"))
    }

    /// Creates a veth pair and moves the far end into `namespace` under the name `far_name`.
    pub(super) fn add_veth(&self, name: &str, namespace: BorrowedFd<'_>, far_name: &str) -> Result<()> {
        let wait = format!("{name}-far");
        let links = self.handle.link();
        self.execute(links.add(LinkVeth::new(name, &wait).build()).execute(), || format!("add veth {name}"))?;
        let moved = LinkUnspec::new_with_index(self.index(&wait)?)
            .name(far_name)
            .setns_by_fd(namespace.as_raw_fd())
            .build();
        self.execute(links.set(moved).execute(), || format!("move the far end of {name}"))
    }

    /// Makes `link` a port of `bridge`.
    pub(super) fn join_bridge(&self, link: &str, bridge: &str) -> Result<()> {
        let port = LinkUnspec::new_with_index(self.index(link)?).controller(self.index(bridge)?).build();
        self.execute(self.handle.link().set(port).execute(), || format!("add {link} to {bridge}"))
    }

    /// Sets a link up.
    pub(super) fn up(&self, link: &str) -> Result<()> {
        let message = LinkMessageBuilder::<LinkUnspec>::new().index(self.index(link)?).up().build();
        self.execute(self.handle.link().set(message).execute(), || format!("set {link} up"))
    }

    /// Adds an address that is usable immediately, without duplicate address detection.
    pub(super) fn add_address(&self, link: &str, address: IpNet) -> Result<()> {
        let index = self.index(link)?;
        let mut request = self.handle.address().add(index, address.addr(), address.prefix_len());
        if address.addr().is_ipv6() {
            request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        self.execute(request.execute(), || format!("add address {address} to {link}"))
    }

    /// Adds a route to what is directly connected to the link.
    pub(super) fn add_link_route(&self, to: IpNet, link: &str) -> Result<()> {
        let builder = route_to(to)?.output_interface(self.index(link)?).scope(RouteScope::Link);
        self.add_route_message(builder.build(), || format!("add route {to} dev {link}"))
    }

    /// Adds a route through a gateway.
    pub(super) fn add_route(&self, route: Route) -> Result<()> {
        let Route { to, via } = route;
        let builder = route_to(to)?.gateway(via).with_context(|| format!("route {to} via {via}"))?;
        self.add_route_message(builder.build(), || format!("add route {to} via {via}"))
    }

    fn add_route_message(&self, message: RouteMessage, what: impl FnOnce() -> String) -> Result<()> {
        self.execute(self.handle.route().add(message).execute(), what)
    }

    fn index(&self, link: &str) -> Result<u32> {
        let found = self.handle.link().get().match_name(link).execute();
        let found = self.runtime.block_on(async { std::pin::pin!(found).try_next().await });
        let message = found.with_context(|| format!("look up link {link}"))?;
        Ok(message.with_context(|| format!("no link {link}"))?.header.index)
    }

    fn execute(
        &self,
        request: impl Future<Output = Result<(), rtnetlink::Error>>,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        self.runtime.block_on(request).with_context(what)
    }
}

fn route_to(to: IpNet) -> Result<RouteMessageBuilder<IpAddr>> {
    RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(to.network(), to.prefix_len())
        .with_context(|| format!("route to {to}"))
}
