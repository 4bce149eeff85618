//! Reports when another program removes rules or changes a table. Reads the kernel's notifications
//! about nftables (nfnetlink), which include those of iptables on nftables.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use libc::{
    NFNL_SUBSYS_NFTABLES, NFNLGRP_NFTABLES, NFT_MSG_DELCHAIN, NFT_MSG_DELRULE, NFT_MSG_DELTABLE, c_int,
};
use netlink_sys::{AsyncSocket as _, TokioSocket, protocols::NETLINK_NETFILTER};
use socket2::{SockFilter, SockRef};
use tokio::sync::Notify;

use super::{
    KernelError,
    netlink::{messages_of, notifications::Notifications},
};

const REMOVALS: [c_int; 3] = [NFT_MSG_DELTABLE, NFT_MSG_DELCHAIN, NFT_MSG_DELRULE];

/// Notifies `disturbed` when an object with one of these names is removed, in the network namespace
/// of the caller. Returns when netlink fails.
pub async fn report_removals(names: &[&str], disturbed: Arc<Notify>) -> Result<(), KernelError> {
    let mut notifications = open()?;
    loop {
        let datagram = notifications.next().await?;
        if datagram.is_none_or(|datagram| has_removal(datagram, names)) {
            disturbed.notify_one();
        }
    }
}

/// A flag that another program changed a table since it was last read. It is set until the table's
/// changes are reported, and always after reporting fails.
#[derive(Debug)]
pub struct TableChangeFlag {
    changed: AtomicBool,
    /// Changes are not reported any more.
    is_broken: AtomicBool,
}

impl Default for TableChangeFlag {
    fn default() -> Self {
        Self { changed: AtomicBool::new(true), is_broken: AtomicBool::new(false) }
    }
}

impl TableChangeFlag {
    /// Returns true if the table changed, or may have changed.
    pub fn is_set(&self) -> bool {
        self.changed.load(Ordering::Acquire) || self.is_broken.load(Ordering::Acquire)
    }

    /// Clears the flag, before the table is read, unless reporting failed. Returns its old value.
    pub fn take(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel) || self.is_broken.load(Ordering::Acquire)
    }

    fn set(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// Sets the flag for good.
    fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Release);
    }
}

/// The changes of other programs to the tables of one name, in the network namespace of the caller.
pub struct TableChanges {
    notifications: Notifications,
    table: &'static str,
    changed: Arc<TableChangeFlag>,
}

impl TableChanges {
    /// Opens a socket, which receives all changes from now on.
    ///
    /// The changes of the socket with the netlink port `own_port` are left out: they would be more
    /// than a receive buffer can hold.
    pub fn open(
        table: &'static str,
        own_port: u32,
        changed: Arc<TableChangeFlag>,
    ) -> Result<Self, KernelError> {
        let notifications = open()?;
        leave_out(notifications.socket(), own_port)
            .map_err(KernelError::call("filter", "an nfnetlink socket"))?;
        Ok(Self { notifications, table, changed })
    }

    /// Sets the flag and notifies `disturbed` when an object of the table is added or removed. When
    /// netlink fails, sets the flag for good and returns.
    pub async fn report(mut self, disturbed: Arc<Notify>) -> Result<(), KernelError> {
        loop {
            let datagram = self.notifications.next().await.inspect_err(|_| self.changed.set_broken())?;
            let concerns =
                |datagram| messages(datagram).any(|(_, payload)| contains_name(payload, self.table));
            if datagram.is_none_or(concerns) {
                self.changed.set();
                disturbed.notify_one();
            }
        }
    }
}

/// Makes the kernel drop messages of this netlink port (`nlmsg_pid`, the fourth word), by a classic
/// BPF program.
fn leave_out(socket: &TokioSocket, port: u32) -> io::Result<()> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const PORT_OFFSET: u32 = 12;
    let filter = [
        SockFilter::new(LOAD_WORD, 0, 0, PORT_OFFSET),
        // The program loads words in network order.
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, port.to_be()),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ];
    SockRef::from(socket.socket_ref()).attach_filter(&filter)
}

fn open() -> Result<Notifications, KernelError> {
    Notifications::open(NETLINK_NETFILTER, &[NFNLGRP_NFTABLES.cast_unsigned()], "an nfnetlink socket")
}

/// Returns true if a datagram reports the removal of an object with one of these names.
pub(super) fn has_removal(datagram: &[u8], names: &[&str]) -> bool {
    messages(datagram).any(|(message, payload)| {
        REMOVALS.contains(&message) && names.iter().any(|name| contains_name(payload, name))
    })
}

/// Returns message (`NFT_MSG_*`) and payload of each message of nf_tables in a datagram.
fn messages(datagram: &[u8]) -> impl Iterator<Item = (c_int, &[u8])> {
    messages_of(datagram).filter_map(|message| {
        let [subsystem, kind] = message.message_type().to_be_bytes().map(c_int::from);
        (subsystem == NFNL_SUBSYS_NFTABLES).then(|| (kind, message.payload()))
    })
}

/// Returns true if the payload contains this name and a terminating zero. No other part of the
/// message has to be decoded.
fn contains_name(payload: &[u8], name: &str) -> bool {
    let length = name.len();
    payload.windows(length + 1).any(|window| window[..length] == *name.as_bytes() && window[length] == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + payload.len()).expect("short");
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend([kind, 10]);
        bytes.extend([0; 10]);
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_flag_stays_set_after_reporting_failed() {
        let flag = TableChangeFlag::default();
        assert!(flag.take(), "nothing was read yet");
        assert!(!flag.is_set());
        flag.set();
        assert!(flag.take() && !flag.is_set());
        flag.set_broken();
        assert!(flag.take() && flag.is_set(), "no change is reported any more");
    }

    #[test]
    fn only_removals_of_objects_with_these_names_count() {
        let names = ["shunt", "SHUNT-FORWARD"];
        let other = message(2, b"\x09\0\x01\0other\0");
        let ours = message(2, b"\x0a\0\x01\0shunt\0");
        assert!(!has_removal(&other, &names));
        assert!(has_removal(&[&*other, &*ours].concat(), &names));
        assert!(!has_removal(&message(0, b"\x0a\0\x01\0shunt\0"), &names), "a table was added");
        assert!(!has_removal(&message(2, b"\x0b\0\x01\0shunts\0"), &names));
        assert!(!has_removal(&ours[..20], &names), "cut short");
        assert!(!has_removal(&[], &names));
    }
}
