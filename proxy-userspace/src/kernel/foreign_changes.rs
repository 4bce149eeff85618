//! Reports when other programs change netfilter rules, links, filters of links, routing rules or
//! IPsec policies, or attach a program by a BPF link.
//!
//! The kernel does not report changes of iptables-legacy, and of programs that are attached through
//! TCX without a BPF link. They have to be read from time to time.

use std::{future::pending, io, time::Duration};

use libc::{NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES, NFT_MSG_NEWGEN, c_int};
use netlink_packet_core::NetlinkBuffer;
use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use tokio::time::{Interval, interval};

use super::{
    KernelError,
    bpf::KnownLinks,
    netlink::{Attributes, messages_of, notifications::Notifications},
    xfrm,
};
use crate::net::TableName;

/// Links, traffic control, and routing rules of IPv4 and IPv6 (`RTNLGRP_*`).
const ROUTE_GROUPS: [u32; 4] = [1, 4, 8, 19];
/// The attribute with the name of the table, in every message about an object of nftables.
const TABLE: c_int = 1;

/// The changes since it was opened, in the network namespace of the caller.
pub struct ForeignChanges {
    own_tables: &'static [TableName],
    netfilter: Option<Notifications>,
    route: Option<Notifications>,
    policies: Option<Notifications>,
    bpf_links: NewBpfLinks,
}

/// How often BPF links are looked for, of which the kernel sends no notification.
const LOOK: Duration = Duration::from_millis(250);

/// The BPF links that others made since the last look.
struct NewBpfLinks {
    own_programs: &'static str,
    /// `None` if this process may not list BPF links.
    known: Option<KnownLinks>,
    looks: Interval,
}

impl NewBpfLinks {
    async fn next(&mut self) {
        loop {
            self.looks.tick().await;
            let Some(known) = &mut self.known else { return pending().await };
            if known.has_others(self.own_programs).unwrap_or(false) {
                return;
            }
        }
    }
}

impl ForeignChanges {
    /// Opens the sockets. A kernel without one of the subsystems reports no changes of it. Changes
    /// of `own_tables` are left out, and BPF links of programs whose names begin with
    /// `own_programs`. Without `CAP_SYS_ADMIN`, no BPF links are reported.
    pub fn open(own_tables: &'static [TableName], own_programs: &'static str) -> Result<Self, KernelError> {
        let nftables = [NFNLGRP_NFTABLES.cast_unsigned()];
        Ok(Self {
            own_tables,
            netfilter: open(NETLINK_NETFILTER, &nftables, "an nfnetlink socket")?,
            route: open(NETLINK_ROUTE, &ROUTE_GROUPS, "an rtnetlink socket")?,
            policies: open(xfrm::PROTOCOL, &xfrm::POLICY_GROUPS, "a socket for IPsec policies")?,
            bpf_links: NewBpfLinks { own_programs, known: KnownLinks::read().ok(), looks: interval(LOOK) },
        })
    }

    /// Waits for the next change. Dropping the future loses no change.
    pub async fn next(&mut self) -> Result<(), KernelError> {
        loop {
            let is_foreign = tokio::select! {
                datagram = next(self.netfilter.as_mut()) => {
                    datagram?.is_none_or(|datagram| is_foreign(datagram, self.own_tables))
                }
                changed = next(self.route.as_mut()) => changed.map(|_| true)?,
                changed = next(self.policies.as_mut()) => changed.map(|_| true)?,
                () = self.bpf_links.next() => true,
            };
            if is_foreign {
                return Ok(());
            }
        }
    }
}

fn open(protocol: isize, groups: &[u32], object: &'static str) -> Result<Option<Notifications>, KernelError> {
    match Notifications::open(protocol, groups, object) {
        Err(KernelError::Call { source, .. }) if is_unsupported(&source) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Returns true for the error of a kernel that does not have a protocol of netlink.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::EPROTONOSUPPORT)
}

async fn next(notifications: Option<&mut Notifications>) -> Result<Option<&[u8]>, KernelError> {
    match notifications {
        Some(notifications) => notifications.next().await,
        None => pending().await,
    }
}

/// Returns true if a datagram of nfnetlink is about a table that is not in `own`.
pub(super) fn is_foreign(datagram: &[u8], own: &[TableName]) -> bool {
    messages_of(datagram).any(|message| is_foreign_message(&message, own))
}

/// Each transaction ends with a message that names no table.
fn is_foreign_message(message: &NetlinkBuffer<&[u8]>, own: &[TableName]) -> bool {
    let [subsystem, kind] = message.message_type().to_be_bytes().map(c_int::from);
    if subsystem != NFNL_SUBSYS_NFTABLES || kind == NFT_MSG_NEWGEN {
        return false;
    }
    let family = message.payload().first().copied().map_or(0, c_int::from);
    let table = Attributes::after_header(message.payload()).string(TABLE);
    own.iter().all(|(own_family, name)| *own_family != family || Some(*name) != table)
}

#[cfg(test)]
mod tests {
    use super::{
        super::netlink::{MessageBuffer, nfgenmsg, nfnl_type},
        *,
    };

    fn message(kind: c_int, family: c_int, table: &str) -> Vec<u8> {
        let mut buffer = MessageBuffer::default();
        let message_type = nfnl_type(NFNL_SUBSYS_NFTABLES, kind);
        buffer.message(message_type, 0, 0, nfgenmsg(family, 0), |to| to.string(TABLE, table));
        buffer.as_bytes().to_vec()
    }

    #[test]
    fn only_changes_of_other_tables_count() {
        let own = [(libc::NFPROTO_INET, "shunt")];
        let ours = message(libc::NFT_MSG_NEWRULE, libc::NFPROTO_INET, "shunt");
        let end = message(NFT_MSG_NEWGEN, 0, "");
        let other = message(libc::NFT_MSG_NEWRULE, libc::NFPROTO_INET, "shunts");
        let other_family = message(libc::NFT_MSG_NEWRULE, libc::NFPROTO_IPV4, "shunt");
        assert!(!is_foreign(&[&*ours, &*end].concat(), &own));
        assert!(is_foreign(&[&*ours, &*other, &*end].concat(), &own));
        assert!(is_foreign(&other_family, &own));
    }
}
