//! Addresses that the kernel takes for its own because of a route that somebody added
//! (`ip route add local`), without an address on a link.

use std::{io, net::IpAddr, time::Duration};

use ipnet::IpNet;
use libc::{
    AF_INET, AF_INET6, RT_TABLE_LOCAL, RTA_DST, RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE, RTN_LOCAL,
    RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV6_ROUTE, RTPROT_KERNEL,
};
use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    KernelError,
    netlink::{Attributes, NetlinkSocket, messages_of, notifications::Notifications, uninterrupted},
};
use crate::net::IpFamily;

/// The length of `struct rtmsg`.
const HEADER: usize = 12;

/// How long to wait before routes are listed again that could not be listed.
const RETRY: Duration = Duration::from_secs(1);

/// These routes in the network namespace of the thread that opened this.
pub(super) struct LocalRoutes {
    /// `None` if routes cannot be watched.
    notifications: Option<Notifications>,
    /// The routes when they were listed last.
    last: Vec<IpNet>,
    /// They could not be listed, and shall be listed again.
    is_due: bool,
}

impl LocalRoutes {
    /// Begins to watch the routes. If that fails, logs it: they are listed nevertheless.
    pub(super) fn watch() -> Self {
        let groups = [RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV6_ROUTE];
        let opened = Notifications::open(NETLINK_ROUTE, &groups, "an rtnetlink socket for routes");
        Self { notifications: opened.inspect_err(log_unwatched).ok(), last: Vec::new(), is_due: false }
    }

    /// Returns the ranges of the routes, sorted. If they cannot be listed, returns what was listed
    /// last.
    pub(super) async fn list(&mut self) -> Vec<IpNet> {
        let listed =
            tokio::task::spawn_blocking(list).await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        // Kernels before 4.20.
        let is_unsupported = |error: &io::Error| error.raw_os_error() == Some(libc::ENOPROTOOPT);
        self.is_due = listed.as_ref().is_err_and(|error| !is_unsupported(error));
        match listed {
            Ok(routes) => self.last = routes,
            Err(error) => {
                tracing::debug!(%error, "cannot list addresses that are local by route: shunt uses those of the last list");
            }
        }
        self.last.clone()
    }

    /// Waits until the routes may have changed since they were listed. Dropping the future loses no
    /// change.
    pub(super) async fn changed(&mut self) {
        if self.is_due {
            return tokio::time::sleep(RETRY).await;
        }
        while let Some(notifications) = &mut self.notifications {
            match notifications.next().await {
                Ok(Some(datagram)) if !has_change(datagram) => {}
                Ok(_) => return,
                Err(error) => {
                    log_unwatched(&error);
                    self.notifications = None;
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

/// Returns the ranges of these routes, sorted. The routes that the kernel adds for addresses of
/// links are not among them, and neither are those of loopback and link-local addresses.
///
/// Only the table `local` counts, as for the address type `local` of netfilter
/// (`__inet_dev_addr_type` in `net/ipv4/fib_frontend.c`). The kernel lists no other table, so the
/// number of routes to other nodes does not matter (`NETLINK_GET_STRICT_CHK`, kernel 4.20).
fn list() -> io::Result<Vec<IpNet>> {
    let socket = NetlinkSocket::open(NETLINK_ROUTE)?;
    socket.check_strictly()?;
    let mut routes = Vec::new();
    for family in [AF_INET, AF_INET6] {
        routes.extend(uninterrupted(|| of_family(&socket, family))?);
    }
    routes.sort();
    routes.dedup();
    Ok(routes)
}

fn of_family(socket: &NetlinkSocket, family: libc::c_int) -> io::Result<Vec<IpNet>> {
    let header = header(family);
    let mut answers = socket.request(RTM_GETROUTE, NLM_F_DUMP, header, |_| {})?;
    let mut routes = Vec::new();
    loop {
        match answers.next() {
            // A kernel without IPv6 lists IPv4 again.
            Ok(Some(answer)) => routes.extend(added_route(answer.payload())),
            Ok(None) => return Ok(routes),
            // There is no such table yet, or no such family.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT)
                ) =>
            {
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns the header of a request for the local routes of a family.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the uapi types are as narrow")]
const fn header(family: libc::c_int) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[at::FAMILY] = family as u8;
    header[at::TABLE] = RT_TABLE_LOCAL;
    header[at::TYPE] = RTN_LOCAL;
    header
}

/// The positions in `struct rtmsg`.
mod at {
    pub(super) const FAMILY: usize = 0;
    pub(super) const LENGTH: usize = 1;
    pub(super) const TABLE: usize = 4;
    pub(super) const PROTOCOL: usize = 5;
    pub(super) const TYPE: usize = 7;
}

/// Reads a route of the table `local` that is not the kernel's own.
fn added_route(payload: &[u8]) -> Option<IpNet> {
    let byte = |at: usize| payload.get(at).copied();
    let is_added = byte(at::TABLE)? == RT_TABLE_LOCAL
        && byte(at::TYPE)? == RTN_LOCAL
        && byte(at::PROTOCOL)? != RTPROT_KERNEL;
    if !is_added {
        return None;
    }
    let first = Attributes(payload.get(HEADER..)?).address(RTA_DST.into());
    let is_v4 = libc::c_int::from(byte(at::FAMILY)?) == AF_INET;
    // The route of all addresses has no destination.
    let any = if is_v4 { IpFamily::V4 } else { IpFamily::V6 }.unspecified();
    let range = IpNet::new(first.unwrap_or(any), byte(at::LENGTH)?).ok()?;
    let is_link_local = matches!(range.addr(), IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!range.addr().is_loopback() && !is_link_local).then_some(range)
}

/// Reads a route with all readers, for fuzz targets.
#[cfg(feature = "fuzzing")]
pub(super) fn read_any(payload: &[u8]) {
    added_route(payload);
}

fn log_unwatched(error: &KernelError) {
    tracing::info!(
        %error,
        "cannot watch routes to local addresses: shunt lists them when an address or link changes"
    );
}

fn has_change(datagram: &[u8]) -> bool {
    messages_of(datagram).any(|message| {
        matches!(message.message_type(), RTM_NEWROUTE | RTM_DELROUTE)
            && added_route(message.payload()).is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{
        command::{Command, Launcher},
        netns,
    };

    fn ip(args: &str) {
        let command = Command::new("ip", &Launcher::default()).args(args.split(' '));
        command.run().unwrap_or_else(|error| panic!("ip {args}: {error}"));
    }

    /// Needs root, as every test of the kernel.
    #[test]
    fn added_routes_are_listed_and_reported_but_not_those_of_addresses() {
        let work = || {
            ip("link set lo up");
            ip("address add 192.0.2.1/24 dev lo");
            ip("route add 198.51.100.0/24 dev lo");
            assert_eq!(list().expect("rtnetlink"), []);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("tokio");
            runtime.block_on(async {
                let mut routes = LocalRoutes::watch();
                ip("route add 198.51.100.128/25 dev lo");
                ip("route add local 203.0.113.0/24 dev lo");
                ip("-6 route add local 2001:db8::7 dev lo");
                let limit = Duration::from_secs(5);
                tokio::time::timeout(limit, routes.changed()).await.expect("a notification");
                tokio::time::timeout(limit, routes.changed()).await.expect("another one");
                let quiet = tokio::time::timeout(Duration::from_millis(50), routes.changed()).await;
                assert!(quiet.is_err(), "no notification of other routes");
            });
            list().expect("rtnetlink").iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let routes = netns::within_new(work).expect("a network namespace");
        assert_eq!(routes, ["203.0.113.0/24", "2001:db8::7/128"]);
    }
}
